"""Weight and bias gradients: sums over an expert's rows, the gather on the contracted dimension.

A block has a tile of one expert's gradient and walks over the expert's rows. How long that takes depends on the expert,
so there is a block for every tile, and a multiprocessor takes the next one when it has finished one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import simt
from pallas_kernels.ampere import operands
from pallas_kernels.ampere.operands import (
    PANEL_CHUNKS,
    PANEL_ROW_WORDS,
    PANEL_ROWS_AT_ONCE,
    THREADS,
    UNIT,
    WARPGROUPS,
    WARPS,
    WarpOutput,
    WarpPart,
    abreast,
    all_or_none,
    load_half,
    load_panels,
    tuned_tile,
)
from pallas_kernels.ampere.pipeline import Operands, Slots, sweep_columns
from pallas_kernels.ampere.row_matmul import store_sums
from pallas_kernels.contract import Dispatch, Sums
from pallas_kernels.mosaic.row_groups import TILE_ROWS, TileSchedule
from pallas_kernels.simt.matrices import chunk_size, start_copy
from pallas_kernels.simt.threads import block_barrier, combine_lanes, indices, loop, when
from pallas_kernels.simt.values import WARP, Int, Long, Pointer, minimum, select, total
from pallas_kernels.traced_once import traced_once
from pallas_kernels.tuning.parameters import MmaTuning

SUMMED_COLUMNS = 64  # that a block has
NEIGHBOURS = 8  # columns that a thread has
COLUMN_LANES = SUMMED_COLUMNS // NEIGHBOURS
SUMMED_ROWS = WARPS * WARP // COLUMN_LANES  # that a block's threads load at once
IN_FLIGHT = 4  # loads of a thread


@traced_once("dtypes", "bias_dtypes", "tuning")
def up_weight_gradients(
    x: Float[Array, "T d"],
    d_pre_activations: tuple[Float[Array, "R n"], ...],
    groups: Dispatch[TileSchedule],
    *,
    dtypes: tuple,
    bias_dtypes: tuple,
    sums: Sums | None = None,
    tuning: MmaTuning | None = None,
) -> tuple[tuple[Float[Array, "E d n"], ...], tuple[Float[Array, "E n"], ...]]:
    """`X_gᵀ · dP` per projection, in one pass over the gathered token rows; see the portable twin.

    Operands of float32 are rounded to tf32, 10 bits of mantissa. Sums are float32. Biases' are of what was not rounded.
    """
    options = {"left_gathered": True, "dtypes": dtypes, "sums": sums, "tuning": tuning}
    gradients = _row_contraction("up_weight_gradients", x, d_pre_activations, groups, **options)
    pairs = zip(d_pre_activations, bias_dtypes, strict=False)
    biases = [_expert_sums("moe_up_bias_gradients", d, groups, num_tokens=x.shape[0], dtype=t) for d, t in pairs]
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
    sums: Sums | None = None,
    tuning: MmaTuning | None = None,
) -> tuple[Float[Array, "E n d"], Float[Array, "E d"] | None]:
    """`(weights · A)ᵀ · dy_g`; see the portable twin. Rounds as `up_weight_gradients` does."""
    options = {"left_gathered": False, "dtypes": (dtype,), "sums": sums, "tuning": tuning}
    (gradient,) = _row_contraction("down_weight_gradients", weighted_hidden, (dy,), groups, **options)
    if bias_dtype is None:
        return gradient, None
    weights = row_weights.astype(jnp.float32)
    name = "moe_down_bias_gradients"
    return gradient, _expert_sums(
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
    kernel: str,
    left: jax.Array,
    right: tuple[jax.Array, ...],
    groups: Dispatch[TileSchedule],
    *,
    left_gathered: bool,
    dtypes: tuple,
    sums: Sums | None,
    tuning: MmaTuning | None,
) -> list[jax.Array]:
    """`leftᵀ · r` over each expert's rows for every array `r` of the right operand.

    Args:
      kernel: the name by which tables know its parameters.
      left: an array of a columns.
      right: arrays of b columns, a multiple of 8 as is a, in the dtype of the left one.
      groups: the rows by expert; those of no token do not count.
      left_gathered: whether the left operand is read by token index and the right one by row, or the other way round.
      dtypes: those of the results, `(E, a, b)`.
      sums: what the results are added to, and then are; None for no sums.
      tuning: parameters, or None for those of tables and rules. Blocks that run together share most of what they read
        if several row tiles are abreast.
    """
    shape = left.shape[1], right[0].shape[1]
    d, n = shape if left_gathered else shape[::-1]
    tile = tuned_tile(kernel, tuning, left.dtype, d, n, groups)
    num_tokens = (left if left_gathered else right[0]).shape[0]
    width = tile.columns // len(right)
    row_tiles, column_tiles = -(-shape[0] // TILE_ROWS), -(-shape[1] // width)
    sweeps = tile.sweeps(column_tiles)
    num_rows, blocks = groups.num_rows, groups.num_experts * row_tiles * sweeps
    updated: Any = sums.arrays if sums else ()
    first = sums.first if sums else None
    first = None if first is None else jnp.asarray(first, jnp.int32).reshape(1)

    def copies(
        sides: Sequence[_Side], first_row: Int, end: Int, token_indices: Pointer
    ) -> tuple[Callable, list[Callable]]:
        """`tokens(k)` loads the tokens of this thread's rows in step k; others start copies, as in `Operands`.

        Rows past the expert's are zero.
        """
        thread = simt.thread()
        own_row, chunk = thread // PANEL_CHUNKS, thread % PANEL_CHUNKS
        word = tile.panel_word(own_row, chunk)
        apart = range(0, tile.depth, PANEL_ROWS_AT_ONCE)

        def row_of(k, i: int) -> Int:
            return first_row + own_row + (k * tile.depth + i)

        def tokens(k) -> list:
            return [token_indices[minimum(row_of(k, i), num_rows - 1)] for i in apart]

        def copy(number: int, i: int, side: _Side, panel: int, k, slot: Pointer, *tokens: Int):
            row, token = row_of(k, i), tokens[number]
            known = (row < end) & (token >= 0) & (token < num_tokens)
            column = side.first + chunk * tile.elements
            start = Long(token if side.gathered else row) * side.width + column
            target = word + (side.word + i * PANEL_ROW_WORDS + panel * tile.panel_words)
            array, later = divmod(panel * tile.panel_columns, side.columns)
            wanted = all_or_none(known, Int(side.width) - column) > later
            start_copy(slot, target, side.arrays[array].at(start), Int(later), wanted)

        return tokens, [
            partial(copy, number, i, side, panel)
            for number, i in enumerate(apart)
            for side in sides
            for panel in range(len(side.arrays) * side.columns // tile.panel_columns)
        ]

    def copy_others(result: Pointer, before: Pointer, first: Int):
        """Copies what other experts have in the sums, where XLA did not let the result take their memory."""
        size, elements = shape[0] * shape[1], chunk_size(result.kind)
        count = (updated[0].shape[0] - groups.num_experts) * (size // elements)
        with when(~result.is_same(before)):
            for item in indices(simt.block() * THREADS + simt.thread(), count, blocks * THREADS):
                matrix = item // (size // elements)
                matrix = select(matrix < first, matrix, matrix + groups.num_experts)
                index = Long(matrix) * size + item % (size // elements) * elements
                result.store_vector(index, before.load_vector(index, elements))

    def body(offsets, token_indices, left, right, first, *others):
        before, results, ring = others[: len(updated)], others[len(updated) : -1], others[-1]
        block = simt.block()
        expert, of_expert = block // (row_tiles * sweeps), block % (row_tiles * sweeps)
        row_tile, sweep = abreast(of_expert, row_tiles, sweeps, tile.abreast)
        first_row, end = offsets[expert], offsets[expert + 1]
        steps = (end - first_row + (tile.depth - 1)) // tile.depth
        part = WarpPart(tile)

        def load_rows(slot: Pointer, product: int) -> list[list[Int]]:
            first = part.row // UNIT
            units = ((first + m // 2, m % 2) for m in range(tile.warp_rows // 16))
            return [load_panels(part, slot, unit, pair, product, left=True) for unit, pair in units]

        def of_column(column_tile: Int) -> tuple[Operands, Int]:
            sides = (
                _Side((left,), left_gathered, shape[0], row_tile * TILE_ROWS, TILE_ROWS, 0),
                _Side(right, not left_gathered, shape[1], column_tile * width, width, tile.lhs_words),
            )
            tokens_of, own_copies = copies(sides, first_row, end, token_indices)
            right_loaded = partial(load_half, load_panels, part)
            return Operands(own_copies, load_rows, right_loaded, state=tokens_of), steps

        def finish(column_tile: Int, tile_sums: operands.Sums):
            halves = part.halves(column_tile, width)
            row = row_tile * TILE_ROWS + part.row
            place = expert if first is None else first[0] + expert
            where = WarpOutput(place, place * shape[0] + row, Int(shape[0]) - row, halves, part.lane)
            store_sums(results, where, tile_sums, shape[1], before=before)

        sweep_columns(Slots(ring, tile), sweep, column_tiles, of_column, finish, ring_is_free=True)
        if first is not None:
            for of_result, there in zip(results, before, strict=True):
                copy_others(of_result, there, first[0])

    return simt.kernel(
        body,
        name=f"moe_{kernel}",
        outputs=[] if sums else [jax.ShapeDtypeStruct((groups.num_experts, *shape), t) for t in dtypes],
        blocks=blocks,
        warpgroups=WARPGROUPS,
        shared=[tile.stages * tile.slot_words],
        updated=len(updated),
    )(groups.expert_token_offsets, groups.expert_token_indices, left, right, first, *updated)


def _expert_sums(
    name: str,
    rows: Float[Array, "rows width"],
    groups: Dispatch,
    *,
    num_tokens: int,
    dtype,
    weights: Float[Array, " R"] | None = None,
    gathered: bool = False,
) -> Float[Array, "E width"]:
    """Sums over each expert's rows, in float32 and always in the same order; rows of no token do not count.

    Args:
      name: what profiles call the kernel.
      rows: `(T, width)` if `gathered`, else `(R, width)`; a multiple of 8 columns.
      groups: the rows by expert.
      num_tokens: T.
      dtype: that of the sums.
      weights: factors of the rows, float32.
      gathered: whether rows are read by token index.
    """
    width, num_rows = rows.shape[1], groups.num_rows
    column_blocks = -(-width // SUMMED_COLUMNS)

    def body(offsets, token_indices, rows, weights, out, shared):
        expert, column_block = simt.block() // column_blocks, simt.block() % column_blocks
        thread = simt.thread()
        lane, warp, own = thread % WARP, thread // WARP, thread // COLUMN_LANES
        first_row, end = offsets[expert], offsets[expert + 1]
        column = column_block * SUMMED_COLUMNS + thread % COLUMN_LANES * NEIGHBOURS
        mine = rows.at(minimum(column, width - NEIGHBOURS))

        def add_rows(first, *sums):
            numbers = [first + own + i * SUMMED_ROWS for i in range(IN_FLIGHT)]
            known_rows = [minimum(row, num_rows - 1) for row in numbers]
            tokens = [token_indices[row] for row in known_rows]
            counts = [
                (row < end) & (token >= 0) & (token < num_tokens) for row, token in zip(numbers, tokens, strict=True)
            ]
            sources = [select(c, r, 0) for c, r in zip(counts, tokens if gathered else known_rows, strict=True)]
            loaded = [mine.load_vector(Long(source) * width, NEIGHBOURS) for source in sources]
            factors = [None if weights is None else weights[row] for row in known_rows]
            for values, factor, count in zip(loaded, factors, counts, strict=True):
                values = values.wide().elements()
                values = values if factor is None else [v * factor for v in values]
                sums = [s + select(count, v, 0.0) for s, v in zip(sums, values, strict=True)]
            return sums

        sums = loop(first_row, end, SUMMED_ROWS * IN_FLIGHT, add_rows, [simt.Float(0.0)] * NEIGHBOURS)
        sums = [combine_lanes(add, s, WARP, COLUMN_LANES) for s in sums]
        with when(lane < COLUMN_LANES):
            for i, s in enumerate(sums):
                shared[warp * SUMMED_COLUMNS + (lane * NEIGHBOURS + i)] = s.bits()
        block_barrier()
        column = column_block * SUMMED_COLUMNS + thread
        with when((thread < SUMMED_COLUMNS) & (column < width)):
            values = [shared[thread + i * SUMMED_COLUMNS].as_float() for i in range(WARPS)]
            out[expert * width + column] = total(values)

    (sums,) = simt.kernel(
        body,
        name=name,
        outputs=[jax.ShapeDtypeStruct((groups.num_experts, width), dtype)],
        blocks=groups.num_experts * column_blocks,
        warpgroups=WARPGROUPS,
        shared=[WARPS * SUMMED_COLUMNS],
    )(groups.expert_token_offsets, groups.expert_token_indices, rows, weights)
    return sums
