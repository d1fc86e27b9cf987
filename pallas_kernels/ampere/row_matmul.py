"""The row kernels' tile: rows of one expert, found by index or in order, times columns of that expert's weights.

A block has a tile. All its threads copy 16 bytes at a time into a ring of slots, several steps ahead, and every warp
multiplies its own part of the tile. One barrier a step says both that a slot is there and that another one is free.
Tensor cores have work meanwhile: what is multiplied is loaded to registers one product ahead, across the barrier, and
copies are started between the products, a few at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import simt
from pallas_kernels.ampere.operands import Columns, Panels, Steps, Sums, copy_rows, load_columns
from pallas_kernels.ampere.pipeline import Operands, Slots, sweep_columns
from pallas_kernels.ampere.tile import WARPGROUPS, Tile, WarpPart, abreast
from pallas_kernels.mosaic.row_groups import TILE_ROWS, TileSchedule
from pallas_kernels.simt.matrices import CHUNK, commit_copies, load_matrices, pack, tensor_operand
from pallas_kernels.simt.threads import shuffle_xor, when
from pallas_kernels.simt.values import Float, Int, Long, Pointer, minimum, select


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


class RingEnd(NamedTuple):
    """The end of a tile that has other operands to read. They come through the ring, behind those of the products.

    Attributes:
      pieces: how many the tile's end is done in, one a slot.
      start: `(operands, where, piece, slot)` starts the warp's copies of a piece, an `Int`.
      begin: `(extra, where)`, what all pieces need.
      finish: `(begun, results, where, sums, piece, slot)`, the end of a piece, an `int`.
    """

    pieces: int
    start: Callable
    begin: Callable
    finish: Callable


def row_matmul(
    name: str,
    schedule: TileSchedule,
    lhs: Sequence[jax.Array],
    token_indices: jax.Array | None,
    weights: Sequence[jax.Array],
    *,
    transposed: bool = False,
    first_column: jax.Array | None = None,
    num_columns: int,
    extra: Any = (),
    in_place: Sequence[jax.Array] = (),
    results: Sequence[jax.ShapeDtypeStruct],
    end: Callable | RingEnd,
    tile: Tile,
) -> list:
    """Runs a row kernel over the whole schedule and returns its results.

    Args:
      name: what profiles call the kernel.
      schedule: the row tiles.
      lhs: one `(T, k)`, with `token_indices`; else `(R, k)`; k is a multiple of 8. Of float32, products round to tf32.
      token_indices: `(R,)` int32, of the rows in `lhs`; rows outside of it are zero. None: they are in order.
      weights: one or two of `(E, k, columns)`, in the dtype of `lhs`; a tile has equal parts of each.
      transposed: weights are `(E, columns, k)`, as many as there are `lhs`, and the products of all pairs are summed.
      first_column: `(1,)` int32, of the columns wanted, a multiple of 8; None: 0.
      num_columns: how many are wanted of each of the weights, a multiple of 8.
      extra: other operands of `end`.
      in_place: what a `RingEnd` reads in pieces; the first results take their memory if XLA can do so without a copy.
      results: shapes and dtypes of the others.
      end: `(extra, results, where, sums)`, the end of a tile, or one in pieces.
      tile: its shape.
    """
    num_lhs_rows, depth = lhs[0].shape
    projections = 1 if transposed else len(weights)  # side by side in a tile
    weight_columns = weights[0].shape[1 if transposed else 2]
    width = tile.columns // projections
    row_tiles, column_tiles = schedule.num_tiles, -(-num_columns // width)
    sweeps = tile.sweeps(column_tiles)
    kind = jnp.dtype(lhs[0].dtype).name
    panels = Panels.of(tile, kind)
    right = Columns(kind, tile) if transposed else panels
    k = Steps(kind, depth, panels.rows, len(lhs))
    steps = k.number

    def load_rows(slot: Pointer, part: WarpPart, product: int) -> list[list[Int]]:
        own_row, side = part.lane % 16, part.lane // 16  # of the 16 rows and two chunks that a warp loads at a time
        word = tile.lhs_word(own_row, side + 2 * product)
        apart = 16 * (tile.k_step // 2)
        rows = slot.at(part.row * (tile.k_step // 2))
        return [tensor_operand(load_matrices(rows, word + m * apart), kind) for m in range(tile.warp_rows // 16)]

    def body(schedule, lhs, token_indices, weights, first_column, extra, *others):
        operands, out, ring = others[: len(in_place)], others[len(in_place) : -1], Slots(others[-1], tile)
        row_tile, sweep = abreast(simt.block(), row_tiles, sweeps, tile.abreast)
        expert, first_row, valid_rows = (of_tiles[row_tile] for of_tiles in schedule)
        with when(valid_rows > 0):
            wanted = weight_columns, expert, first_column[0] if first_column else Int(0)
            row_copies = copy_rows(lhs, num_lhs_rows, token_indices, first_row, valid_rows, tile, k)
            part = WarpPart.of(tile)

            def where(column_tile: Int) -> WarpOutput:
                halves = part.halves(tile, column_tile, width)
                return WarpOutput(expert, first_row + part.row, valid_rows - part.row, halves, part.lane)

            def start_piece(column_tile: Int, piece: Int):
                if isinstance(end, RingEnd):
                    with when((piece >= 0) & (piece < end.pieces)):
                        end.start(operands, where(column_tile), piece, ring.slot(piece + steps))

            def of_column(column_tile: Int) -> tuple[Operands, Int]:
                multiplied = Operands(
                    kind,
                    panels.steps,
                    row_copies + right.copies(weights, *wanted, column_tile * width, num_columns, k),
                    lambda slot, product: load_rows(slot, part, product),
                    lambda slot, *place: load_columns(right, slot.at(tile.lhs_words), tile, part, *place),
                    behind=lambda step: start_piece(column_tile, step - steps),
                )
                # A number that the assembler does not know: it would unroll a few steps whole, and registers run out.
                return multiplied, (valid_rows + (TILE_ROWS - 1)) // TILE_ROWS * steps

            def finish(column_tile: Int, sums: Sums):
                own = where(column_tile)
                if not isinstance(end, RingEnd):
                    end(extra, out, own, sums)
                    return
                begun = end.begin(extra, own)
                for piece in range(end.pieces):
                    ring.wait()
                    if piece + tile.stages - 1 < end.pieces:
                        start_piece(column_tile, Int(piece + tile.stages - 1))
                    commit_copies()
                    end.finish(begun, out, own, sums, piece, ring.slot(Int(steps + piece)))

            sweep_columns(ring, sweep, column_tiles, of_column, finish, ring_is_free=not isinstance(end, RingEnd))

    return simt.kernel(
        body,
        name=name,
        outputs=results,
        blocks=row_tiles * sweeps,
        warpgroups=WARPGROUPS,
        shared=[tile.stages * tile.slot_words],
        updated=len(in_place),
    )(schedule.arrays, tuple(lhs), token_indices, tuple(weights), first_column, extra, *in_place)


def biases_of(biases: Sequence[Pointer], where: WarpOutput, num_columns: int) -> list:
    """The thread's biases in each half panel, two of each 8 columns; None without any.

    Args:
      biases: `(E, num_columns)` in float32, one for each projection, or none.
      where: the warp's part.
      num_columns: width of a bias.
    """

    def half(bias: Pointer, column: Int) -> list[list[Float]]:
        own = [minimum(column + where.lane % 4 * 2 + i * CHUNK, num_columns - 2) for i in range(4)]
        return [bias.load_vector(Long(where.expert) * num_columns + c, 2).elements() for c in own]

    return [half(biases[projection], column) if biases else None for projection, column in where.halves]


def add_bias(sums: list[list[Float]], bias: list[list[Float]] | None) -> list[list[Float]]:
    """The thread's sums of half a panel plus what `biases_of` has for it."""
    if bias is None:
        return sums
    return [[s + own[i % 2] for i, s in enumerate(of_columns)] for of_columns, own in zip(sums, bias, strict=True)]


def store_sums(
    results: Sequence[Pointer], where: WarpOutput, sums: Sums, num_columns: int, biases: Sequence = (None, None)
) -> None:
    """Stores the warp's part of a tile, each half panel to its projection's result, after adding its bias."""

    def end_rows(first, of_rows):
        for values, bias, (projection, column) in zip(of_rows, biases, where.halves, strict=True):
            store_half(results[projection], where, first, column, add_bias(values, bias), num_columns)

    for_rows(where, sums, end_rows)


def for_rows(where: WarpOutput, sums: Sums, end: Callable) -> None:
    """Calls `end(first_row, sums)` for every 16 rows of the warp's part, in the warps where the tile has such rows.

    The branch has another use: the assembler does not mix the ends of several 16 rows, for which registers are few.
    """
    for m, of_rows in enumerate(sums):
        with when(where.rows > 16 * m):
            end(16 * m, of_rows)


def store_half(
    output: Pointer, where: WarpOutput, first_row: int, column: Int, values: list[list[Float]], num_columns: int
) -> None:
    """Stores 16 rows, from the warp's `first_row` on, of half a panel at `output[where.row :, column :]`.

    Args:
      output: `(R, num_columns)`.
      where: the warp's part.
      first_row: the first of them in the warp's part.
      column: the half panel's first one in the output.
      values: the thread's, by 8 columns and register, as `matrices.multiply` has its sums.
      num_columns: width of the output.
    """
    for i in range(2):
        of_rows = [v[2 * i : 2 * i + 2] for v in values]
        store_rows(output, where, first_row + 8 * i, column, of_rows, num_columns)


def store_rows(
    output: Pointer, where: WarpOutput, first_row: int, column: Int, values: list[list[Float]], num_columns: int
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
