"""Weights that arrive compressed: their codes in a slot, and the registers that tensor cores take of them.

A slot has the codes of a step in the place of numbers, half or a quarter of the bytes. Each warp decodes what it
multiplies, so that a tile is decoded once for each of the warps that share its columns. A thread has four columns of
each half panel that follow each other, one of each of the products of 8 columns; `in_order` moves the sums to where
they are without codes.

A byte of codes is looked up in shared memory: there is a word for each, with two numbers of 4 bits in bfloat16, or with
one of 8 bits in float32.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels import simt
from pallas_kernels.ampere.operands import THREADS, UNIT, Copy, Steps, Sums, Tile, WarpPart
from pallas_kernels.codings import E2M1, MXFP4_NAN, NORMAL_FLOAT4, QuantizedWeight
from pallas_kernels.simt.matrices import multiply_pairs, pack, start_copy
from pallas_kernels.simt.threads import transposed_words
from pallas_kernels.simt.values import Int, Long, Pointer, minimum, permute_bytes

CHUNK_BYTES = 16
"""What a thread copies at once. Rows of codes are a multiple of it."""

_BYTES = 256


def table(form: str) -> np.ndarray:
    """The words that bytes of codes are looked up in, and behind them those of scales, where these are bytes."""
    codes = np.arange(_BYTES)
    if form == "float8":
        return codes.astype(np.uint8).view(jnp.float8_e4m3fn).astype(np.float32).view(np.int32)
    values = NORMAL_FLOAT4 if form == "nf4" else (*E2M1, *(-magnitude for magnitude in E2M1))
    bits = np.asarray(values, np.float32).astype(jnp.bfloat16).view(np.uint16).astype(np.int32)
    words = bits[codes % 16] | bits[codes // 16] << 16
    if form == "nf4":
        return words
    scales = np.where(codes == MXFP4_NAN, np.nan, np.ldexp(1.0, codes - 127)).astype(jnp.bfloat16)
    bits = scales.view(np.uint16).astype(np.int32)
    return np.concatenate([words, bits | bits << 16])


class Codes:
    """How the compressed weights `(E, in, out)` of a tile lie in a slot, are copied there, and are decoded.

    Where weights are not transposed, a row of codes is of one or two inputs, and has all columns of the tile. Otherwise
    columns are inputs, and a row is of one or two of them, along the step's part of the contracted outputs; the rows
    that eight threads load together are next to each other then.

    Args:
      tile: the block's.
      k: the contracted dimension.
      weights: of one form and shape; side by side in a tile, or transposed.
      transposed: whether outputs are contracted.
    """

    def __init__(self, tile: Tile, k: Steps, weights: Sequence[QuantizedWeight], *, transposed: bool):
        self.tile, self.k, self.transposed = tile, k, transposed
        self.form, (_, self.inputs, self.outputs) = weights[0].form, weights[0].shape
        (self.of_byte, _), (self.of_scale, _) = weights[0].coding.steps
        self.scale_rows, self.scale_columns = weights[0].scales.shape[1:]
        self.projections = 1 if transposed else len(weights)
        self.rows = (tile.columns if transposed else tile.depth) // self.of_byte
        self.row_words = (tile.depth if transposed else tile.columns) // 4
        self.chunks = self.row_words // 4
        self.together = 4 // self.of_byte  # rows of a thread's four columns, where transposed
        self.table = table(self.form)

    def load_table(self, shared: Pointer, words: Pointer) -> None:
        """Brings the words of the table to shared memory, where they are when the block's threads have met."""
        for first in range(0, self.table.size, THREADS):
            shared[simt.thread() + first] = words[simt.thread() + first]

    def word(self, place: Int, chunk: Int) -> Int:
        """The word where 16 bytes of a row are. What lanes load together is in all 32 banks.

        That is 4 rows of two chunks next to each other; or, transposed, half of a chunk of 8 rows.
        """
        swizzle = place // (32 // self.row_words) if self.transposed else place // (2 // self.of_byte) % 4 * 2
        return place * self.row_words + (chunk ^ swizzle % self.chunks) * 4

    def copies(self, weights: Sequence[Any], expert: Int, offset: Int, first: Int, end: int) -> list[Copy]:
        """This thread's copies of a step's codes; see `operands.copy_panels`."""
        values = [weight.values for weight in weights]
        expert_bytes = Long(expert * (self.inputs // self.of_byte)) * self.outputs
        chunks = self.chunks // self.projections  # of a row of one weight
        number = self.rows * chunks

        def copy(side: int, i: int, step: Int, slot: Pointer):
            item = simt.thread() + i * THREADS
            row, chunk = item // chunks, item % chunks
            if self.transposed:
                codes, first_k = self.k.choose(values, step)
                place = row // self.together + row % self.together * (self.rows // self.together)
                index = first_k + chunk * CHUNK_BYTES
                wanted = (index < self.outputs) & (first + row * self.of_byte < end)
                source = codes.at(expert_bytes + Long((offset + first) // self.of_byte + row) * self.outputs)
            else:
                place, step_row, column = row, step * self.rows + row, first + chunk * CHUNK_BYTES
                index = Long(step_row) * self.outputs
                wanted = (step_row < self.inputs // self.of_byte) & (column < end)
                source = values[side].at(expert_bytes + Long(offset + column))
            there = step < self.k.number
            if number < (i + 1) * THREADS:
                there = there & (item < number)
            word = self.word(place, chunk + side * chunks) + self.tile.lhs_words
            start_copy(slot, word, source, index, wanted, there)

        passes = -(-number // THREADS)
        return [partial(copy, side, i) for side in range(self.projections) for i in range(passes)]

    def loader(self, part: WarpPart, table: Pointer, weights: Sequence[Any], expert: Int, columns: Sequence[Int]):
        """`(slot, step, product, half)` loads and decodes half a panel, as `operands.load_half` does.

        Args:
          part: the warp's.
          table: what `table` returns, in shared memory.
          weights: pointers, of `QuantizedWeight`s.
          expert: the tile's.
          columns: the first column of each half of the warp's, among those of a weight.
        """
        scales = [weight.scales for weight in weights]
        load = self._transposed if self.transposed else self._side_by_side
        group = part.lane // 4

        def decoded(slot: Pointer, step: Int, product: int, half: int) -> list[list[Int]]:
            own, first_k = self.k.choose(scales if self.transposed else [scales[half * self.projections // 2]], step)
            column = minimum(columns[half] + group * 4, (self.inputs if self.transposed else self.outputs) - 4)
            codes = slot.at(self.tile.lhs_words)
            of_eight = load(part, table, codes, own, expert, column, first_k + product * 16, product, half)
            return [of_eight[0] + of_eight[1], of_eight[2] + of_eight[3]]

        return decoded

    def _side_by_side(self, part, table, codes, scales, expert, column, k, product, half) -> list[list[Int]]:
        """Of each of the thread's four columns: two registers."""
        quad, group = part.lane % 4, part.lane // 4
        row = quad * (2 // self.of_byte)
        chunk = part.unit * (UNIT // CHUNK_BYTES) + half * (self.tile.columns // 2 // CHUNK_BYTES) + group // 4
        word = self.word(row, chunk) + group % 4
        scale = self._scales_of_columns(table, scales, expert, column, minimum(k, self.inputs - 1))

        def load(of_row: int) -> Int:
            return codes[word + (product * (16 // self.of_byte) + of_row) * self.row_words]

        found = [[] for _ in range(4)]
        for upper in range(2):
            if self.of_byte == 2:
                bytes_of = load(upper * 4)
                for i in range(4):
                    found[i].append(multiply_pairs(table[_byte(bytes_of, i)], scale[i], self.tile.kind))
            else:
                pair = load(upper * 8), load(upper * 8 + 1)
                for i in range(4):
                    low, high = (table[_byte(bytes_of, i)].as_float() * scale[i] for bytes_of in pair)
                    found[i].append(pack(low, high, self.tile.kind))
        return found

    def _scales_of_columns(self, table, scales, expert, column, k) -> list:
        """Four columns' scales at one k: each twice in a register, or a float32."""
        row = Long(expert * self.scale_rows + k // self.of_scale) * self.scale_columns
        if self.form == "float8":
            return [scales[row + Long(column // self.of_scale)]] * 4
        if self.form == "nf4":
            pairs = [scales.load_word(row + Long(column + 2 * i)) for i in range(2)]
            return [permute_bytes(pair, order) for pair in pairs for order in ((0, 1, 0, 1), (2, 3, 2, 3))]
        exponents = scales.load_word(row + Long(column))
        return [table[_byte(exponents, i) + _BYTES] for i in range(4)]

    def _transposed(self, part, table, codes, scales, expert, column, k, product, half) -> list[list[Int]]:
        """See `_side_by_side`."""
        quad, group = part.lane % 4, part.lane // 4
        place = (part.unit * UNIT + half * (self.tile.columns // 2)) // 4 + group
        word = self.word(place, Int(product)) + quad // 2
        found = [[] for _ in range(4)]
        for upper in range(2):
            scale = self._scales_of_outputs(table, scales, expert, column, k + quad * 2 + upper * 8)
            for row in range(self.together):
                apart = row * (self.rows // self.together) * self.row_words
                bytes_of = codes[word + (apart + upper * 2)] >> quad % 2 * 16
                first, second = (table[_byte(bytes_of, i)] for i in range(2))
                if self.of_byte == 2:
                    for i, pair in enumerate((_lower(first, second), _upper(first, second))):
                        found[2 * row + i].append(multiply_pairs(pair, scale, self.tile.kind))
                else:
                    low, high = (number.as_float() * scale for number in (first, second))
                    found[row].append(pack(low, high, self.tile.kind))
        return found

    def _scales_of_outputs(self, table, scales, expert, column, k) -> Any:
        """The scales of four columns at k and the next: both in a register, or a float32, which they share."""
        row = Long(expert * self.scale_rows + column // self.of_scale) * self.scale_columns
        k = minimum(k, self.outputs - 2)
        if self.form == "float8":
            return scales[row + Long(k // self.of_scale)]
        if self.form == "nf4":
            return scales.load_word(row + Long(k))
        exponents = scales.load_word(row + Long(k // 4 * 4)) >> k % 4 * 8
        first, second = (table[_byte(exponents, i) + _BYTES] for i in range(2))
        return _lower(first, second)


def _lower(first: Int, second: Int) -> Int:
    """The lower halves of two registers."""
    return first & 0xFFFF | second << 16


def _upper(first: Int, second: Int) -> Int:
    return first >> 16 & 0xFFFF | second & -0x10000


def _byte(word: Int, number: int) -> Int:
    return (word >> 8 * number if number else word) & 255


def in_order(sums: Sums, lane: Int) -> Sums:
    """The sums of threads that had four neighbouring columns of each half panel, as threads have them elsewhere."""
    for of_rows in sums:
        for of_half in of_rows:
            before = [list(of_eight) for of_eight in of_half]
            for upper in range(2):
                for last in range(2):
                    places = [divmod(2 * pair + last, 4) for pair in range(4)]
                    words = [before[eight][2 * upper + which].bits() for which, eight in places]
                    for eight, word in enumerate(transposed_words(words, lane % 4)):
                        of_half[eight][2 * upper + last] = word.as_float()
    return sums
