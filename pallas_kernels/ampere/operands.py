"""Copies of a row kernel's operands to a slot of its ring, and where in the slot they are.

Rows of the left operand have their part of the contracted dimension side by side. Weights that are stored the same way
for each column, so that they are transposed, lie as the rows do (`Columns`); others lie in `Panels`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from pallas_kernels import simt
from pallas_kernels.ampere.panels import CHUNKS, ROW_WORDS, UNIT, Panels
from pallas_kernels.ampere.tile import Tile
from pallas_kernels.simt.matrices import chunk_size, load_matrices, start_copy, tensor_operand
from pallas_kernels.simt.values import Bool, Int, Long, Pointer, select

type Copy = Callable[[Int, Pointer], None]
"""`copy(step, slot)` starts a thread's copy of 16 bytes of a step, if there is such a step, to its slot."""


class Columns(NamedTuple):
    """A right operand whose columns lie as the left one's rows.

    Attributes:
      kind: of its elements.
      tile: whose slots it is in.
    """

    kind: str
    tile: Tile

    def load(self, columns: Pointer, unit: Int, pair: int, step: int, lane: Int) -> list[Int]:
        """As `Panels.load`. Matrices whose rows are columns need not be transposed, whatever their elements."""
        word = self.tile.lhs_word(lane % 8 + lane // 16 * 8, lane // 8 % 2 + 2 * step)
        first = unit * UNIT + 16 * pair
        return tensor_operand(load_matrices(columns, word + first * (self.tile.k_step // 2)), self.kind)


class Steps(NamedTuple):
    """The contracted dimension of one or two pairs of operands, one after the other, cut into what is in a slot.

    Attributes:
      kind: of the operands.
      depth: how long the dimension is.
      each: of a slot.
      pairs: of operands.
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


def copy_panels(
    weights: Sequence[Pointer],
    weight_columns: int,
    expert,
    offset: Int,
    first: Int,
    end: int,
    panels: Panels,
    tile: Tile,
    k: Steps,
) -> list[Copy]:
    """This thread's copies of weights `(E, depth, weight_columns)`, of which a tile has equal parts.

    The columns are those from `first` on of those wanted, which start at `offset` and of which there are `end`.
    """
    row, chunk = simt.thread() // CHUNKS, simt.thread() % CHUNKS
    column = first + chunk * chunk_size(k.kind)
    place = (Long(expert) * k.depth + row) * weight_columns + Long(offset + column)
    sources = [of.at(place) for of in weights]
    width = tile.columns // len(weights)
    word = panels.word(row, chunk) + tile.lhs_words

    def copy(i: int, panel: int, step: Int, slot: Pointer):
        part, later = divmod(panel * panels.columns, width)
        step_row = step * k.each + i
        wanted = all_or_none(step_row + row < k.depth, Int(end) - column) > later
        target = word + (panel * panels.words + i * ROW_WORDS)
        start_copy(slot, target, sources[part].at(later), step_row * weight_columns, wanted, step < k.number)

    of_tile = range(tile.columns // panels.columns)
    return [partial(copy, i, panel) for i in range(0, panels.rows, panels.apart) for panel in of_tile]


def copy_columns(
    weights: Sequence[Pointer],
    weight_columns: int,
    expert,
    offset: Int,
    first: Int,
    end: int,
    tile: Tile,
    k: Steps,
) -> list[Copy]:
    """This thread's copies of weights `(E, weight_columns, depth)`, one of each pair.

    The columns are those from `first` on of those wanted, which start at `offset` and of which there are `end`.
    """
    row, chunk, _, apart = tile.lhs_copies(simt.thread())
    chunk_elements = chunk * chunk_size(k.kind)
    column = first + row
    place = (Long(expert) * weight_columns + (offset + column)) * k.depth + chunk_elements
    word = tile.lhs_word(row, chunk) + tile.lhs_words

    def copy(i: int, step: Int, slot: Pointer):
        weight, start = k.choose(weights, step)
        wanted = all_or_none(start + chunk_elements < k.depth, Int(end) - column) > i
        target = word + i * (tile.k_step // 2)
        start_copy(slot, target, weight.at(place), start + i * k.depth, wanted, step < k.number)

    return [partial(copy, i) for i in range(0, tile.columns, apart)]
