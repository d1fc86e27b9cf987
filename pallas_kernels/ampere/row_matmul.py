"""The row kernels' tile: rows of one expert, found by index or in order, times columns of that expert's weights.

A block has a tile. All its threads copy 16 bytes at a time into a ring of slots, several steps ahead, and every warp
multiplies its own part of the tile. One barrier a step says both that a slot is there and that another one is free.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ampere.panels import CHUNKS, ROW_WORDS, Panels, Sums, copied, no_sums
from pallas_kernels.ampere.tile import HALF, PANEL, WARPGROUPS, Tile, WarpPart
from pallas_kernels.mosaic.row_groups import TileSchedule
from pallas_kernels.simt import language as simt
from pallas_kernels.simt.language import loop, when
from pallas_kernels.simt.matrices import (
    chunk_size,
    commit_copies,
    load_matrices,
    start_copy,
    tensor_operand,
    wait_for_copies,
)
from pallas_kernels.simt.values import Int, Long, Pointer


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


def row_matmul(
    name: str,
    schedule: TileSchedule,
    lhs: jax.Array,
    token_indices: jax.Array | None,
    weights: Sequence[jax.Array],
    *,
    first_column: jax.Array | None = None,
    num_columns: int,
    extra: Any = (),
    results: Any,
    end: Callable,
    tile: Tile,
) -> Any:
    """Runs a row kernel over the whole schedule and returns its results.

    Args:
      name: of the kernel in profiles.
      schedule: the row tiles.
      lhs: `(T, k)`, with `token_indices`; else `(R, k)`; k is a multiple of 8. Of float32, products round to tf32.
      token_indices: `(R,)` int32, of the rows in `lhs`; rows outside of it are zero. None: they are in order.
      weights: one or two of `(E, k, columns)`, in the dtype of `lhs`; a tile has equal parts of each.
      first_column: `(1,)` int32, of the columns wanted, a multiple of 8; None: 0.
      num_columns: of each of the weights, a multiple of 8.
      extra: other operands of `end`.
      results: shapes and dtypes.
      end: `(extra, results, where, sums)`, the end of a tile.
      tile: its shape.
    """
    num_lhs_rows, depth = lhs.shape
    weight_columns = weights[0].shape[2]
    width = tile.columns // len(weights)  # of a projection's part of a tile
    column_tiles = -(-num_columns // width)
    kind = jnp.dtype(lhs.dtype).name
    elements, panels = chunk_size(kind), Panels.of(tile, kind)
    steps = -(-depth // panels.rows)

    def place(column: int) -> tuple[int, int]:
        """The projection of a column of the tile, and its place in that projection's part."""
        return divmod(column, width)

    def lhs_copies(lhs, token_indices, first_row, valid_rows) -> Callable:
        """`copy(k, slot)` starts this thread's copies of rows."""
        row, chunk, passes, apart = tile.lhs_copies(simt.thread())
        rows = []
        for i in range(passes):
            mine = row + i * apart
            source = first_row + mine if token_indices is None else token_indices[first_row + mine]
            known = (mine < valid_rows) & (source >= 0) & (source < num_lhs_rows)
            rows.append((lhs.at(Long(source) * depth + chunk * elements), known))
        word = tile.lhs_word(row, chunk)

        def copy(k, slot: Pointer):
            inside = k * panels.rows + chunk * elements < depth
            for i, (source, known) in enumerate(rows):
                start_copy(slot, word + i * apart * (tile.k_step // 2), source, k * panels.rows, known & inside)

        return copy

    def rhs_copies(weights, expert, first_column, column) -> Callable:
        """`copy(k, slot)` starts this thread's copies of weights; `column` is the tile's first one."""
        row, chunk = simt.thread() // CHUNKS, simt.thread() % CHUNKS
        parts = []
        for panel in range(tile.columns // panels.columns):
            projection, start = place(panel * panels.columns)
            mine = column + start + chunk * elements
            source = (Long(expert) * depth + row) * weight_columns + (first_column + mine)
            parts.append((weights[projection].at(source), mine < num_columns))
        word = panels.word(row, chunk) + tile.lhs_words

        def copy(k, slot: Pointer):
            for i in range(0, panels.rows, panels.apart):
                step_row = k * panels.rows + i
                inside = step_row + row < depth
                for panel, (source, known) in enumerate(parts):
                    target = word + (panel * panels.words + i * ROW_WORDS)
                    start_copy(slot, target, source, step_row * weight_columns, known & inside)

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
            panels.multiply(sums, [tensor_operand(a, kind) for a in left], right, tile, part, step)
        return sums

    def body(schedule, lhs, token_indices, weights, first_column, extra, *results_and_ring):
        *out, ring = results_and_ring
        row_tile, column_tile = simt.block() // column_tiles, simt.block() % column_tiles
        expert, first_row, valid_rows = (of_tiles[row_tile] for of_tiles in schedule)
        with when(valid_rows > 0):
            copy_lhs = lhs_copies(lhs, token_indices, first_row, valid_rows)
            column = column_tile * width
            copy_rhs = rhs_copies(weights, expert, first_column[0] if first_column else Int(0), column)

            def copy(k):
                slot = ring.at(k % tile.stages * tile.slot_words)
                copy_lhs(k, slot)
                copy_rhs(k, slot)

            for k in range(tile.stages - 1):
                if k < steps:
                    copy(Int(k))
                commit_copies()
            part = WarpPart.of(tile)

            def step(k, *flat):
                wait_for_copies(tile.stages - 2)
                simt.block_barrier()
                following = k + (tile.stages - 1)
                with when(following < steps):
                    copy(following)
                commit_copies()
                slot = ring.at(k % tile.stages * tile.slot_words)
                return jax.tree.leaves(multiply_slot(slot, part, jax.tree.unflatten(tree, flat)))

            flat, tree = jax.tree.flatten(no_sums(tile))
            sums = jax.tree.unflatten(tree, loop(0, steps, 1, step, flat))

            halves = []
            for half in range(2):
                projection, start = place(half * (tile.columns // 2))
                halves.append((projection, column + start + part.panel * PANEL + part.half * HALF))
            where = Where(expert, first_row + part.row, valid_rows - part.row, tuple(halves), part.lane)
            end(extra, out, where, sums)

    return simt.simt_kernel(
        body,
        name=name,
        outputs=results,
        blocks=schedule.num_tiles * column_tiles,
        warpgroups=WARPGROUPS,
        shared=[tile.stages * tile.slot_words],
    )(schedule, lhs, token_indices, tuple(weights), first_column, extra)
