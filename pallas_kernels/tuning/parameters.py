"""The free parameters of the kernels, and rules that choose them on every GPU and for every size (`heuristic`).

None of them changes a result's bits: every number is the sum of the same terms in the same order whichever tile comes
first, however many copies are under way, and however wide the block of columns that it belongs to.
"""

from dataclasses import dataclass, fields, replace
from math import log2
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic.device import compute_capability, on_nvidia_gpu
from pallas_kernels.mosaic.row_groups import TILE_COLUMNS, TILE_ROWS

H200 = "NVIDIA H200"
"""The GPU whose table is read on a machine without a GPU, where programs are lowered for one elsewhere."""

SHARED_MEMORY = 227 * 1024
STORE_BYTES = 32 * 1024  # buffers that results leave from
SPARE_BYTES = 2 * 1024  # barriers, and room for sums across warps


def most_stages(columns: int, more: int = 0, *, stores: int = STORE_BYTES) -> int:
    """Slots of a ring, for tiles of so many columns and so many `more` bytes, that fit into shared memory."""
    return (SHARED_MEMORY - stores - SPARE_BYTES) // ((TILE_ROWS + columns) * 64 * 2 + more)


MOST_STAGES = most_stages(TILE_COLUMNS)
NARROW_COLUMNS = TILE_COLUMNS // 2

POWERS_OF_TWO = tuple(1 << i for i in range(9))


def _check(kind: Any, **allowed: tuple[int, ...]) -> None:
    for name, values in allowed.items():
        value = getattr(kind, name)
        if type(value) is not int or value not in values:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(map(str, values))}")


@dataclass(frozen=True)
class TileTuning:
    """Parameters of a kernel that walks over tiles of 128 rows times 256 columns, or 128.

    The tiles are walked in stripes: `tile_width` of them side by side along `minor_dim`, and along the other dimension
    from end to end, back and forth.

    Attributes:
      stages: slots in the ring that operands arrive in; more than 4, or 6 of narrow tiles, do not fit into shared
        memory, and with one the tensor cores would wait for themselves.
      minor_dim: 0 or 1, the stripes cut the tiles' rows or columns.
      tile_width: tiles across a stripe, a power of two, so that finding a tile takes no slow division.
      shares: "dynamic", a block takes the next tile when it is done with one, so that blocks may start late; or
        "fixed", block b takes tiles b, b + blocks and so on. None is dynamic inside a `shard_map` over several devices,
        where collectives hold SMs, and fixed elsewhere. Files of tuned parameters may leave it out.
      columns: a tile's, 256; or 128, in kernels that may have `NARROW` tiles. None is 128 in those of them whose tiles
        would be few, with as many slots as fit, and 256 elsewhere. Files may leave it out.

    Raises:
      ValueError: a value is none of these.
    """

    stages: int = MOST_STAGES
    minor_dim: int = 0
    tile_width: int = 1
    shares: str | None = None
    columns: int | None = None

    def __post_init__(self):
        if self.columns is not None:
            _check(self, columns=(NARROW_COLUMNS, TILE_COLUMNS))
        stages = most_stages(self.columns or TILE_COLUMNS)
        _check(self, stages=tuple(range(2, stages + 1)), minor_dim=(0, 1), tile_width=POWERS_OF_TWO)
        if self.shares not in (None, "dynamic", "fixed"):
            raise ValueError(f"shares={self.shares!r} must be 'dynamic', 'fixed' or None")


@dataclass(frozen=True)
class ColumnBlock:
    """Width of the blocks of output columns that the layer loops over: rows of one block are alive at a time.

    Attributes:
      columns: at most so many, 128, 256 or 512. Wider ones would cost memory that the layer promises to save.

    Raises:
      ValueError: a value is none of these.
    """

    columns: int = 512

    def __post_init__(self):
        _check(self, columns=(128, 256, 512))


@dataclass(frozen=True)
class MmaTuning:
    """Parameters of a kernel for Ampere and later: a tile of 128 rows, and the ring that its operands arrive in.

    Attributes:
      columns: a tile's, 128 or 256. A warp multiplies 32 or 64 of the rows with 64 of the columns.
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
        _check(self, columns=(128, 256), k_step=(32, 64), stages=tuple(range(2, 17)))
        _check(self, abreast=POWERS_OF_TWO, sweep=POWERS_OF_TWO)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that the ring takes."""
        return self.stages * (TILE_ROWS + self.columns) * self.k_step * 2


type Tuning = TileTuning | ColumnBlock | MmaTuning

MMA = "mma_"
"""Begins the names of the kernels for Ampere and later."""

_EXPERT_KERNELS = ("up_projection", "down_projection", "down_backward", "up_backward")
_EXPERT_KERNELS += ("down_weight_gradients", "up_weight_gradients")

KINDS: dict[str, type[TileTuning] | type[ColumnBlock] | type[MmaTuning]] = {
    **dict.fromkeys(_EXPERT_KERNELS, TileTuning),
    "column_block": ColumnBlock,
    **{MMA + kernel: MmaTuning for kernel in _EXPERT_KERNELS},
}
"""Parameters by the name of a kernel."""

NARROW = ("up_projection", "down_projection", "up_backward")
"""Kernels of `TileTuning` whose tiles may be narrow: what the others hold of a tile has as many columns as theirs."""

FEW_TILES_EACH = 4
"""With fewer wide tiles for each multiprocessor, its last one is much of its work: rows are those of a few tokens."""


def with_columns(tuning: TileTuning, wide_tiles: int, blocks: int, *, narrow: bool = True) -> tuple[TileTuning, int]:
    """The parameters of a kernel of `NARROW`, and the columns of its tiles; wide ones unless they may be `narrow`.

    Args:
      tuning: its parameters.
      wide_tiles: how many tiles it would have of 256 columns.
      blocks: how many share them out, one for each multiprocessor.
      narrow: whether it may have narrow ones, too.
    """
    if narrow and tuning.columns is None and wide_tiles < FEW_TILES_EACH * blocks:
        tuning = replace(tuning, columns=NARROW_COLUMNS, stages=most_stages(NARROW_COLUMNS))
    columns = tuning.columns if narrow and tuning.columns else TILE_COLUMNS
    return replace(tuning, columns=columns, stages=min(tuning.stages, most_stages(columns))), columns


BLOCK_KIB = {"8.0": 163, "8.7": 163, "9.0": 227, "10.0": 227, "10.3": 227, "11.0": 227}
"""Shared memory of a block by compute capability; 99 KiB for every other one."""


def block_kib(capability: str | None = None) -> int:
    """Shared memory of a block, of the GPU that jax computes on by default; without one, the least of all GPUs."""
    return BLOCK_KIB.get(capability or compute_capability() or "", 99)


class Tiles(NamedTuple):
    """The tiles of a launch for gated experts.

    Attributes:
      rows: row tiles, of an expert's gradient or of all pairs.
      columns: column tiles of the same.
      matrices: gradients of experts in the launch; 1 for other kernels.
      depth: the contracted dimension of the up projection and the down backward.
    """

    rows: int
    columns: int
    matrices: int
    depth: int

    @classmethod
    def of(cls, kernel: str, shape: str) -> "Tiles":
        """The tiles of `kernel`, without its prefix, at a `shape_key`."""
        sizes = dict(part.split("=") for part in shape.split(",")[:-1])
        pairs, (d, n, experts) = 1 << int(sizes["rows"].removeprefix("2^")), (int(sizes[name]) for name in "dnE")
        columns = -(-(2 * n if kernel.startswith("up") else n) // TILE_COLUMNS)
        if kernel.endswith("weight_gradients"):
            return cls(-(-d // TILE_ROWS), columns, experts, d)
        if kernel in ("down_projection", "up_backward"):
            columns = ColumnBlock().columns // TILE_COLUMNS
        return cls(pairs // TILE_ROWS, columns, 1, d)


LARGE_MATRIX = 32 * 2**20
"""Bytes of an expert's weights that an L2 cache of 50 MB has lost when the next row tile wants them."""

FEW_TILES = 2048
"""With fewer, blocks that take two each would leave more multiprocessors idle at the end than the sweep saves, 5%."""


def heuristic(kernel: str, shape: str) -> Tuning:
    """The parameters of `kernel`, a name of `KINDS`, for a `shape` (of `shape_key`) that no table has."""
    kind = KINDS[kernel]
    if kind is MmaTuning:
        return mma_heuristic(kernel, shape.rpartition(",")[2], shape=shape)
    return _tile_heuristic(kernel, shape) if kind is TileTuning else ColumnBlock()


def _tile_heuristic(kernel: str, shape: str) -> TileTuning:
    """All of shared memory, and a row tile's column tiles one after the other: SMs share rows and weights in the L2.

    An H200 measured the exceptions. Weights that do not stay in the L2 are walked in stripes, of 16 column tiles by the
    up projection, which then stay, and of 4 row tiles by the down backward (5% at d = 2048, n = 8192). A weight
    gradient is walked in stripes of 8 row tiles (2% to 7% at three sizes), or of 4 where it has many tiles both ways
    (2% to 3% at d = 4096, n = 1024).
    """
    tiles = Tiles.of(kernel, shape)
    if kernel.endswith("weight_gradients"):
        return TileTuning(tile_width=4 if tiles.rows >= 32 and tiles.columns >= 4 else 8)
    if 2 * tiles.columns * TILE_COLUMNS * tiles.depth >= LARGE_MATRIX:
        if kernel == "up_projection":
            return TileTuning(minor_dim=1, tile_width=16)
        if kernel == "down_backward":
            return TileTuning(tile_width=4)
    return TileTuning()


def mma_heuristic(kernel: str, dtype: str, capability: str | None = None, *, shape: str | None = None) -> MmaTuning:
    """The largest tile whose ring fits, with slots for a copy to take a step or two, and sweeps where tiles are many.

    Row tiles abreast share a panel of weights. An H200 measured 8 in the up projection where column tiles are many (1%
    to 2%), 8 in a weight gradient, and 4 where an expert's gradient alone has more tiles than there are SMs (3%).

    Args:
      kernel: a name of `KINDS`.
      dtype: the operands' type.
      capability: the GPU's, such as "8.6"; None for the one that jax computes on. Without one, what fits all.
      shape: the call's, by `shape_key`; None for a launch of many narrow rows of tiles.
    """
    kernel = kernel.removeprefix(MMA)
    tiles = Tiles.of(kernel, shape) if shape else Tiles(1, 1, FEW_TILES, 0)
    if kernel.endswith("weight_gradients"):
        abreast = 4 if tiles.rows * tiles.columns >= 256 else 8
    else:
        abreast = 8 if kernel == "up_projection" and tiles.columns >= 8 else 1
    if block_kib(capability) >= 227 and dtype != "float32":
        if tiles.rows * tiles.columns * tiles.matrices >= FEW_TILES:  # sweeps where they save time and spill nothing
            if kernel == "up_weight_gradients":
                return MmaTuning(256, 64, 3, abreast, 2)
            if kernel == "down_projection":
                return MmaTuning(256, 64, 4, abreast, 2)
        return MmaTuning(256, 64, 4, abreast)
    if block_kib(capability) > 99:
        return MmaTuning(256, 64, 3, abreast)
    return MmaTuning(128, 64, 3, abreast) if dtype == "float32" else MmaTuning(256, 32, 4, abreast)


def shape_key(rows: int, dtype, **sizes: int) -> str:
    """The shape of a call as tables have it.

    Args:
      rows: (token, expert) pairs, or rows that hold them; rounded to the nearest power of two.
      dtype: the rows'.
      sizes: other sizes by name, taken as they are.
    """
    parts = [f"rows=2^{round(log2(max(rows, 1)))}", *(f"{name}={size}" for name, size in sizes.items())]
    return ",".join([*parts, jnp.dtype(dtype).name])


def nvidia_gpu() -> str | None:
    """Name of the GPU with kernels here that jax computes on, None if it is another device."""
    return jax.devices()[0].device_kind if on_nvidia_gpu() else None


def parse(kernel: str, values: Any) -> Tuning:
    """Parameters from a file.

    Raises:
      ValueError: there is no such kernel, or these are not its parameters.
    """
    if kernel not in KINDS:
        raise ValueError(f"there is no kernel {kernel!r} to tune")
    names = [field.name for field in fields(KINDS[kernel])]
    optional = {"sweep", "shares", "columns"} if KINDS[kernel] is TileTuning else {"sweep"}
    if not isinstance(values, dict) or not {*names} - optional <= set(values) <= {*names}:
        raise ValueError(f"the parameters of {kernel} must be {', '.join(names)}, got {values!r}")
    return checked(kernel, KINDS[kernel](**values))


def checked(kernel: str, tuning: Any) -> Any:
    """Parameters of a kernel; ValueError unless they are of its class, and narrow only where it may be."""
    if not isinstance(tuning, KINDS[kernel]):
        raise ValueError(f"tuning={tuning!r} of {kernel} must be a {KINDS[kernel].__name__} or None")
    if isinstance(tuning, TileTuning) and tuning.columns == NARROW_COLUMNS and kernel not in NARROW:
        raise ValueError(f"columns={tuning.columns} of {kernel} must be {TILE_COLUMNS}")
    return tuning
