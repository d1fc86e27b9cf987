"""Pieces of a tile of other operands: 16 rows of half a panel of every warp, in the warp's own part of a slot."""

from collections.abc import Sequence
from typing import NamedTuple

from pallas_kernels import simt
from pallas_kernels.ampere.row_matmul import Where
from pallas_kernels.ampere.tile import HALF, WARPS, Tile
from pallas_kernels.simt.matrices import chunk_size, load_matrices, start_copy, unpack
from pallas_kernels.simt.values import WARP, Float, Int, Long, Pointer

ROWS = 16


class Pieces(NamedTuple):
    """Pieces of some arrays, the like of each.

    Attributes:
      arrays: how many.
      kind: of their elements.
      columns: of each array.
      tile: of the block.
    """

    arrays: int
    kind: str
    columns: int
    tile: Tile

    @property
    def number(self) -> int:
        """Of a tile."""
        return self.tile.warp_rows // ROWS * 2

    @property
    def chunks(self) -> int:
        """Of 16 bytes, of a row."""
        return HALF // chunk_size(self.kind)

    @property
    def words(self) -> int:
        """Of an array's piece."""
        return ROWS * self.chunks * 4

    @property
    def slot_words(self) -> int:
        """Of all the block's warps."""
        return WARPS * self.arrays * self.words

    def start(self, arrays: Sequence[Pointer], where: Where, piece: Int, slot: Pointer) -> None:
        """Starts the warp's copies. What is not the tile's is zero: others may be writing there."""
        elements = chunk_size(self.kind)
        own = self._own(slot)
        first_column = where.halves[0][1] + piece % 2 * (self.tile.columns // 2)
        for i in range(ROWS * self.chunks // WARP):
            item = where.lane + i * WARP
            row, chunk = item // self.chunks, item % self.chunks
            of_warp, column = piece // 2 * ROWS + row, first_column + chunk * elements
            known = (of_warp < where.rows) & (column < self.columns)
            start = Long(where.row + of_warp) * self.columns + column
            for number, array in enumerate(arrays):
                start_copy(own, self.word(row, chunk) + number * self.words, array, start, known)

    def load(self, slot: Pointer, lane: Int, first_row: int) -> list[list[list[Float]]]:
        """What the thread has of 8 rows, from 0 or 8 on: of each array and each 8 columns, two numbers."""
        own = self._own(slot)
        return [self._load(own.at(number * self.words), lane, first_row) for number in range(self.arrays)]

    def _load(self, piece: Pointer, lane: Int, first_row: int) -> list[list[Float]]:
        if self.kind != "float32":
            words = load_matrices(piece, self.word(lane % 8 + first_row, lane // 8))
            return [unpack(word, self.kind) for word in words]
        row, quad = lane // 4 + first_row, lane % 4
        places = [self.word(row, quad // 2 + 2 * i) + quad % 2 * 2 for i in range(4)]
        return [[x.as_float() for x in piece.load_vector(place, 2).elements()] for place in places]

    def _own(self, slot: Pointer) -> Pointer:
        return slot.at(simt.thread() // WARP * (self.arrays * self.words))

    def word(self, row: Int, chunk: Int) -> Int:
        """Where 16 bytes are. What lanes load together is in all 32 banks, as in `Tile.lhs_word` and `Panels.word`."""
        swizzle = row % 4 * 2 if self.kind == "float32" else (row >> 1) % 4
        return (row * self.chunks + (chunk ^ swizzle)) * 4
