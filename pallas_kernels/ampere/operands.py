"""A block's operands: how they lie in a slot of its ring, are copied there, and are multiplied by warps.

Rows of the left operand have their part of the contracted dimension side by side. Weights that are stored the same way
for each column, so that they are transposed, lie as the rows do (`Columns`). Operands whose rows are the contracted
dimension lie in `Panels`: columns are side by side in panels of 128 bytes of every row. Warps take them 32 at a time:
half a panel of 16-bit elements, a whole one of float32.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from pallas_kernels import simt
from pallas_kernels.ampere.tile import THREADS, Tile, WarpPart
from pallas_kernels.simt.matrices import chunk_size, load_matrices, multiply, start_copy, tensor_operand
from pallas_kernels.simt.values import Bool, Float, Int, Long, Pointer, select

ROW_WORDS = 32  # a panel's row
CHUNKS = 8  # a panel's row
UNIT = 32  # columns

type Sums = list[list[list[list[Float]]]]
"""A thread's part of a tile, by 16 rows, half panel, 8 columns, and register; see `matrices.multiply`."""

type Copy = Callable[[Int, Pointer], None]
"""`copy(step, slot)` starts a thread's copy of 16 bytes of a step, if there is such a step, to its slot."""


class Steps(NamedTuple):
    """The contracted dimension of one or two pairs of operands, one after the other, cut into what is in a slot.

    Attributes:
      kind: dtype of the operands.
      depth: how long the dimension is.
      each: how much of it a slot has.
      pairs: how many pairs of operands there are.
    """

    kind: str
    depth: int
    each: int
    pairs: int

    @property
    def of_pair(self) -> int:
        return -(-self.depth // self.each)

    @property
    def number(self) -> int:
        return self.of_pair * self.pairs

    def choose(self, operands: Sequence[Pointer], step: Int) -> tuple[Pointer, Int]:
        """The operand, of those of all pairs, that a step is about, and where its part of the dimension starts."""
        if self.pairs == 1:
            return operands[0], step * self.each
        second = step >= self.of_pair
        return operands[0].or_else(second, operands[1]), select(second, step - self.of_pair, step) * self.each


class Panels(NamedTuple):
    """Panels of some operand.

    Attributes:
      kind: dtype of its elements.
      tile: whose slots they are in.
    """

    kind: str
    tile: Tile

    @classmethod
    def of(cls, tile: Tile, kind: str) -> "Panels":
        """Those of a tile.

        Raises:
          ValueError: a slot has fewer rows than the block's threads copy at once.
        """
        panels = cls(kind, tile)
        if panels.rows < panels.apart:
            raise ValueError(f"{tile=} must have a k_step of 64 for {kind}")
        return panels

    @property
    def rows(self) -> int:
        """Rows in a slot, which has as many bytes whatever the dtype."""
        return self.tile.k_step * chunk_size(self.kind) // 8

    @property
    def apart(self) -> int:
        """Rows that the block's threads copy of a panel at once, a chunk each."""
        return THREADS // CHUNKS

    @property
    def columns(self) -> int:
        """Columns of a panel."""
        return CHUNKS * chunk_size(self.kind)

    @property
    def words(self) -> int:
        """Words of a panel in a slot."""
        return self.rows * ROW_WORDS

    @property
    def steps(self) -> int:
        """Products along the rows of a slot; each takes two chunks' worth of them."""
        return self.rows // (2 * chunk_size(self.kind))

    def word(self, row: Int, chunk: Int) -> Int:
        """The word where 16 bytes of a panel's row are. What lanes load together is in all 32 banks.

        That is 8 rows of one chunk, or 4 rows of two chunks next to each other where elements have 32 bits.
        """
        swizzle = row % 4 * 2 if self.kind == "float32" else row % 8
        return row * ROW_WORDS + (chunk ^ swizzle) * 4

    def copies(
        self, weights: Sequence[Pointer], weight_columns: int, expert, offset: Int, first: Int, end: int, k: Steps
    ) -> list[Copy]:
        """This thread's copies of weights `(E, depth, weight_columns)`, of which a tile has equal parts.

        The columns are those from `first` on of those wanted, which start at `offset` and of which there are `end`.
        """
        row, chunk = simt.thread() // CHUNKS, simt.thread() % CHUNKS
        column = first + chunk * chunk_size(k.kind)
        place = (Long(expert) * k.depth + row) * weight_columns + Long(offset + column)
        sources = [of.at(place) for of in weights]
        width = self.tile.columns // len(weights)
        word = self.word(row, chunk) + self.tile.lhs_words

        def copy(i: int, panel: int, step: Int, slot: Pointer):
            part, later = divmod(panel * self.columns, width)
            step_row = step * k.each + i
            wanted = all_or_none(step_row + row < k.depth, Int(end) - column) > later
            target = word + (panel * self.words + i * ROW_WORDS)
            start_copy(slot, target, sources[part].at(later), step_row * weight_columns, wanted, step < k.number)

        of_tile = range(self.tile.columns // self.columns)
        return [partial(copy, i, panel) for i in range(0, self.rows, self.apart) for panel in of_tile]

    def load(self, panels: Pointer, unit: Int, pair: int, step: int, lane: Int, *, left: bool = False) -> list[Int]:
        """16 columns by the rows of a product, as `matrices.multiply` takes its right operand: 2 registers for each 8.

        Args:
          panels: the operand's, in a slot.
          unit: the columns are among those from `32 * unit` on.
          pair: the columns start `16 * pair` later.
          step: which product's rows.
          lane: the thread's.
          left: as it takes its left operand, whose rows the columns become. 16-bit elements are loaded in this order,
            since the tensor cores want registers next to each other: to move them there takes longer than the products.
        """
        if self.kind != "float32":
            row, chunk = (lane % 8 + lane // 16 * 8, lane // 8 % 2) if left else (lane % 16, lane // 16)
            word = self.word(row, unit % 2 * (CHUNKS // 2) + chunk + 2 * pair) + unit // 2 * self.words
            return load_matrices(panels, word + step * 16 * ROW_WORDS, transposed=True)
        # The tensor cores want a column's rows in lanes next to each other. Matrices are not transposed if elements
        # have 32 bits, so these are loaded one by one.
        registers = []
        for eight in range(2):
            chunk = lane // 16 + (pair * 4 + eight * 2)
            word = self.word(lane % 4, chunk) + lane // 4 % 4 + unit * self.words
            registers += [panels[word + (step * 8 + upper) * ROW_WORDS] for upper in (0, 4)]
        return tensor_operand([registers[i] for i in ((0, 2, 1, 3) if left else range(4))], self.kind)


class Columns(NamedTuple):
    """A right operand whose columns lie as the left one's rows.

    Attributes:
      kind: dtype of its elements.
      tile: whose slots it is in.
    """

    kind: str
    tile: Tile

    def copies(
        self, weights: Sequence[Pointer], weight_columns: int, expert, offset: Int, first: Int, end: int, k: Steps
    ) -> list[Copy]:
        """This thread's copies of weights `(E, weight_columns, depth)`, one of each pair.

        The columns are those from `first` on of those wanted, which start at `offset` and of which there are `end`.
        """
        row, chunk, _, apart = self.tile.lhs_copies(simt.thread())
        chunk_elements = chunk * chunk_size(k.kind)
        column = first + row
        place = (Long(expert) * weight_columns + (offset + column)) * k.depth + chunk_elements
        word = self.tile.lhs_word(row, chunk) + self.tile.lhs_words

        def copy(i: int, step: Int, slot: Pointer):
            weight, start = k.choose(weights, step)
            wanted = all_or_none(start + chunk_elements < k.depth, Int(end) - column) > i
            target = word + i * (self.tile.k_step // 2)
            start_copy(slot, target, weight.at(place), start + i * k.depth, wanted, step < k.number)

        return [partial(copy, i) for i in range(0, self.tile.columns, apart)]

    def load(self, columns: Pointer, unit: Int, pair: int, step: int, lane: Int) -> list[Int]:
        """Loads as `Panels.load` does. Matrices whose rows are columns need not be transposed, whatever they hold."""
        word = self.tile.lhs_word(lane % 8 + lane // 16 * 8, lane // 8 % 2 + 2 * step)
        first = unit * UNIT + 16 * pair
        return tensor_operand(load_matrices(columns, word + first * (self.tile.k_step // 2)), self.kind)


def load_columns(
    right: Panels | Columns, operand: Pointer, tile: Tile, part: WarpPart, step: int, half: int
) -> list[list[Int]]:
    """A half panel of the warp's columns of the right operand in a slot: of each 16 columns, what its `load` gives."""
    own = operand.at(half * (tile.panels * tile.panel_words // 2))  # a constant: another unit would take registers
    return [right.load(own, part.unit, pair, step, part.lane) for pair in range(2)]


def add_products(sums: Sums, half: int, left: Sequence[list[Int]], right: Sequence[list[Int]], kind: str) -> None:
    """Adds to `sums`, in place, products of `left`, of each 16 rows, with a half panel as `load_columns` has it."""
    for of_rows, a in zip(sums, left, strict=True):
        own = of_rows[half]
        for eight in range(4):
            of_pair = right[eight // 2]
            own[eight] = multiply(own[eight], a, of_pair[eight % 2 * 2 :][:2], kind)


def no_sums(tile: Tile) -> Sums:
    return [[[[Float(0.0)] * 4 for _ in range(4)] for _ in range(2)] for _ in range(tile.warp_rows // 16)]


def copied(sums: Sums) -> Sums:
    """Lists of their own, to be changed."""
    return [[list(half) for half in of_rows] for of_rows in sums]


def copy_rows(
    lhs: Sequence[Pointer],
    num_rows: int,
    token_indices: Pointer | None,
    first_row: Int,
    valid_rows: Int,
    tile: Tile,
    k: Steps,
) -> list[Copy]:
    """This thread's copies of rows, by index or in order; missing rows are zero."""
    row, chunk, passes, apart = tile.lhs_copies(simt.thread())
    chunk_elements = chunk * chunk_size(k.kind)
    word = tile.lhs_word(row, chunk)

    def start(i: int, rows: Pointer, first: Int, wanted: Bool, step: Int, slot: Pointer):
        start_copy(slot, word + i * apart * (tile.k_step // 2), rows, first, wanted, step < k.number)

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


def all_or_none(inside: Bool, number: Int) -> Int:
    """So many rows or columns, or none outside of the contracted dimension.

    As this depends on the step, it is asked in each; LLVM would keep answers that do not in registers, one a copy.
    """
    return select(inside, number, 0)
