"""The row kernels' tile: rows of one expert, found by index or in order, times columns of that expert's weights.

A block has a tile. All its threads copy 16 bytes at a time into a ring of slots, several steps ahead, and every warp
multiplies its own part of the tile. One barrier a step says both that a slot is there and that another one is free.
Tensor cores have work meanwhile: what is multiplied is loaded to registers one product ahead, across the barrier, and
copies are started between the products, a few at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import simt
from pallas_kernels.ampere import operands
from pallas_kernels.ampere.decoding import Codes, in_order
from pallas_kernels.ampere.operands import (
    WARPGROUPS,
    Copy,
    Pieces,
    Steps,
    Sums,
    WarpOutput,
    WarpPart,
    abreast,
    tuned_tile,
)
from pallas_kernels.ampere.pipeline import Operands, Slots, sweep_columns
from pallas_kernels.codings import is_quantized
from pallas_kernels.contract import Dispatch
from pallas_kernels.mosaic.row_groups import TILE_ROWS, TileSchedule
from pallas_kernels.simt.matrices import CHUNK, commit_copies, pack, unpack
from pallas_kernels.simt.threads import transposed_words, when
from pallas_kernels.simt.values import Float, Int, Long, Pointer, minimum
from pallas_kernels.tuning.parameters import MmaTuning


def row_matmul(
    kernel: str,
    groups: Dispatch[TileSchedule],
    lhs: Sequence[jax.Array],
    weights: Sequence[Any],
    *,
    gathered: bool = False,
    transposed: bool = False,
    first_column: jax.Array | int | None = None,
    num_columns: int,
    extra: Any = (),
    in_place: Sequence[Any] = (),
    results: Sequence[Any],
    end: Callable,
    tuning: MmaTuning | None,
) -> list:
    """Runs a row kernel over all tiles of rows and returns its results.

    Args:
      kernel: the name by which tables know its parameters.
      groups: the rows by expert.
      lhs: one `(T, k)` if `gathered`, else `(R, k)`; k is a multiple of 8. Of float32, products round to tf32.
      weights: one or two of `(E, k, columns)`, of any floating dtype, or those that `decodes` says; a tile has equal
        parts of each.
      gathered: rows of `lhs` are found by token index, and are zero outside of it; else they are in order.
      transposed: weights are `(E, columns, k)`, as many as there are `lhs`, and the products of all pairs are summed.
      first_column: the first one of the columns wanted, a multiple of 8; None for 0.
      num_columns: how many are wanted of each of the weights, a multiple of 8.
      extra: other operands of `end`.
      in_place: `(R, num_columns)`, read by the end in `Pieces`, which come through the ring behind the operands of the
        products; the first results take their memory if XLA can do so without a copy.
      results: shapes and dtypes of the others.
      end: `(extra, results, where, sums, pieces)`, the end of a tile; `pieces` yields what loads each piece.
      tuning: parameters, or None for those of tables and rules.
    """
    (num_lhs_rows, depth), dtype = lhs[0].shape, lhs[0].dtype
    axis = 1 if transposed else 2
    d, n = (depth, weights[0].shape[axis]) if gathered else (weights[0].shape[axis], depth)
    tile, compressed = tuned_tile(kernel, tuning, dtype, d, n, groups), is_quantized(weights[0])
    if first_column is not None:
        first_column = jnp.asarray(first_column, jnp.int32)
        if not compressed and weights[0].dtype != dtype:  # others are converted for these columns alone
            weights = [lax.dynamic_slice_in_dim(w, first_column, num_columns, axis) for w in weights]
            first_column = jnp.zeros(1, jnp.int32)
        first_column = first_column.reshape(1)
    weights = tuple(weights) if compressed else tuple(w.astype(dtype) for w in weights)
    weight_columns = weights[0].shape[axis]

    copy_right, load_right = (
        (operands.copy_columns, operands.load_columns) if transposed else (operands.copy_panels, operands.load_panels)
    )
    width = tile.columns if transposed else tile.columns // len(weights)  # projections are side by side in a tile
    row_tiles, column_tiles = groups.tiles.num_tiles, -(-num_columns // width)
    sweeps = tile.sweeps(column_tiles)
    k, pieces = Steps(tile, depth, len(lhs)), Pieces(tile, len(in_place), num_columns)
    codes = Codes(tile, k, weights, transposed=transposed) if compressed else None
    words = None if codes is None else jnp.asarray(codes.table)

    def body(schedule, lhs, token_indices, weights, words, first_column, extra, *others):
        *others, looked_up, slots = others
        before, out, ring = others[: len(in_place)], others[len(in_place) :], Slots(slots, tile)
        if codes is not None:
            codes.load_table(looked_up, words)
        row_tile, sweep = abreast(simt.block(), row_tiles, sweeps, tile.abreast)
        expert, first_row, valid_rows = (of_tiles[row_tile] for of_tiles in schedule)
        with when(valid_rows > 0):
            offset = first_column[0] if first_column else Int(0)
            row_copies = operands.copy_rows(lhs, num_lhs_rows, token_indices, first_row, valid_rows, k)
            part = WarpPart(tile)

            def where(column_tile: Int) -> WarpOutput:
                halves = part.halves(column_tile, width)
                return WarpOutput(expert, first_row + part.row, valid_rows - part.row, halves, part.lane)

            def start_piece(column_tile: Int, piece: Int):
                if in_place:
                    with when((piece >= 0) & (piece < pieces.number)):
                        pieces.start(before, where(column_tile), piece, ring.slot(piece + k.number))

            def arriving(column_tile: Int) -> Iterator[Callable]:
                for piece in range(pieces.number):
                    ring.wait()
                    if piece + tile.stages - 1 < pieces.number:
                        start_piece(column_tile, Int(piece + tile.stages - 1))
                    commit_copies()
                    yield partial(pieces.load, ring.slot(Int(k.number + piece)), part.lane)

            def right_of(column_tile: Int) -> tuple[list[Copy], Callable]:
                """What copies a step of the weights' columns, and what loads them from there."""
                first = column_tile * width
                if codes is None:
                    copies = copy_right(weights, weight_columns, expert, offset, first, num_columns, k)
                    return copies, partial(operands.load_half, load_right, part)
                columns = [offset + column for _, column in part.halves(column_tile, width)]
                loader = codes.loader(part, looked_up, weights, expert, columns)
                return codes.copies(weights, expert, offset, first, num_columns), loader

            def of_column(column_tile: Int) -> tuple[Operands, Int]:
                copies, load = right_of(column_tile)
                multiplied = Operands(
                    row_copies + copies,
                    left=partial(operands.load_rows, part),
                    right=load,
                    behind=lambda step: start_piece(column_tile, step - k.number),
                )
                # A number that the assembler does not know: it would unroll a few steps whole, and registers run out.
                return multiplied, (valid_rows + (TILE_ROWS - 1)) // TILE_ROWS * k.number

            def finish(column_tile: Int, sums: Sums):
                own = sums if codes is None else in_order(sums, part.lane)
                end(extra, out, where(column_tile), own, arriving(column_tile))

            sweep_columns(ring, sweep, column_tiles, of_column, finish, ring_is_free=not in_place)

    return simt.kernel(
        body,
        name=f"moe_{kernel}",
        outputs=results,
        blocks=row_tiles * sweeps,
        warpgroups=WARPGROUPS,
        shared=[None if words is None else words.size, tile.stages * tile.slot_words],
        updated=len(in_place),
    )(
        groups.tiles.arrays,
        tuple(lhs),
        groups.expert_token_indices if gathered else None,
        weights,
        words,
        first_column,
        extra,
        *in_place,
    )


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
    results: Sequence[Pointer],
    where: WarpOutput,
    sums: Sums,
    num_columns: int,
    biases: Sequence = (None, None),
    before: Sequence[Pointer] = (),
) -> None:
    """Stores the warp's part of a tile, each half panel to its projection's result, after adding its bias.

    What `before` has for each projection, in the places and the type of the results, is added, too.
    """

    def end_rows(first, of_rows):
        for values, bias, (projection, column) in zip(of_rows, biases, where.halves, strict=True):
            there = before[projection] if before else None
            store_half(results[projection], where, first, column, add_bias(values, bias), num_columns, there)

    for_rows(where, sums, end_rows)


def for_rows(where: WarpOutput, sums: Sums, end: Callable) -> None:
    """Calls `end(first_row, sums)` for every 16 rows of the warp's part, in the warps where the tile has such rows.

    The branch has another use: the assembler does not mix the ends of several 16 rows, for which registers are few.
    """
    for m, of_rows in enumerate(sums):
        with when(where.rows > 16 * m):
            end(16 * m, of_rows)


def store_half(
    output: Pointer,
    where: WarpOutput,
    first_row: int,
    column: Int,
    values: list[list[Float]],
    num_columns: int,
    before: Pointer | None = None,
) -> None:
    """Stores 16 rows, from the warp's `first_row` on, of half a panel at `output[where.row :, column :]`.

    Args:
      output: `(R, num_columns)`.
      where: the warp's part.
      first_row: the first of them in the warp's part.
      column: the half panel's first one in the output.
      values: the thread's, by 8 columns and register, as `matrices.multiply` has its sums.
      num_columns: width of the output.
      before: an array like the output, from which it is added to the values; None for no other addend.
    """
    for i in range(2):
        of_rows = [v[2 * i : 2 * i + 2] for v in values]
        store_rows(output, where, first_row + 8 * i, column, of_rows, num_columns, before)


def store_rows(
    output: Pointer,
    where: WarpOutput,
    first_row: int,
    column: Int,
    values: list[list[Float]],
    num_columns: int,
    before: Pointer | None = None,
) -> None:
    """Stores 8 rows of half a panel, as `store_half` does: of each 8 columns, the two numbers that the thread has.

    Sums of 16 bits are of numbers that were rounded to it, and rounded themselves.
    """
    quad = where.lane % 4
    row = where.lane // 4 + first_row
    if output.kind == "float32":  # four lanes have 32 bytes of a row, as many as memory moves at once
        own = column + quad * 2
        for i, numbers in enumerate(values):
            with when((row < where.rows) & (own + i * CHUNK < num_columns)):
                index = Long(where.row + row) * num_columns + (own + i * CHUNK)
                if before is not None:
                    there = before.load_vector(index, len(numbers)).elements()
                    numbers = [x + y for x, y in zip(numbers, there, strict=True)]
                output.store_words(index, [x.bits() for x in numbers])
        return
    words = transposed_words(
        [pack(low, high, output.kind) for low, high in values], quad
    )  # 8 columns of one row, 16 bytes
    own = column + quad * CHUNK
    with when((row < where.rows) & (own < num_columns)):
        index = Long(where.row + row) * num_columns + own
        if before is not None:
            there = before.load_vector(index, CHUNK).wide().elements()
            numbers = [x for word in words for x in unpack(word, output.kind)]
            added = [x + y for x, y in zip(numbers, there, strict=True)]
            words = [pack(added[i], added[i + 1], output.kind) for i in range(0, CHUNK, 2)]
        output.store_words(index, words)
