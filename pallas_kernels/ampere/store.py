"""Biases of a tile's columns, and stores of its rows."""

from collections.abc import Callable

from pallas_kernels.ampere.panels import Sums
from pallas_kernels.ampere.row_matmul import Where
from pallas_kernels.simt.matrices import CHUNK, pack
from pallas_kernels.simt.threads import shuffle_xor, when
from pallas_kernels.simt.values import Float, Int, Long, Pointer, minimum, select


def bias_of(bias: Pointer | None, where: Where, column: Int, num_columns: int) -> list[list[Float]] | None:
    """The bias `(E, num_columns)`, float32, of the thread's columns of half a panel: two of each 8."""
    if bias is None:
        return None
    own = [minimum(column + where.lane % 4 * 2 + i * CHUNK, num_columns - 2) for i in range(4)]
    return [bias.load_vector(Long(where.expert) * num_columns + c, 2).elements() for c in own]


def add_bias(sums: list[list[Float]], bias: list[list[Float]] | None) -> list[list[Float]]:
    """The thread's sums of half a panel plus what `bias_of` gave."""
    if bias is None:
        return sums
    return [[s + own[i % 2] for i, s in enumerate(of_columns)] for of_columns, own in zip(sums, bias, strict=True)]


def for_rows(where: Where, sums: Sums, end: Callable) -> None:
    """Calls `end(first_row, sums)` for every 16 rows of the warp's part, in the warps where the tile has such rows.

    The branch has another use: the assembler does not mix the ends of several 16 rows, for which registers are few.
    """
    for m, of_rows in enumerate(sums):
        with when(where.rows > 16 * m):
            end(16 * m, of_rows)


def store_half(
    output: Pointer, where: Where, first_row: int, column: Int, values: list[list[Float]], num_columns: int
) -> None:
    """Stores 16 rows, from the warp's `first_row` on, of half a panel at `output[where.row :, column :]`.

    Args:
      output: `(R, num_columns)`.
      where: the warp's part.
      first_row: of the warp's.
      column: of the half panel, in the output.
      values: by 8 columns and register, as `matrices.multiply` has its sums.
      num_columns: of the output.
    """
    for i in range(2):
        of_rows = [v[2 * i : 2 * i + 2] for v in values]
        store_rows(output, where, first_row + 8 * i, column, of_rows, num_columns)


def store_rows(
    output: Pointer, where: Where, first_row: int, column: Int, values: list[list[Float]], num_columns: int
) -> None:
    """Stores 8 rows of half a panel, as `store_half` does: of each 8 columns, the two numbers that the thread has."""
    quad = where.lane % 4
    row = where.lane // 4 + first_row
    if output.kind == "float32":  # four lanes have 32 bytes of a row, as many as memory moves at once
        own = column + quad * 2
        for i, numbers in enumerate(values):
            with when((row < where.rows) & (own + i * CHUNK < num_columns)):
                words = [x.bits() for x in numbers]
                output.store_words(Long(where.row + row) * num_columns + (own + i * CHUNK), words)
        return
    words = _transposed([pack(low, high, output.kind) for low, high in values], quad)  # 8 columns of one row, 16 bytes
    own = column + quad * CHUNK
    with when((row < where.rows) & (own < num_columns)):
        output.store_words(Long(where.row + row) * num_columns + own, words)


def _transposed(words: list[Int], quad: Int) -> list[Int]:
    """Word j of lane i of four neighbours becomes word i of lane j."""
    for bit in (1, 2):
        upper = (quad & bit).equals(bit)
        for i in range(4):
            if not i & bit:
                low, high = words[i], words[i + bit]
                other = shuffle_xor(select(upper, low, high), bit)
                words[i], words[i + bit] = select(upper, other, low), select(upper, high, other)
    return words
