"""A block's tile, and its operands: how they lie in a slot of the ring, and are copied, loaded and multiplied there.

Rows of the left operand have their part of the contracted dimension side by side. Weights that are stored the same way
for each column, so that they are transposed, lie as the rows do, column by column. Operands whose rows are the
contracted dimension lie in panels: columns are side by side in panels of 128 bytes of every row. Warps take them 32 at
a time: half a panel of 16-bit elements, a whole one of float32.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from pallas_kernels import simt
from pallas_kernels.contract import Dispatch
from pallas_kernels.mosaic.row_groups import TILE_ROWS, TileSchedule
from pallas_kernels.simt.matrices import CHUNK, chunk_size, load_matrices, multiply, start_copy, tensor_operand, unpack
from pallas_kernels.simt.values import WARP, Bool, Float, Int, Long, Pointer, minimum, select
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

UNIT = 32  # columns
PIECE_ROWS = 16  # that a warp has of a piece


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


type Sums = list[list[list[list[Float]]]]
"""A thread's part of a tile, by 16 rows, half panel, 8 columns, and register; see `matrices.multiply`."""

type Copy = Callable[[Int, Pointer], None]
"""`copy(step, slot)` starts a thread's copy of 16 bytes of a step, if there is such a step, to its slot."""


class Steps:
    """The contracted dimension of one or two pairs of operands, one after the other, cut into what is in a slot.

    Attributes:
      tile: the block's.
      depth: how long the dimension is.
      pairs: how many pairs of operands there are.
      of_pair: steps of each.
      number: steps of all.
    """

    def __init__(self, tile: Tile, depth: int, pairs: int):
        self.tile, self.depth, self.pairs = tile, depth, pairs
        self.of_pair = -(-depth // tile.depth)
        self.number = self.of_pair * pairs

    def choose(self, operands: Sequence[Pointer], step: Int) -> tuple[Pointer, Int]:
        """The operand, of those of all pairs, that a step is about, and where its part of the dimension starts."""
        if self.pairs == 1:
            return operands[0], step * self.tile.depth
        second = step >= self.of_pair
        return operands[0].or_else(second, operands[1]), select(second, step - self.of_pair, step) * self.tile.depth


def copy_rows(
    lhs: Sequence[Pointer], num_rows: int, token_indices: Pointer | None, first_row: Int, valid_rows: Int, k: Steps
) -> list[Copy]:
    """This thread's copies of rows, by index or in order; missing rows are zero."""
    tile = k.tile
    row, chunk, passes, apart = tile.lhs_copies(simt.thread())
    chunk_elements = chunk * tile.elements
    word = tile.lhs_word(row, chunk)

    def start(i: int, rows: Pointer, first: Int, wanted: Bool, step: Int, slot: Pointer):
        start_copy(slot, word + i * apart * tile.row_words, rows, first, wanted, step < k.number)

    if token_indices is None:
        place = Long(first_row + row) * k.depth + chunk_elements

        def copy(i: int, step: Int, slot: Pointer):
            rows, first = k.choose(lhs, step)
            wanted = all_or_none(first + chunk_elements < k.depth, valid_rows - row) > i * apart
            start(i, rows.at(place).at(Int(i * apart * k.depth)), first, wanted, step, slot)

        return [partial(copy, i) for i in range(passes)]

    def copy_of(i: int) -> Copy:
        mine = row + i * apart
        token = token_indices[first_row + mine]
        known = (mine < valid_rows) & (token >= 0) & (token < num_rows)
        end = select(known, Int(k.depth) - chunk_elements, 0)  # one register says it all
        place = Long(token) * k.depth + chunk_elements

        def copy(step: Int, slot: Pointer):
            rows, first = k.choose(lhs, step)
            start(i, rows.at(place), first, first < end, step, slot)

        return copy

    return [copy_of(i) for i in range(passes)]


def copy_panels(
    weights: Sequence[Pointer], weight_columns: int, expert, offset: Int, first: Int, end: int, k: Steps
) -> list[Copy]:
    """This thread's copies of weights `(E, depth, weight_columns)`, of which a tile has equal parts.

    The columns are those from `first` on of those wanted, which start at `offset` and of which there are `end`.
    """
    tile = k.tile
    row, chunk = simt.thread() // PANEL_CHUNKS, simt.thread() % PANEL_CHUNKS
    column = first + chunk * tile.elements
    place = (Long(expert) * k.depth + row) * weight_columns + Long(offset + column)
    sources = [of.at(place) for of in weights]
    width = tile.columns // len(weights)
    word = tile.panel_word(row, chunk) + tile.lhs_words

    def copy(i: int, panel: int, step: Int, slot: Pointer):
        part, later = divmod(panel * tile.panel_columns, width)
        step_row = step * tile.depth + i
        wanted = all_or_none(step_row + row < k.depth, Int(end) - column) > later
        target = word + (panel * tile.panel_words + i * PANEL_ROW_WORDS)
        start_copy(slot, target, sources[part].at(later), step_row * weight_columns, wanted, step < k.number)

    of_tile = range(tile.columns // tile.panel_columns)
    return [partial(copy, i, panel) for i in range(0, tile.depth, PANEL_ROWS_AT_ONCE) for panel in of_tile]


def copy_columns(
    weights: Sequence[Pointer], weight_columns: int, expert, offset: Int, first: Int, end: int, k: Steps
) -> list[Copy]:
    """This thread's copies of weights `(E, weight_columns, depth)`, one of each pair; the columns as `copy_panels`."""
    tile = k.tile
    row, chunk, _, apart = tile.lhs_copies(simt.thread())
    chunk_elements = chunk * tile.elements
    column = first + row
    place = (Long(expert) * weight_columns + (offset + column)) * k.depth + chunk_elements
    word = tile.lhs_word(row, chunk) + tile.lhs_words

    def copy(i: int, step: Int, slot: Pointer):
        weight, start = k.choose(weights, step)
        wanted = all_or_none(start + chunk_elements < k.depth, Int(end) - column) > i
        start_copy(slot, word + i * tile.row_words, weight.at(place), start + i * k.depth, wanted, step < k.number)

    return [partial(copy, i) for i in range(0, tile.columns, apart)]


def all_or_none(inside: Bool, number: Int) -> Int:
    """So many rows or columns, or none outside of the contracted dimension.

    As this depends on the step, it is asked in each; LLVM would keep answers that do not in registers, one a copy.
    """
    return select(inside, number, 0)


def load_rows(part: WarpPart, slot: Pointer, product: int) -> list[list[Int]]:
    """The warp's rows of the left operand, of each 16 what `matrices.multiply` takes."""
    tile, own_row, side = part.tile, part.lane % 16, part.lane // 16  # of the 16 rows and two chunks of a load
    word = tile.lhs_word(own_row, side + 2 * product)
    rows = slot.at(part.row * tile.row_words)
    starts = range(0, tile.warp_rows * tile.row_words, 16 * tile.row_words)
    return [tensor_operand(load_matrices(rows, word + start), tile.kind) for start in starts]


def load_panels(part: WarpPart, panels: Pointer, unit, pair, product: int, *, left: bool = False) -> list[Int]:
    """16 columns by the rows of a product, as `matrices.multiply` takes its right operand: 2 registers for each 8.

    Args:
      part: the warp's.
      panels: the operand's, in a slot.
      unit: the columns are among those from `32 * unit` on.
      pair: the columns start `16 * pair` later.
      product: which product's rows.
      left: as it takes its left operand, whose rows the columns become. 16-bit elements are loaded in this order,
        since the tensor cores want registers next to each other: to move them there takes longer than the products.
    """
    tile, lane = part.tile, part.lane
    if tile.kind != "float32":
        row, chunk = (lane % 8 + lane // 16 * 8, lane // 8 % 2) if left else (lane % 16, lane // 16)
        word = tile.panel_word(row, unit % 2 * (PANEL_CHUNKS // 2) + chunk + 2 * pair) + unit // 2 * tile.panel_words
        return load_matrices(panels, word + product * 16 * PANEL_ROW_WORDS, transposed=True)
    # The tensor cores want a column's rows in lanes next to each other. Matrices are not transposed if elements
    # have 32 bits, so these are loaded one by one.
    registers = []
    for eight in range(2):
        chunk = lane // 16 + (pair * 4 + eight * 2)
        word = tile.panel_word(lane % 4, chunk) + lane // 4 % 4 + unit * tile.panel_words
        registers += [panels[word + (product * 8 + upper) * PANEL_ROW_WORDS] for upper in (0, 4)]
    return tensor_operand([registers[i] for i in ((0, 2, 1, 3) if left else range(4))], tile.kind)


def load_columns(part: WarpPart, columns: Pointer, unit, pair, product: int) -> list[Int]:
    """Loads as `load_panels` does. Matrices whose rows are columns need not be transposed, whatever they hold."""
    tile, lane = part.tile, part.lane
    word = tile.lhs_word(lane % 8 + lane // 16 * 8, lane // 8 % 2 + 2 * product)
    first = unit * UNIT + 16 * pair
    return tensor_operand(load_matrices(columns, word + first * tile.row_words), tile.kind)


def load_half(load: Callable, part: WarpPart, slot: Pointer, step: Int, product: int, half: int) -> list[list[Int]]:
    """A half panel of the warp's columns of the right operand: of each 16 columns, what `load`, one of these, gives."""
    del step
    tile = part.tile
    own = slot.at(tile.lhs_words).at(half * (tile.columns // 2 * tile.row_words))  # as another unit: more registers
    return [load(part, own, part.unit, pair, product) for pair in range(2)]


def add_products(sums: Sums, half: int, left: Sequence[list[Int]], right: Sequence[list[Int]], kind: str) -> None:
    """Adds to `sums`, in place, products of `left`, of each 16 rows, with a half panel as `load_half` has it."""
    for of_rows, a in zip(sums, left, strict=True):
        own = of_rows[half]
        for eight in range(4):
            of_pair = right[eight // 2]
            own[eight] = multiply(own[eight], a, of_pair[eight % 2 * 2 :][:2], kind)


class Pieces:
    """Pieces of a tile of other operands: 16 rows of half a panel of every warp, in the warp's own part of a slot.

    Attributes:
      tile: the block's.
      arrays: how many operands there are, of the kind that the tile has.
      columns: their width.
      number: pieces of a tile.
      chunks: 16 bytes each, of a row.
      words: of an array's piece.
    """

    def __init__(self, tile: Tile, arrays: int, columns: int):
        self.tile, self.arrays, self.columns = tile, arrays, columns
        self.number = tile.warp_rows // PIECE_ROWS * 2
        self.chunks = HALF // tile.elements
        self.words = PIECE_ROWS * self.chunks * 4

    def start(self, arrays: Sequence[Pointer], where: WarpOutput, piece: Int, slot: Pointer) -> None:
        """Starts the warp's copies. What is not the tile's is zero: others may be writing there."""
        own = self._own(slot)
        first_column = where.halves[0][1] + piece % 2 * (self.tile.columns // 2)
        for i in range(PIECE_ROWS * self.chunks // WARP):
            item = where.lane + i * WARP
            row, chunk = item // self.chunks, item % self.chunks
            of_warp, column = piece // 2 * PIECE_ROWS + row, first_column + chunk * self.tile.elements
            known = (of_warp < where.rows) & (column < self.columns)
            start = Long(where.row + of_warp) * self.columns + column
            for number, array in enumerate(arrays):
                start_copy(own, self.word(row, chunk) + number * self.words, array, start, known)

    def load(self, slot: Pointer, lane: Int, first_row: int) -> list[list[list[Float]]]:
        """The thread's numbers in 8 rows, from 0 or 8 on: of each array and each 8 columns, two."""
        own = self._own(slot)
        return [self._load(own.at(number * self.words), lane, first_row) for number in range(self.arrays)]

    def _load(self, piece: Pointer, lane: Int, first_row: int) -> list[list[Float]]:
        if self.tile.kind != "float32":
            words = load_matrices(piece, self.word(lane % 8 + first_row, lane // 8))
            return [unpack(word, self.tile.kind) for word in words]
        row, quad = lane // 4 + first_row, lane % 4
        places = [self.word(row, quad // 2 + 2 * i) + quad % 2 * 2 for i in range(4)]
        return [[x.as_float() for x in piece.load_vector(place, 2).elements()] for place in places]

    def _own(self, slot: Pointer) -> Pointer:
        return slot.at(simt.thread() // WARP * (self.arrays * self.words))

    def word(self, row: Int, chunk: Int) -> Int:
        """The word where 16 bytes are. What lanes load together is in all 32 banks, as with `Tile.panel_word`."""
        swizzle = row % 4 * 2 if self.tile.kind == "float32" else (row >> 1) % 4
        return (row * self.chunks + (chunk ^ swizzle)) * 4
