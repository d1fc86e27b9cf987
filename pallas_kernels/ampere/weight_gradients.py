"""Weight gradients: products that contract over an expert's rows, the gather on the contracted dimension.

A block has a tile of one expert's gradient and walks over the expert's rows. How long that takes depends on the expert,
so there is a block for every tile, and a multiprocessor takes the next one when it has finished one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import simt
from pallas_kernels.ampere.bias_gradients import expert_sums
from pallas_kernels.ampere.operands import CHUNKS, ROW_WORDS, UNIT, Panels, Sums, all_or_none, load_columns
from pallas_kernels.ampere.pipeline import Operands, Slots, sweep_columns
from pallas_kernels.ampere.row_matmul import WarpOutput, store_sums
from pallas_kernels.ampere.tile import WARPGROUPS, Tile, WarpPart, abreast, tuned_tile
from pallas_kernels.contract import Dispatch
from pallas_kernels.mosaic.row_groups import TILE_ROWS, TileSchedule
from pallas_kernels.simt.matrices import chunk_size, start_copy
from pallas_kernels.simt.values import Int, Long, Pointer, minimum
from pallas_kernels.traced_once import traced_once
from pallas_kernels.tuning.parameters import MmaTuning


@traced_once("dtypes", "bias_dtypes", "tuning")
def up_weight_gradients(
    x: Float[Array, "T d"],
    d_pre_activations: tuple[Float[Array, "R n"], ...],
    groups: Dispatch[TileSchedule],
    *,
    dtypes: tuple,
    bias_dtypes: tuple,
    tuning: MmaTuning | None = None,
) -> tuple[tuple[Float[Array, "E d n"], ...], tuple[Float[Array, "E n"], ...]]:
    """`X_gᵀ · dP` per projection, in one pass over the gathered token rows; see the portable twin.

    Operands of float32 are rounded to tf32, 10 bits of mantissa. Sums are float32. Biases' are of what was not rounded.
    """
    gradients = _row_contraction(
        "moe_up_weight_gradients",
        x,
        d_pre_activations,
        groups,
        left_gathered=True,
        dtypes=dtypes,
        tile=tuned_tile("up_weight_gradients", tuning, d_pre_activations[0], x.shape[1], groups),
    )
    pairs = zip(d_pre_activations, bias_dtypes, strict=False)
    biases = [expert_sums("moe_up_bias_gradients", d, groups, num_tokens=x.shape[0], dtype=t) for d, t in pairs]
    return tuple(gradients), tuple(biases)


@traced_once("dtype", "bias_dtype", "tuning")
def down_weight_gradients(
    weighted_hidden: Float[Array, "R n"],
    dy: Float[Array, "T d"],
    row_weights: Float[Array, " R"],
    groups: Dispatch[TileSchedule],
    *,
    dtype,
    bias_dtype,
    tuning: MmaTuning | None = None,
) -> tuple[Float[Array, "E n d"], Float[Array, "E d"] | None]:
    """`(weights · A)ᵀ · dy_g`; see the portable twin. Rounds as `up_weight_gradients` does."""
    (gradient,) = _row_contraction(
        "moe_down_weight_gradients",
        weighted_hidden,
        (dy,),
        groups,
        left_gathered=False,
        dtypes=(dtype,),
        tile=tuned_tile("down_weight_gradients", tuning, weighted_hidden, dy.shape[1], groups),
    )
    if bias_dtype is None:
        return gradient, None
    weights = row_weights.astype(jnp.float32)
    name = "moe_down_bias_gradients"
    return gradient, expert_sums(
        name, dy, groups, num_tokens=dy.shape[0], dtype=bias_dtype, weights=weights, gathered=True
    )


class _Side(NamedTuple):
    """An operand's part of a block's tile.

    Attributes:
      arrays: the operand's, of which the tile has equal parts.
      gathered: whether they are read by token index, or else by row.
      width: that of each array.
      first: the first column of each array's part.
      columns: width of each array's part.
      word: where its panels are in a slot.
    """

    arrays: Sequence[Pointer]
    gathered: bool
    width: int
    first: Int
    columns: int
    word: int


def _row_contraction(
    name: str,
    left: jax.Array,
    right: tuple[jax.Array, ...],
    groups: Dispatch[TileSchedule],
    *,
    left_gathered: bool,
    dtypes: tuple,
    tile: Tile,
) -> list[jax.Array]:
    """`leftᵀ · r` over each expert's rows for every array `r` of the right operand.

    Args:
      name: what profiles call the kernel.
      left: an array of a columns.
      right: arrays of b columns, a multiple of 8 as is a, in the dtype of the left one.
      groups: the rows by expert; those of no token do not count.
      left_gathered: whether the left operand is read by token index and the right one by row, or the other way round.
      dtypes: those of the results, `(E, a, b)`.
      tile: its shape. Blocks that run together share most of what they read if several row tiles are abreast.
    """
    kind = jnp.dtype(left.dtype).name
    elements, panels = chunk_size(kind), Panels.of(tile, kind)
    shape = left.shape[1], right[0].shape[1]
    num_tokens = (left if left_gathered else right[0]).shape[0]
    width = tile.columns // len(right)
    row_tiles, column_tiles = -(-shape[0] // TILE_ROWS), -(-shape[1] // width)
    sweeps = tile.sweeps(column_tiles)
    num_rows = groups.num_rows

    def copies(
        sides: Sequence[_Side], first_row: Int, end: Int, token_indices: Pointer
    ) -> tuple[Callable, list[Callable]]:
        """`tokens(k)` loads the tokens of this thread's rows in step k; others start copies, as in `Operands`.

        Rows past the expert's are zero.
        """
        thread = simt.thread()
        own_row, chunk = thread // CHUNKS, thread % CHUNKS
        word = panels.word(own_row, chunk)
        apart = range(0, panels.rows, panels.apart)

        def row_of(k, i: int) -> Int:
            return first_row + own_row + (k * panels.rows + i)

        def tokens(k) -> list:
            return [token_indices[minimum(row_of(k, i), num_rows - 1)] for i in apart]

        def copy(number: int, i: int, side: _Side, panel: int, k, slot: Pointer, *tokens: Int):
            row, token = row_of(k, i), tokens[number]
            known = (row < end) & (token >= 0) & (token < num_tokens)
            column = side.first + chunk * elements
            start = Long(token if side.gathered else row) * side.width + column
            target = word + (side.word + i * ROW_WORDS + panel * panels.words)
            array, later = divmod(panel * panels.columns, side.columns)
            wanted = all_or_none(known, Int(side.width) - column) > later
            start_copy(slot, target, side.arrays[array].at(start), Int(later), wanted)

        return tokens, [
            partial(copy, number, i, side, panel)
            for number, i in enumerate(apart)
            for side in sides
            for panel in range(len(side.arrays) * side.columns // panels.columns)
        ]

    def body(offsets, token_indices, left, right, *results_and_ring):
        *results, ring = results_and_ring
        block = simt.block()
        expert, of_expert = block // (row_tiles * sweeps), block % (row_tiles * sweeps)
        row_tile, sweep = abreast(of_expert, row_tiles, sweeps, tile.abreast)
        first_row, end = offsets[expert], offsets[expert + 1]
        steps = (end - first_row + (panels.rows - 1)) // panels.rows
        part = WarpPart.of(tile)

        def load_rows(slot: Pointer, product: int) -> list[list[Int]]:
            first = part.row // UNIT
            units = ((first + m // 2, m % 2) for m in range(tile.warp_rows // 16))
            return [panels.load(slot, unit, pair, product, part.lane, left=True) for unit, pair in units]

        def of_column(column_tile: Int) -> tuple[Operands, Int]:
            sides = (
                _Side((left,), left_gathered, shape[0], row_tile * TILE_ROWS, TILE_ROWS, 0),
                _Side(right, not left_gathered, shape[1], column_tile * width, width, tile.lhs_words),
            )
            tokens_of, own_copies = copies(sides, first_row, end, token_indices)
            multiplied = Operands(
                kind,
                panels.steps,
                own_copies,
                load_rows,
                lambda slot, *place: load_columns(panels, slot.at(tile.lhs_words), tile, part, *place),
                state=tokens_of,
            )
            return multiplied, steps

        def finish(column_tile: Int, sums: Sums):
            halves = part.halves(tile, column_tile, width)
            row = row_tile * TILE_ROWS + part.row
            where = WarpOutput(expert, expert * shape[0] + row, Int(shape[0]) - row, halves, part.lane)
            store_sums(results, where, sums, shape[1])

        sweep_columns(Slots(ring, tile), sweep, column_tiles, of_column, finish, ring_is_free=True)

    return simt.kernel(
        body,
        name=name,
        outputs=[jax.ShapeDtypeStruct((groups.num_experts, *shape), t) for t in dtypes],
        blocks=groups.num_experts * row_tiles * sweeps,
        warpgroups=WARPGROUPS,
        shared=[tile.stages * tile.slot_words],
    )(groups.expert_token_offsets, groups.expert_token_indices, left, right)
