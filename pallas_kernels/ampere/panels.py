"""How an operand lies in a slot whose rows are the contracted dimension, and what a warp multiplies of it.

Columns are side by side in panels of 128 bytes of every row. Warps take them 32 at a time: half a panel of 16-bit
elements, a whole one of float32.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pallas_kernels.ampere.tile import THREADS, Tile, WarpPart
from pallas_kernels.simt.matrices import chunk_size, load_matrices, multiply, tensor_operand
from pallas_kernels.simt.values import Float, Int, Pointer

ROW_WORDS = 32  # of a panel
CHUNKS = 8  # of a panel's row
UNIT = 32  # columns

type Sums = list[list[list[list[Float]]]]
"""A thread's part of a tile, by 16 rows, half panel, 8 columns, and register; see `matrices.multiply`."""


class Panels(NamedTuple):
    """Panels of some operand.

    Attributes:
      kind: of its elements.
      rows: of a slot.
    """

    kind: str
    rows: int

    @classmethod
    def of(cls, tile: Tile, kind: str) -> "Panels":
        """Those of a tile's slots, of as many bytes whatever the dtype.

        Raises:
          ValueError: a slot has fewer rows than the block's threads copy at once.
        """
        panels = cls(kind, tile.k_step * chunk_size(kind) // 8)
        if panels.rows < panels.apart:
            raise ValueError(f"{tile=} must have a k_step of 64 for {kind}")
        return panels

    @property
    def apart(self) -> int:
        """Rows that the block's threads copy of a panel at once, a chunk each."""
        return THREADS // CHUNKS

    @property
    def columns(self) -> int:
        """Of a panel."""
        return CHUNKS * chunk_size(self.kind)

    @property
    def words(self) -> int:
        """Of a panel in a slot."""
        return self.rows * ROW_WORDS

    @property
    def steps(self) -> int:
        """Products along the rows of a slot; each takes two chunks' worth of them."""
        return self.rows // (2 * chunk_size(self.kind))

    def word(self, row: Int, chunk: Int) -> Int:
        """Where 16 bytes of a panel's row are. What lanes load together is in all 32 banks.

        That is 8 rows of one chunk, or 4 rows of two chunks next to each other where elements have 32 bits.
        """
        swizzle = row % 4 * 2 if self.kind == "float32" else row % 8
        return row * ROW_WORDS + (chunk ^ swizzle) * 4

    def load(self, panels: Pointer, unit: Int, pair: int, step: int, lane: Int, *, left: bool = False) -> list[Int]:
        """16 columns by the rows of a product, as `matrices.multiply` takes its right operand: 2 registers for each 8.

        Args:
          panels: of the operand, in a slot.
          unit: the columns are among those from `32 * unit` on.
          pair: the columns start `16 * pair` later.
          step: which product's rows.
          lane: of the thread.
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


class RightOperand(Protocol):
    """How a right operand lies in a slot."""

    @property
    def kind(self) -> str: ...

    def load(self, operand: Pointer, unit: Int, pair: int, step: int, lane: Int, /) -> list[Int]: ...


def load_columns(
    right: RightOperand, operand: Pointer, tile: Tile, part: WarpPart, step: int, half: int
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
