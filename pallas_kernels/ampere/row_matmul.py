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
from pallas_kernels.ampere.operands import Columns, Copy, Steps, copy_columns, copy_panels, copy_rows
from pallas_kernels.ampere.panels import Panels, Sums, load_columns
from pallas_kernels.ampere.pipeline import ColumnTiles, Operands, Ring, sweep_columns
from pallas_kernels.ampere.tile import HALF, PANEL, WARPGROUPS, Tile, WarpPart, abreast
from pallas_kernels.mosaic.row_groups import TILE_ROWS, TileSchedule
from pallas_kernels.simt.matrices import commit_copies, load_matrices, tensor_operand
from pallas_kernels.simt.threads import when
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
    row_tiles, column_tiles = schedule.num_tiles, -(-num_columns // width)
    sweeps = tile.sweeps(column_tiles)
    kind = jnp.dtype(lhs[0].dtype).name
    panels = Panels.of(tile, kind)
    right_operand = Columns(kind, tile) if transposed else panels
    k = Steps(kind, depth, panels.rows, len(lhs))
    steps = k.number

    def place(column: int) -> tuple[int, int]:
        """The projection of a column of the tile, and its place in that projection's part."""
        return divmod(column, width)

    def copy_weights(weights, expert, offset: Int, column: Int) -> list[Copy]:
        """Of this thread; `column` is the tile's first one of those wanted."""
        wanted = (weight_columns, expert, offset, column, num_columns)
        if transposed:
            return copy_columns(weights, *wanted, tile, k)
        return copy_panels(weights, *wanted, panels, tile, k)

    def load_rows(slot: Pointer, part: WarpPart, product: int) -> list[list[Int]]:
        own_row, side = part.lane % 16, part.lane // 16  # of the 16 rows and two chunks that a warp loads at a time
        word = tile.lhs_word(own_row, side + 2 * product)
        apart = 16 * (tile.k_step // 2)
        rows = slot.at(part.row * (tile.k_step // 2))
        return [tensor_operand(load_matrices(rows, word + m * apart), kind) for m in range(tile.warp_rows // 16)]

    def body(schedule, lhs, token_indices, weights, first_column, extra, *others):
        operands, out, ring = others[: len(in_place)], others[len(in_place) : -1], Ring(others[-1], tile)
        row_tile, sweep = abreast(simt.block(), row_tiles, sweeps, tile.abreast)
        expert, first_row, valid_rows = (of_tiles[row_tile] for of_tiles in schedule)
        with when(valid_rows > 0):
            offset = first_column[0] if first_column else Int(0)
            row_copies = copy_rows(lhs, num_lhs_rows, token_indices, first_row, valid_rows, tile, k)
            part = WarpPart.of(tile)

            def where(column_tile: Int) -> Where:
                halves = []
                for half in range(2):
                    projection, first = place(half * (tile.columns // 2))
                    halves.append((projection, column_tile * width + first + part.panel * PANEL + part.half * HALF))
                return Where(expert, first_row + part.row, valid_rows - part.row, tuple(halves), part.lane)

            def start_piece(column_tile: Int, piece: Int):
                if isinstance(end, RingEnd):
                    with when((piece >= 0) & (piece < end.pieces)):
                        end.start(operands, where(column_tile), piece, ring.slot(piece + steps))

            def of_column(column_tile: Int) -> tuple[Operands, Int]:
                multiplied = Operands(
                    kind,
                    panels.steps,
                    row_copies + copy_weights(weights, expert, offset, column_tile * width),
                    lambda slot, product: load_rows(slot, part, product),
                    lambda slot, *place: load_columns(right_operand, slot.at(tile.lhs_words), tile, part, *place),
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

            columns = ColumnTiles.of(tile, sweep, column_tiles)
            sweep_columns(ring, columns, of_column, finish, ring_is_free=not isinstance(end, RingEnd))

    return simt.kernel(
        body,
        name=name,
        outputs=results,
        blocks=row_tiles * sweeps,
        warpgroups=WARPGROUPS,
        shared=[tile.stages * tile.slot_words],
        updated=len(in_place),
    )(schedule.arrays, tuple(lhs), token_indices, tuple(weights), first_column, extra, *in_place)
