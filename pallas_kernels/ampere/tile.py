"""The shape of a tile and which one a call gets, where its operands lie in shared memory, and which part is whose."""

from dataclasses import asdict, dataclass
from typing import NamedTuple

import jax
from jaxtyping import Array

from pallas_kernels import simt
from pallas_kernels.contract import Dispatch
from pallas_kernels.mosaic.row_groups import TILE_ROWS, TileSchedule
from pallas_kernels.simt.matrices import CHUNK
from pallas_kernels.simt.values import Int, minimum
from pallas_kernels.tuning import find_tuning
from pallas_kernels.tuning.parameters import MMA, MmaTuning, mma_heuristic

WARPGROUPS = 2
THREADS = WARPGROUPS * 128
WARPS = THREADS // 32
PANEL = 64
"""Columns of a panel of the right operand: 128 bytes of every row of it, and so are the rows of shared memory."""

HALF = PANEL // 2
"""Columns of half a panel. A warp has two halves of panels, of two projections where there are two."""


@dataclass(frozen=True)
class Tile(MmaTuning):
    """A tile, and where its operands lie in a slot."""

    @property
    def panels(self) -> int:
        return self.columns // PANEL

    @property
    def warp_rows(self) -> int:
        return TILE_ROWS * self.panels // WARPS

    def sweeps(self, column_tiles: int) -> int:
        """The number of blocks that share the column tiles of a row tile."""
        return -(-column_tiles // self.sweep)

    @property
    def lhs_words(self) -> int:
        """32-bit words of a slot before the right operand."""
        return TILE_ROWS * self.k_step // 2

    @property
    def panel_words(self) -> int:
        return self.k_step * PANEL // 2

    @property
    def slot_words(self) -> int:
        return self.lhs_words + self.panels * self.panel_words

    def lhs_word(self, row: Int, chunk: Int) -> Int:
        """The word where 16 bytes of a left operand's row are. Eight rows that are read at once are in all 32 banks."""
        swizzle = row % 8 if self.k_step == 64 else (row >> 1) % 4
        return row * (self.k_step // 2) + (chunk ^ swizzle) * 4

    def lhs_copies(self, thread: Int) -> tuple[Int, Int, int, int]:
        """First row and chunk that a thread copies of the left operand, how many rows, and how far apart."""
        chunks = self.k_step // CHUNK
        apart = THREADS // chunks
        return thread // chunks, thread % chunks, TILE_ROWS // apart, apart


class WarpPart(NamedTuple):
    """The part of a tile that the thread's warp multiplies: from `row` on, and two halves of panels.

    Attributes:
      lane: the thread's.
      row: the first one.
      panel: the first half's; the second one is in the panel `panels / 2` later.
      half: which half of the two panels, 0 or 1.
    """

    lane: Int
    row: Int
    panel: Int
    half: Int

    @classmethod
    def of(cls, tile: Tile) -> "WarpPart":
        warp, lane = simt.warp(), simt.thread() % 32
        column = warp % tile.panels
        return cls(lane, warp // tile.panels * tile.warp_rows, column // 2, column % 2)

    @property
    def unit(self) -> Int:
        """The number of the 32 columns that the first half is."""
        return self.panel * 2 + self.half

    def halves(self, tile: Tile, column_tile: Int, width: int) -> tuple[tuple[int, Int], tuple[int, Int]]:
        """Each half's array and first column there, of several arrays with `width` columns of the tile each."""

        def half(first: int) -> tuple[int, Int]:
            array, later = divmod(first, width)
            return array, column_tile * width + later + self.panel * PANEL + self.half * HALF

        return half(0), half(tile.columns // 2)


def abreast(number: Int, row_tiles: int, column_tiles: int, rows: int) -> tuple[Int, Int]:
    """Row and column of a tile by its number: `rows` row tiles at a time, which are taken column by column."""
    if rows == 1:
        return number // column_tiles, number % column_tiles
    first = number // (rows * column_tiles) * rows
    across = minimum(Int(row_tiles) - first, rows)
    of_stripe = number % (rows * column_tiles)
    return first + of_stripe % across, of_stripe // across


def tuned_tile(
    kernel: str, own: MmaTuning | None, rows: Array | jax.ShapeDtypeStruct, d: int, groups: Dispatch[TileSchedule]
) -> Tile:
    """The tile of a kernel for rows `(R, n)` of tokens of width d: `own`, or as tables have it, or the heuristic's."""
    num_rows, n = rows.shape
    return Tile(**asdict(find_tuning(MMA + kernel, own, num_rows, rows.dtype, d=d, n=n, E=groups.num_experts)))


def default_tile(capability: str | None = None, *, kernel: str = "up_projection", kind: str = "bfloat16") -> Tile:
    """The heuristic's tile of a kernel for a compute capability such as "8.6", of operands of `kind`."""
    return Tile(**asdict(mma_heuristic(kernel, kind, capability)))
