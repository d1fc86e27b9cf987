"""Which tile a call gets."""

from dataclasses import asdict

import jax
from jaxtyping import Array

from pallas_kernels.ampere.tile import Tile
from pallas_kernels.contract import Dispatch
from pallas_kernels.mosaic.row_groups import TileSchedule
from pallas_kernels.tuning.parameters import MMA, MmaTuning, find_tuning, mma_heuristic, shape_key


def tuned_tile(
    kernel: str, own: MmaTuning | None, rows: Array | jax.ShapeDtypeStruct, d: int, groups: Dispatch[TileSchedule]
) -> Tile:
    """The tile of a kernel for rows `(R, n)` of tokens of width d: `own`, or as tables have it, or the heuristic's."""
    num_rows, n = rows.shape
    shape = shape_key(num_rows, rows.dtype, d=d, n=n, E=groups.num_experts)
    return _tile(find_tuning(MmaTuning, MMA + kernel, own, shape))


def default_tile(capability: str | None = None, *, kernel: str = "up_projection", kind: str = "bfloat16") -> Tile:
    """The heuristic's tile of a kernel for a compute capability such as "8.6", of operands of `kind`."""
    return _tile(mma_heuristic(kernel, kind, capability))


def _tile(tuning: MmaTuning) -> Tile:
    return Tile(**asdict(tuning))
