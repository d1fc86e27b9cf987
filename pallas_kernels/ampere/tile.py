"""The shape of a tile and which one a call gets, where its operands lie in shared memory, and which part is whose."""

from typing import NamedTuple

from pallas_kernels import simt
from pallas_kernels.contract import Dispatch
from pallas_kernels.mosaic.row_groups import TILE_ROWS, TileSchedule
from pallas_kernels.simt.matrices import CHUNK, chunk_size
from pallas_kernels.simt.values import Int, minimum
from pallas_kernels.tuning import find_tuning
from pallas_kernels.tuning.parameters import MMA, MmaTuning

WARPGROUPS = 2
THREADS = WARPGROUPS * 128
WARPS = THREADS // 32
PANEL = 64
"""Columns of 16 bits of a panel of the right operand: 128 bytes of every row, and so are the rows of shared memory."""

PANEL_CHUNKS = PANEL // CHUNK
PANEL_ROW_WORDS = PANEL // 2
PANEL_ROWS_AT_ONCE = THREADS // PANEL_CHUNKS
"""Rows of a panel that the block's threads copy at once, 16 bytes each."""

HALF = PANEL // 2
"""Columns of half a panel. A warp has two halves of panels, of two projections where there are two."""


class Tile:
    """The tile that a block multiplies, and where its operands lie in a slot of the ring, in words of 32 bits.

    Attributes:
      kind: dtype of the operands.
      columns, stages, abreast, sweep: its width, slots of the ring, and how blocks walk over tiles; see `MmaTuning`.
      warp_rows: rows that a warp multiplies.
      chunks: 16 bytes each, that a slot has of every row of the left operand.
      elements: of a chunk.
      depth: how much of the contracted dimension a slot has.
      products: how many a slot is good for, one after the other; each takes two chunks' worth of the dimension.
      row_words: of a row of the left operand.
      lhs_words: of the left operand, which comes first.
      slot_words: of a slot.
      panel_columns: columns of `kind` in a panel.
      panel_words: of a panel.

    Raises:
      ValueError: a slot has fewer rows than the block's threads copy at once.
    """

    def __init__(self, tuning: MmaTuning, kind: str):
        self.kind, self.columns, self.stages = kind, tuning.columns, tuning.stages
        self.abreast, self.sweep = tuning.abreast, tuning.sweep
        self.warp_rows = TILE_ROWS * (self.columns // PANEL) // WARPS
        self.chunks = tuning.k_step // CHUNK
        self.elements = chunk_size(kind)
        self.depth = self.chunks * self.elements
        self.products = self.chunks // 2
        self.row_words = self.chunks * 4
        self.lhs_words = TILE_ROWS * self.row_words
        self.slot_words = self.lhs_words + self.columns * self.row_words
        self.panel_columns = PANEL_CHUNKS * self.elements
        self.panel_words = self.depth * PANEL_ROW_WORDS
        if self.depth < PANEL_ROWS_AT_ONCE:
            raise ValueError(f"{tuning=} must have a k_step of 64 for {kind}")

    def sweeps(self, column_tiles: int) -> int:
        """The number of blocks that share the column tiles of a row tile."""
        return -(-column_tiles // self.sweep)

    def lhs_word(self, row: Int, chunk: Int) -> Int:
        """The word where 16 bytes of a left operand's row are. Eight rows that are read at once are in all 32 banks."""
        swizzle = row % 8 if self.chunks == 8 else (row >> 1) % 4
        return row * self.row_words + (chunk ^ swizzle) * 4

    def lhs_copies(self, thread: Int) -> tuple[Int, Int, int, int]:
        """First row and chunk that a thread copies of the left operand, how many rows, and how far apart."""
        apart = THREADS // self.chunks
        return thread // self.chunks, thread % self.chunks, TILE_ROWS // apart, apart

    def panel_word(self, row: Int, chunk: Int) -> Int:
        """The word where 16 bytes of a panel's row are. What lanes load together is in all 32 banks.

        That is 8 rows of one chunk, or 4 rows of two chunks next to each other where elements have 32 bits.
        """
        swizzle = row % 4 * 2 if self.kind == "float32" else row % 8
        return row * PANEL_ROW_WORDS + (chunk ^ swizzle) * 4


class WarpPart:
    """The part of a tile that the thread's warp multiplies: from `row` on, and two halves of panels.

    Attributes:
      tile: the block's.
      lane: the thread's.
      row: the first one.
      panel: the first half's; the second one is in the middle of the tile and `panel` panels later.
      half: which half of the two panels, 0 or 1.
    """

    def __init__(self, tile: Tile):
        panels = tile.columns // PANEL
        self.tile, warp, self.lane = tile, simt.warp(), simt.thread() % 32
        column = warp % panels
        self.row, self.panel, self.half = warp // panels * tile.warp_rows, column // 2, column % 2

    @property
    def unit(self) -> Int:
        """The number of the 32 columns that the first half is."""
        return self.panel * 2 + self.half

    def halves(self, column_tile: Int, width: int) -> tuple[tuple[int, Int], tuple[int, Int]]:
        """Each half's array and first column there, of several arrays with `width` columns of the tile each."""

        def half(first: int) -> tuple[int, Int]:
            array, later = divmod(first, width)
            return array, column_tile * width + later + self.panel * PANEL + self.half * HALF

        return half(0), half(self.tile.columns // 2)


class WarpOutput(NamedTuple):
    """The part of the output that a warp has.

    Attributes:
      expert: the tile's.
      row: the warp's first one.
      rows: how many from there on are the tile's; none or fewer if not positive, all if as many as it has.
      halves: the projection of each half panel, and its first column there.
      lane: the thread's.
    """

    expert: Int
    row: Int
    rows: Int
    halves: tuple[tuple[int, Int], tuple[int, Int]]
    lane: Int


def abreast(number: Int, row_tiles: int, column_tiles: int, rows: int) -> tuple[Int, Int]:
    """Row and column of a tile by its number: `rows` row tiles at a time, which are taken column by column."""
    if rows == 1:
        return number // column_tiles, number % column_tiles
    first = number // (rows * column_tiles) * rows
    across = minimum(Int(row_tiles) - first, rows)
    of_stripe = number % (rows * column_tiles)
    return first + of_stripe % across, of_stripe // across


def tuned_tile(kernel: str, own: MmaTuning | None, dtype, d: int, n: int, groups: Dispatch[TileSchedule]) -> Tile:
    """The tile of a kernel for rows `(R, n)` of tokens of width d: `own`, or as tables have it, or the heuristic's."""
    tuning = find_tuning(MMA + kernel, own, groups.num_rows, dtype, d=d, n=n, E=groups.num_experts)
    return Tile(tuning, dtype.name)
