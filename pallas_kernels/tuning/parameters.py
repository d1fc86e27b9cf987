"""The free parameters of the kernels, and which a call gets: its own, the user's, the package's, or a guess.

None of them changes a result's bits: every number is the sum of the same terms in the same order whichever tile comes
first, however many copies are under way, and however wide the block of columns that it belongs to.
"""

from dataclasses import dataclass, fields
from math import log2
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic.device import compute_capability, on_nvidia_gpu
from pallas_kernels.mosaic.row_groups import TILE_COLUMNS, TILE_ROWS
from pallas_kernels.tuning import files as tuning_files

H200 = "NVIDIA H200"
"""The GPU whose table is read on a machine without a GPU, where programs are lowered for one elsewhere."""

SHARED_MEMORY = 227 * 1024
SLOT_BYTES = (TILE_ROWS + TILE_COLUMNS) * 64 * 2
STORE_BYTES = 32 * 1024  # buffers that results leave from
SPARE_BYTES = 2 * 1024  # barriers, and room for sums across warps
MOST_STAGES = (SHARED_MEMORY - STORE_BYTES - SPARE_BYTES) // SLOT_BYTES


def _check(kind: Any, **allowed: tuple[int, ...]) -> None:
    for name, values in allowed.items():
        value = getattr(kind, name)
        if type(value) is not int or value not in values:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(map(str, values))}")


@dataclass(frozen=True)
class TileTuning:
    """Of a kernel that walks over tiles of 128 rows times 256 columns.

    The tiles are walked in stripes: `tile_width` of them side by side along `minor_dim`, and along the other dimension
    from end to end, back and forth.

    Attributes:
      stages: slots of 48 KiB in the ring that operands arrive in; more than 4 do not fit into shared memory, and with
        one the tensor cores would wait for themselves.
      minor_dim: 0 or 1, the stripes cut the tiles' rows or columns.
      tile_width: tiles across a stripe, a power of two, so that finding a tile takes no slow division.
      shares: "dynamic", a block takes the next tile when it is done with one, so that blocks may start late; or
        "fixed", block b takes tiles b, b + blocks and so on. None is dynamic inside a `shard_map` over several devices,
        where collectives hold SMs, and fixed elsewhere. Files of tuned parameters may leave it out.

    Raises:
      ValueError: a value is none of these.
    """

    stages: int = MOST_STAGES
    minor_dim: int = 0
    tile_width: int = 1
    shares: str | None = None

    def __post_init__(self):
        widths = tuple(1 << i for i in range(9))
        _check(self, stages=tuple(range(2, MOST_STAGES + 1)), minor_dim=(0, 1), tile_width=widths)
        if self.shares not in (None, "dynamic", "fixed"):
            raise ValueError(f"shares={self.shares!r} must be 'dynamic', 'fixed' or None")


@dataclass(frozen=True)
class ColumnBlock:
    """Of the loop over blocks of output columns: rows of one block are alive at a time.

    Attributes:
      columns: of a block at most, 128, 256 or 512. Wider ones would cost memory that the layer promises to save.

    Raises:
      ValueError: a value is none of these.
    """

    columns: int = 512

    def __post_init__(self):
        _check(self, columns=(128, 256, 512))


@dataclass(frozen=True)
class MmaTuning:
    """Of a kernel for Ampere and later: a tile of 128 rows, and the ring of slots that its operands arrive in.

    Attributes:
      columns: of a tile, 128 or 256. A warp multiplies 32 or 64 of the rows with 64 of the columns.
      k_step: 32 or 64, how much of the contracted dimension is in a slot; half as much of float32, which must have 64.
      stages: slots; all but one are on their way while the last is multiplied.
      abreast: row tiles whose first column tiles are taken before any of their second ones.
      sweep: column tiles of a block at most, one after the other; the next one's first slots arrive while one ends.
        Files of tuned parameters may leave it out.

    Raises:
      ValueError: a value is none of these.
    """

    columns: int
    k_step: int
    stages: int
    abreast: int = 1
    sweep: int = 1

    def __post_init__(self):
        widths = tuple(1 << i for i in range(9))
        _check(self, columns=(128, 256), k_step=(32, 64), stages=tuple(range(2, 17)), abreast=widths, sweep=widths)

    @property
    def shared_bytes(self) -> int:
        """Of shared memory."""
        return self.stages * (TILE_ROWS + self.columns) * self.k_step * 2


type Tuning = TileTuning | ColumnBlock | MmaTuning

MMA = "mma_"
"""What the names of the kernels for Ampere and later begin with."""

KINDS: dict[str, type[TileTuning] | type[ColumnBlock] | type[MmaTuning]] = {
    "up_projection": TileTuning,
    "down_projection": TileTuning,
    "down_backward": TileTuning,
    "down_weight_gradients": TileTuning,
    "up_weight_gradients": TileTuning,
    "up_backward": TileTuning,
    "column_block": ColumnBlock,
    f"{MMA}up_projection": MmaTuning,
    f"{MMA}down_projection": MmaTuning,
    f"{MMA}down_backward": MmaTuning,
    f"{MMA}down_weight_gradients": MmaTuning,
    f"{MMA}up_weight_gradients": MmaTuning,
    f"{MMA}up_backward": MmaTuning,
}
"""What there is to tune, and by which parameters."""

BLOCK_KIB = {"8.0": 163, "8.7": 163, "9.0": 227, "10.0": 227, "10.3": 227, "11.0": 227}
"""Shared memory of a block by compute capability; 99 KiB for every other one."""


def heuristic[K: TileTuning | ColumnBlock | MmaTuning](kind: type[K], kernel: str, shape: str) -> K:
    """Parameters of `kernel` for a `shape` (of `shape_key`) that no table has: so far the same for all sizes.

    A row tile's column tiles follow each other, so that the SMs share gathered rows and an expert's weights in the L2;
    an expert's gradient is done in stripes of 8 row tiles, which saved 2% to 7% at three sizes; all of shared memory is
    in use.
    """
    if kind is MmaTuning:
        return mma_heuristic(kernel, shape.rpartition(",")[2], tiles=_tiles(kernel, shape))  # pyright: ignore[reportReturnType]
    return kind(tile_width=8) if kernel.endswith("weight_gradients") else kind()  # pyright: ignore[reportCallIssue]


def block_kib(capability: str | None = None) -> int:
    """Shared memory of a block, of the GPU that jax computes on by default; without one, the least of all GPUs."""
    return BLOCK_KIB.get(capability or compute_capability() or "", 99)


FEW_TILES = 2048
"""With fewer, blocks that take two each would leave more multiprocessors idle at the end than the sweep saves, 5%."""


def _tiles(kernel: str, shape: str) -> int:
    """Of all rows times a block of columns, or of all experts' gradients of gate and up."""
    *named, _ = shape.split(",")
    sizes = {name: value for name, _, value in (part.partition("=") for part in named)}
    rows = 1 << int(sizes["rows"].removeprefix("2^"))
    if not kernel.endswith("weight_gradients"):
        return rows // TILE_ROWS * ColumnBlock().columns // TILE_COLUMNS
    d, n, experts = (int(sizes[name]) for name in ("d", "n", "E"))
    return experts * -(-d // TILE_ROWS) * -(-2 * n // TILE_COLUMNS)


def mma_heuristic(kernel: str, dtype: str, capability: str | None = None, *, tiles: int = FEW_TILES) -> MmaTuning:
    """The largest tile whose ring fits, with slots for a copy to take a step or two, and sweeps where tiles are many.

    Args:
      kernel: a name of `KINDS`.
      dtype: of the operands.
      capability: of the GPU, such as "8.6"; None: of the one that jax computes on. Without one, what fits all.
      tiles: of a launch; many by default.
    """
    abreast = 8 if kernel.endswith("weight_gradients") else 1
    if block_kib(capability) >= 227 and dtype != "float32":  # sweeps where they saved time and no register is spilled
        short = {"up_weight_gradients": MmaTuning(256, 64, 3, 8, 2), "down_projection": MmaTuning(256, 64, 4, 1, 2)}
        swept = short.get(kernel.removeprefix(MMA)) if tiles >= FEW_TILES else None
        return swept or MmaTuning(256, 64, 4, abreast)
    if block_kib(capability) > 99:
        return MmaTuning(256, 64, 3, abreast)
    return MmaTuning(128, 64, 3, abreast) if dtype == "float32" else MmaTuning(256, 32, 4, abreast)


def shape_key(rows: int, dtype, **sizes: int) -> str:
    """The shape of a call as tables have it.

    Args:
      rows: (token, expert) pairs, or rows that hold them; rounded to the nearest power of two.
      dtype: of the rows.
      sizes: other sizes by name, taken as they are.
    """
    parts = [f"rows=2^{round(log2(max(rows, 1)))}", *(f"{name}={size}" for name, size in sizes.items())]
    return ",".join([*parts, jnp.dtype(dtype).name])


def hopper_gpu() -> str | None:
    """Name of the Hopper GPU that jax computes on, None if it is another device."""
    return jax.devices()[0].device_kind if compute_capability() == "9.0" else None


def nvidia_gpu() -> str | None:
    """Name of the GPU with kernels here that jax computes on, None if it is another device."""
    return jax.devices()[0].device_kind if on_nvidia_gpu() else None


def _gpu() -> str:
    """The GPU whose table is read."""
    return nvidia_gpu() or H200


def tables_in_use() -> tuple:
    """What tells the tables that `find_tuning` reads from others: while it is the same, so are the parameters found."""
    return _gpu(), *tuning_files.user_version()


def find_tuning[K: TileTuning | ColumnBlock | MmaTuning](kind: type[K], kernel: str, own: K | None, shape: str) -> K:
    """The parameters of a call: `own` if there are, else the user's, else the package's, else the heuristic.

    Args:
      kind: of the parameters, `KINDS[kernel]`.
      kernel: a name of `KINDS`.
      own: what the caller asks for.
      shape: of the call, by `shape_key`.

    Raises:
      ValueError: `own` is of another kind.
    """
    if own is not None:
        if not isinstance(own, kind):
            raise ValueError(f"tuning={own!r} of {kernel} must be a {kind.__name__} or None")
        return own
    place = (_gpu(), kernel, shape)
    for tunings in (tuning_files.user_tunings(parse), tuning_files.package_tunings(parse)):
        found = tunings.get(place)
        if isinstance(found, kind):
            return found
    return heuristic(kind, kernel, shape)


def parse(kernel: str, values: Any) -> Tuning:
    """Parameters from a file.

    Raises:
      ValueError: there is no such kernel, or these are not its parameters.
    """
    if kernel not in KINDS:
        raise ValueError(f"there is no kernel {kernel!r} to tune")
    names = [field.name for field in fields(KINDS[kernel])]
    if not isinstance(values, dict) or not {*names} - {"shares", "sweep"} <= set(values) <= {*names}:
        raise ValueError(f"the parameters of {kernel} must be {', '.join(names)}, got {values!r}")
    return KINDS[kernel](**values)
