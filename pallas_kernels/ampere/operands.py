"""Copies of a row kernel's operands to a slot of its ring, and where in the slot they are.

Rows of the left operand have their part of the contracted dimension side by side. Weights that are stored the same way
for each column, so that they are transposed, lie as the rows do (`Columns`); others lie in `Panels`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pallas_kernels.ampere.panels import CHUNKS, ROW_WORDS, UNIT, Panels
from pallas_kernels.ampere.tile import Tile
from pallas_kernels.simt import language as simt
from pallas_kernels.simt.matrices import chunk_size, load_matrices, start_copy, tensor_operand
from pallas_kernels.simt.values import Int, Long, Pointer


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
    """The contracted dimension, cut into what is in a slot.

    Attributes:
      kind: of the operands.
      depth: how long the dimension is.
      each: of a slot.
    """

    kind: str
    depth: int
    each: int

    @property
    def number(self) -> int:
        return -(-self.depth // self.each)


def copy_rows(
    lhs: Pointer, num_rows: int, token_indices: Pointer | None, first_row: Int, valid_rows: Int, tile: Tile, k: Steps
) -> Callable:
    """`copy(step, slot)` starts this thread's copies of rows, by index or in order; missing rows are zero."""
    row, chunk, passes, apart = tile.lhs_copies(simt.thread())
    chunk_elements = chunk * chunk_size(k.kind)
    rows = []
    for i in range(passes):
        mine = row + i * apart
        source = first_row + mine if token_indices is None else token_indices[first_row + mine]
        known = (mine < valid_rows) & (source >= 0) & (source < num_rows)
        rows.append((lhs.at(Long(source) * k.depth + chunk_elements), known))
    word = tile.lhs_word(row, chunk)

    def copy(step, slot: Pointer):
        inside = step * k.each + chunk_elements < k.depth
        for i, (source, known) in enumerate(rows):
            start_copy(slot, word + i * apart * (tile.k_step // 2), source, step * k.each, known & inside)

    return copy


def copy_panels(
    weights: Sequence[tuple[Pointer, Int]],
    weight_columns: int,
    expert,
    offset: Int,
    end: int,
    panels: Panels,
    tile: Tile,
    k: Steps,
) -> Callable:
    """`copy(step, slot)` starts this thread's copies of weights `(E, depth, weight_columns)`.

    Args:
      weights: of each panel, and the panel's first column of those wanted.
      weight_columns: of each of the weights.
      expert: whose.
      offset: of the columns wanted.
      end: of the columns wanted.
      panels: where they lie.
      tile: of the block.
      k: the contracted dimension.
    """
    row, chunk = simt.thread() // CHUNKS, simt.thread() % CHUNKS
    parts = []
    for of, first in weights:
        mine = first + chunk * chunk_size(k.kind)
        parts.append((of.at((Long(expert) * k.depth + row) * weight_columns + (offset + mine)), mine < end))
    word = panels.word(row, chunk) + tile.lhs_words

    def copy(step, slot: Pointer):
        for i in range(0, panels.rows, panels.apart):
            step_row = step * k.each + i
            inside = step_row + row < k.depth
            for panel, (source, known) in enumerate(parts):
                target = word + (panel * panels.words + i * ROW_WORDS)
                start_copy(slot, target, source, step_row * weight_columns, known & inside)

    return copy


def copy_columns(weight: Pointer, weight_columns: int, expert, offset: Int, first: Int, end: int, tile: Tile, k: Steps):
    """`copy(step, slot)` starts this thread's copies of weights `(E, weight_columns, depth)`.

    The columns are those from `first` on of those wanted, which start at `offset` and of which there are `end`.
    """
    row, chunk, _, apart = tile.lhs_copies(simt.thread())
    chunk_elements = chunk * chunk_size(k.kind)
    column = first + row
    source = weight.at((Long(expert) * weight_columns + (offset + column)) * k.depth + chunk_elements)
    word = tile.lhs_word(row, chunk) + tile.lhs_words

    def copy(step, slot: Pointer):
        inside = step * k.each + chunk_elements < k.depth
        for i in range(0, tile.columns, apart):
            known = inside & (column + i < end)
            start_copy(slot, word + i * (tile.k_step // 2), source, step * k.each + i * k.depth, known)

    return copy
