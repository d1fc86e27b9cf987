"""Quantized pre-activations as the kernels for Ampere hold them: four numbers of a row in each word of 32 bits.

A block has 32 columns of a row, half a panel: of what four lanes have, the largest is known without another warp. They
write two words each, with the columns that each lane has, one after the other. The scales `(blocks, R)` of a tile's
rows are next to each other.
"""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ampere.operands import HALF, WarpOutput
from pallas_kernels.contract import BYTE_OFFSET, INFINITY_BITS, MAGNITUDE_BITS, Quantized
from pallas_kernels.simt.matrices import CHUNK
from pallas_kernels.simt.threads import combine_lanes, when
from pallas_kernels.simt.values import Float, Int, Long, maximum, minimum, multiply_add, reciprocal, select

LANE_WORDS = 2
BLOCK_WORDS = 4 * LANE_WORDS


def quantized_shapes(num_rows: int, n: int) -> Quantized:
    """Shapes and dtypes of quantized rows of n columns."""
    blocks = -(-n // HALF)
    numbers = jax.ShapeDtypeStruct((num_rows, blocks * BLOCK_WORDS), jnp.int32)
    return Quantized(numbers, jax.ShapeDtypeStruct((blocks, num_rows), jnp.float32))  # pyright: ignore[reportArgumentType]


def store_quantized(
    output: Any, where: WarpOutput, first_row: int, column: Int, values: list[list[Float]], n: int, num_rows: int
) -> None:
    """Stores 16 rows of half a panel, as `row_matmul.store_half` does, to the `Quantized` arrays `(num_rows, n)`."""
    for i in range(2):
        row = where.lane // 4 + first_row + 8 * i
        # Past the last column are biases of others.
        own = [select(column + e * CHUNK < n, x, 0.0) for e, v in enumerate(values) for x in v[2 * i : 2 * i + 2]]
        largest = combine_lanes(maximum, reduce(maximum, (x.bits() & MAGNITUDE_BITS for x in own)), 4)
        scale = largest.as_float() * (1 / 127)
        scale = select(Float(float(np.finfo(np.float32).tiny)) > scale, 1.0, scale)
        scale = select(largest < INFINITY_BITS, scale, float("nan"))  # as `contract.quantization_scales` has it
        factor = reciprocal(scale)
        numbers = [multiply_add(x, factor, BYTE_OFFSET).bits() & 255 for x in own]
        words = [reduce(lambda word, b: word << 8 | b, numbers[j + 3 : j - 1 if j else None : -1]) for j in (0, 4)]
        with when((row < where.rows) & (column < n)):
            place, block = _place(where.row + row, column, where.lane, n), column // HALF
            output.values.store_words(place, words)
            with when((where.lane % 4).equals(0)):
                output.scales[Long(block) * num_rows + (where.row + row)] = scale


def load_quantized(
    array: Any, where: WarpOutput, first_row: int, column: Int, n: int, num_rows: int
) -> list[list[Float]]:
    """The thread's pre-activations in 8 rows of half a panel: of each 8 columns, two."""
    row = where.row + (where.lane // 4 + first_row)
    column = minimum(column, (n - 1) // HALF * HALF)
    words = array.values.load_vector(_place(row, column, where.lane, n), LANE_WORDS).elements()
    scale = array.scales[Long(column // HALF) * num_rows + row]
    numbers = [(word >> 8 * i & 255 | 0x4B000000).as_float() - BYTE_OFFSET for word in words for i in range(4)]
    return [[number * scale for number in numbers[i : i + 2]] for i in range(0, 8, 2)]


def _place(row: Int, column: Int, lane: Int, n: int) -> Long:
    """Where the words of a lane are."""
    of_row = column // HALF * BLOCK_WORDS + lane % 4 * LANE_WORDS
    return Long(row) * (-(-n // HALF) * BLOCK_WORDS) + of_row
