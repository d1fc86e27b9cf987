"""The row kernels' tile: rows of one expert, found by index or in order, times columns of that expert's weights.

A block has a tile. All its threads copy 16 bytes at a time into a ring of slots, several steps ahead, and every warp
multiplies its own part of the tile. One barrier a step says both that a slot is there and that another one is free.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ampere.operands import Columns, Steps, copy_columns, copy_panels, copy_rows
from pallas_kernels.ampere.panels import Panels, Sums, copied, multiply_columns, no_sums
from pallas_kernels.ampere.tile import HALF, PANEL, WARPGROUPS, Tile, WarpPart
from pallas_kernels.mosaic.row_groups import TileSchedule
from pallas_kernels.simt import language as simt
from pallas_kernels.simt.language import loop, when
from pallas_kernels.simt.matrices import commit_copies, load_matrices, tensor_operand, wait_for_copies
from pallas_kernels.simt.values import Int, Pointer


class Where(NamedTuple):
    """The part of the output that a warp has.

    Attributes:
      expert: of the tile.
      row: the warp's first one.
      rows: how many from there on are the tile's; none or fewer if not positive, all if as many as it has.
      halves: of each half panel, its projection and first column there.
      lane: of the thread.
    """

    expert: Int
    row: Int
    rows: Int
    halves: tuple[tuple[int, Int], tuple[int, Int]]
    lane: Int


class RingEnd(NamedTuple):
    """The end of a tile that has other operands to read. They come through the ring, behind those of the products.

    Attributes:
      pieces: that the tile's end is done in, one a slot.
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
      name: of the kernel in profiles.
      schedule: the row tiles.
      lhs: one `(T, k)`, with `token_indices`; else `(R, k)`; k is a multiple of 8. Of float32, products round to tf32.
      token_indices: `(R,)` int32, of the rows in `lhs`; rows outside of it are zero. None: they are in order.
      weights: one or two of `(E, k, columns)`, in the dtype of `lhs`; a tile has equal parts of each.
      transposed: weights are `(E, columns, k)`, as many as there are `lhs`, and the products of all pairs are summed.
      first_column: `(1,)` int32, of the columns wanted, a multiple of 8; None: 0.
      num_columns: of each of the weights, a multiple of 8.
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
    column_tiles = -(-num_columns // width)
    kind = jnp.dtype(lhs[0].dtype).name
    panels = Panels.of(tile, kind)
    right_operand = Columns(kind, tile) if transposed else panels
    of_pair = Steps(kind, depth, panels.rows)
    steps = of_pair.number * len(lhs)

    def place(column: int) -> tuple[int, int]:
        """The projection of a column of the tile, and its place in that projection's part."""
        return divmod(column, width)

    def copies(lhs, token_indices, weights, expert, first_row, valid_rows, offset: Int, column: Int) -> Callable:
        """`copy(step, slot)` starts this thread's copies; `column` is the tile's first one of those wanted."""
        rows = [copy_rows(left, num_lhs_rows, token_indices, first_row, valid_rows, tile, of_pair) for left in lhs]
        if transposed:
            wanted = (weight_columns, expert, offset, column, num_columns)
            columns = [copy_columns(w, *wanted, tile, of_pair) for w in weights]
        else:
            places = [place(first) for first in range(0, tile.columns, panels.columns)]
            parts = [(weights[projection], column + start) for projection, start in places]
            columns = [copy_panels(parts, weight_columns, expert, offset, num_columns, panels, tile, of_pair)]

        def copy(step: Int, slot: Pointer):
            for i, (of_rows, of_columns) in enumerate(zip(rows, columns, strict=True)):
                own = step - i * of_pair.number
                with when((own >= 0) & (own < of_pair.number)):
                    of_rows(own, slot)
                    of_columns(own, slot)

        return copy

    def multiply_slot(slot: Pointer, part: WarpPart, sums: Sums) -> Sums:
        own_row, side = part.lane % 16, part.lane // 16  # of the 16 rows and two chunks that a warp loads at a time
        rows, right = slot.at(part.row * (tile.k_step // 2)), slot.at(tile.lhs_words)
        sums = copied(sums)
        for step in range(panels.steps):
            left = [
                load_matrices(rows, tile.lhs_word(own_row, side + 2 * step) + m * 16 * (tile.k_step // 2))
                for m in range(tile.warp_rows // 16)
            ]
            left = [tensor_operand(a, kind) for a in left]
            multiply_columns(sums, left, right_operand, right, tile, part, step)
        return sums

    def body(schedule, lhs, token_indices, weights, first_column, extra, *others):
        operands, out, ring = others[: len(in_place)], others[len(in_place) : -1], others[-1]
        row_tile, column_tile = simt.block() // column_tiles, simt.block() % column_tiles
        expert, first_row, valid_rows = (of_tiles[row_tile] for of_tiles in schedule)
        with when(valid_rows > 0):
            column = column_tile * width
            offset = first_column[0] if first_column else Int(0)
            copy = copies(lhs, token_indices, weights, expert, first_row, valid_rows, offset, column)
            part = WarpPart.of(tile)
            halves = []
            for half in range(2):
                projection, first = place(half * (tile.columns // 2))
                halves.append((projection, column + first + part.panel * PANEL + part.half * HALF))
            where = Where(expert, first_row + part.row, valid_rows - part.row, tuple(halves), part.lane)

            def slot_of(step) -> Pointer:
                return ring.at(step % tile.stages * tile.slot_words)

            def start_piece(piece: Int):
                if isinstance(end, RingEnd):
                    with when((piece >= 0) & (piece < end.pieces)):
                        end.start(operands, where, piece, slot_of(piece + steps))

            def start(step: Int):
                copy(step, slot_of(step))
                start_piece(step - steps)
                commit_copies()

            def wait():
                wait_for_copies(tile.stages - 2)
                simt.block_barrier()

            for k in range(tile.stages - 1):
                start(Int(k))

            def step(k, *flat):
                wait()
                start(k + (tile.stages - 1))
                sums = multiply_slot(slot_of(k), part, jax.tree.unflatten(tree, flat))
                return jax.tree.leaves(sums)

            flat, tree = jax.tree.flatten(no_sums(tile))
            sums = jax.tree.unflatten(tree, loop(0, steps, 1, step, flat))
            if not isinstance(end, RingEnd):
                end(extra, out, where, sums)
                return
            begun = end.begin(extra, where)
            for piece in range(end.pieces):
                wait()
                if piece + tile.stages - 1 < end.pieces:
                    start_piece(Int(piece + tile.stages - 1))
                commit_copies()
                end.finish(begun, out, where, sums, piece, slot_of(Int(steps + piece)))

    return simt.simt_kernel(
        body,
        name=name,
        outputs=results,
        blocks=schedule.num_tiles * column_tiles,
        warpgroups=WARPGROUPS,
        shared=[tile.stages * tile.slot_words],
        updated=len(in_place),
    )(schedule, tuple(lhs), token_indices, tuple(weights), first_column, extra, *in_place)
