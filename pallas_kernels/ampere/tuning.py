"""Which tile a GPU gets. So far one of two, by the shared memory of a block; no table was measured yet."""

from pallas_kernels.ampere.tile import Tile
from pallas_kernels.mosaic.device import compute_capability

LARGE = Tile(columns=256, k_step=64, stages=3)
"""144 KiB, for 8.0, 9.0 and 10.0."""

SMALL = Tile(columns=256, k_step=32, stages=4)
"""96 KiB, for every GPU since Ampere."""

SMALL_FLOAT32 = Tile(columns=256, k_step=64, stages=2)
"""The same for float32, of which a slot must have 32 of the contracted dimension: as many bytes as 64 of 16 bits."""

_SMALL_CAPABILITIES = ("8.6", "8.9", "12.0", "12.1")


def default_tile(capability: str | None = None, *, kind: str = "bfloat16") -> Tile:
    """The tile for a compute capability such as "8.6", by default that of the GPU that jax computes on.

    Args:
      capability: of the GPU.
      kind: dtype of the operands.
    """
    capability = capability or compute_capability()
    if capability not in (None, *_SMALL_CAPABILITIES):
        return LARGE
    return SMALL_FLOAT32 if kind == "float32" else SMALL
