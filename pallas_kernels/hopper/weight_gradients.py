"""Weight gradients: products that contract over an expert's rows, the gather on the contracted dimension.

Persistent blocks walk over 128 x 256 tiles of the experts' gradients. A k step is 64 rows of the expert: gathered token
rows on one side, rows stored by expert on the other. Rows past the expert's last are zero on both sides, since a
neighbour's NaN times zero would be NaN.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.contract import Dispatch
from pallas_kernels.hopper.gather import RowGather
from pallas_kernels.hopper.inline import K_STEP, PANEL
from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.ragged_store import store_buffers, store_through
from pallas_kernels.hopper.ring import PANELS, Ring
from pallas_kernels.hopper.stores import zero_rows
from pallas_kernels.hopper.tile_queue import TileQueue
from pallas_kernels.hopper.wgmma import wgmma
from pallas_kernels.mosaic.row_groups import GROUP_ROWS, TILE_COLUMNS, TILE_ROWS, TileSchedule
from pallas_kernels.mosaic.support import WIDTH_MULTIPLE
from pallas_kernels.mosaic.traced_once import traced_once
from pallas_kernels.tuning.parameters import TileTuning, find_tuning, shape_key


@traced_once("dtypes", "bias_dtypes", "tuning")
def up_weight_gradients(
    x: Float[Array, "T d"] | tuple[Float[Array, "T_part d"], ...],
    d_pre_activations: tuple[Float[Array, "R n"], ...],
    groups: Dispatch[TileSchedule],
    *,
    dtypes: tuple,
    bias_dtypes: tuple,
    tuning: TileTuning | None = None,
) -> tuple[tuple[Float[Array, "E d n"], ...], tuple[Float[Array, "E n"], ...]]:
    """`X_gᵀ · dP` per projection, in one pass over the gathered token rows; see the portable twin.

    `x` may be in several arrays of as many tokens, one after the other; so may `dy` below.
    """
    (num_rows, n), num_experts = d_pre_activations[0].shape, groups.num_experts
    x = x if isinstance(x, tuple) else (x,)
    shape = shape_key(num_rows, x[0].dtype, d=x[0].shape[1], n=n, E=num_experts)
    gradients = _row_contraction(
        "moe_up_weight_gradients",
        x,
        d_pre_activations,
        groups,
        dtype=dtypes[0],
        transposed=False,
        tuning=find_tuning(TileTuning, "up_weight_gradients", tuning, shape),
    )
    if not bias_dtypes:
        return gradients, ()
    # Sums over rows are products with ones: every row gathers the same token.
    is_row = groups.expert_token_indices < sum(part.shape[0] for part in x)
    rows_of_ones = groups._replace(expert_token_indices=jnp.where(is_row, jnp.int32(0), 1))
    ones = jnp.ones((1, WIDTH_MULTIPLE), x[0].dtype)
    sums = _row_contraction(
        "moe_up_bias_gradients",
        (ones,),
        d_pre_activations,
        rows_of_ones,
        dtype=jnp.float32,
        transposed=False,
    )
    return gradients, tuple(s[:, 0].astype(t) for s, t in zip(sums, bias_dtypes, strict=True))


@traced_once("dtype", "bias_dtype", "tuning")
def down_weight_gradients(
    weighted_hidden: Float[Array, "R n"],
    dy: Float[Array, "T d"] | tuple[Float[Array, "T_part d"], ...],
    row_weights: Float[Array, " R"],
    groups: Dispatch[TileSchedule],
    *,
    dtype,
    bias_dtype,
    tuning: TileTuning | None = None,
) -> tuple[Float[Array, "E n d"], Float[Array, "E d"] | None]:
    """`(weights · A)ᵀ · dy_g`; see the portable twin."""
    # The gathered side on the left, where a tile is narrow: half the bytes to gather, and the product is transposed.
    (num_rows, n), num_experts = weighted_hidden.shape, groups.num_experts
    dy = dy if isinstance(dy, tuple) else (dy,)
    shape = shape_key(num_rows, dy[0].dtype, d=dy[0].shape[1], n=n, E=num_experts)
    (gradient,) = _row_contraction(
        "moe_down_weight_gradients",
        dy,
        (weighted_hidden,),
        groups,
        dtype=dtype,
        transposed=True,
        tuning=find_tuning(TileTuning, "down_weight_gradients", tuning, shape),
    )
    if bias_dtype is None:
        return gradient, None
    stored = jnp.broadcast_to(row_weights.astype(dy[0].dtype)[:, None], (groups.num_rows, WIDTH_MULTIPLE))
    (sums,) = _row_contraction("moe_down_bias_gradients", dy, (stored,), groups, dtype=bias_dtype, transposed=True)
    return gradient, sums[:, 0]


class _Tile(NamedTuple):
    """A tile of an expert's gradient, and the rows `start` to `end` that it is summed over."""

    expert: jax.Array
    row_tile: jax.Array
    column_tile: jax.Array
    start: jax.Array
    end: jax.Array

    @property
    def steps(self):
        return (self.end - self.start + K_STEP - 1) // K_STEP


def _row_contraction(
    name: str,
    tokens: tuple[jax.Array, ...],
    stored: tuple[jax.Array, ...],
    groups: Dispatch[TileSchedule],
    *,
    dtype,
    transposed: bool,
    tuning: TileTuning = TileTuning(),
) -> tuple[jax.Array, ...]:
    """`tokens_gᵀ · s` over each expert's rows, or its transpose, for every `s` of `stored`, side by side in a tile.

    Args:
      name: of the kernel in profiles.
      tokens: `(T, a)` in one or several arrays, read by token index.
      stored: arrays `(R, b)`, read by row.
      groups: the rows by expert.
      dtype: of the results.
      transposed: results are `(E, b, a)` instead of `(E, a, b)`.
      tuning: slots of the ring, the order of an expert's tiles, and how tiles are shared out.
    """
    num_experts = groups.num_experts
    shape = (tokens[0].shape[1], stored[0].shape[1])
    width = TILE_COLUMNS // len(stored)  # of a result's part of a tile
    row_tiles, column_tiles = -(-shape[0] // TILE_ROWS), -(-shape[1] // width)
    num_tiles = num_experts * row_tiles * column_tiles
    # A chunk of the result is 128 bytes wide. 16-bit results wait in registers for the next tile's products.
    wide = jnp.dtype(dtype) == jnp.float32
    chunk_columns = 32 if wide else 64
    chunks = range(TILE_COLUMNS // chunk_columns)
    gather = RowGather(tokens, rows=K_STEP, columns=TILE_ROWS)

    def find_tile(refs, number):
        """Tile `number`, and whether there is one; past the end it is the last."""
        is_one, number = number < num_tiles, jnp.minimum(number, num_tiles - 1)
        expert = number // (row_tiles * column_tiles)
        in_expert = lax.rem(number, row_tiles * column_tiles)
        place = plgpu.planar_snake(in_expert, (row_tiles, column_tiles), tuning.minor_dim, tuning.tile_width)
        return _Tile(expert, *place, refs.offsets[expert], refs.offsets[expert + 1]), is_one

    def produce(refs, ring: Ring, queue: TileQueue):
        tokens_of = partial(gather.load_tokens, refs.token_indices)

        def produce_tile(carry):
            turn, step, tokens, (tile, _), known = carry
            steps = tile.steps

            def load_step(k, slot, tokens, following):
                row = tile.start + k * K_STEP
                for panel in range(PANELS):
                    source, column = refs.stored[panel * PANEL // width], panel * PANEL % width
                    columns = pl.ds(tile.column_tile * width + column, PANEL)
                    slot.fetch(source.at[pl.ds(row, K_STEP), columns], slot.rhs_panel(panel))
                offsets = gather.row_chunks(tokens, tile.end - row)
                gather.copy(refs.tokens, offsets, slot.lhs, ring.landed, slot.number, tile.row_tile * TILE_ROWS)
                row += K_STEP
                if following:  # the last step is among those after which it is known
                    row = jnp.where(k + 1 < steps, row, start_of(following))
                return tokens_of(row)

            def start_of(following):
                (tile, _), _ = following
                return tile.start

            following, work = queue.ahead(turn + 1, known, lambda _: ())
            step, tokens, following = ring.fill(step, steps, load_step, tokens, following, work)
            after = queue.known(turn + 2)
            # An empty expert has no step to load the next tile's first tokens in.
            tokens = lax.cond(steps > 0, lambda t: t, lambda _: tokens_of(start_of(following)), tokens)
            return turn + 1, step, tokens, following[0], after

        zero = jnp.int32(0)
        first, tokens = queue.first(lambda tile: tokens_of(tile.start))
        lax.while_loop(lambda carry: carry[3][1], produce_tile, (zero, zero, tokens, first, queue.known(zero + 1)))

    def consume(refs, ring: Ring, queue: TileQueue, warpgroup):
        def product(slot, rows, accumulator, first):
            row, end = rows

            # The gather left zeros in the rows past the expert's last; the other side must not hold a NaN there.
            @pl.when(end - row < K_STEP)
            def _():
                own = pl.ds(warpgroup * (TILE_COLUMNS // 2), TILE_COLUMNS // 2)
                zero_rows(slot.rhs.at[own], PANELS // 2, end - row)
                plgpu.barrier_arrive(refs.zeroed)
                plgpu.barrier_wait(refs.zeroed)

            own = slot.lhs.at[pl.ds(warpgroup * PANEL, PANEL)]
            return (row + K_STEP, end), wgmma(accumulator, own, slot.rhs, first=first, transpose_lhs=True)

        def store(values, tile, chunk):
            """Stores the columns of a chunk of the tile's (64, 256) part."""
            column = chunk * chunk_columns
            result, column_in_result = refs.results[column // width], column % width
            values = values[:, column : column + chunk_columns]
            with store_through(refs.buffers, warpgroup, chunk, values, transposed=transposed) as buffer:
                row = tile.row_tile * TILE_ROWS + warpgroup * GROUP_ROWS
                columns = pl.ds(tile.column_tile * width + column_in_result, chunk_columns)
                if not transposed:
                    target = result.at[tile.expert, pl.ds(row, GROUP_ROWS), columns]
                    plgpu.copy_smem_to_gmem(buffer, target, commit_group=False)
                else:
                    for first in range(0, GROUP_ROWS, chunk_columns):
                        target = result.at[tile.expert, columns, pl.ds(row + first, chunk_columns)]
                        part = buffer.at[pl.ds(first, chunk_columns)]
                        plgpu.copy_smem_to_gmem(part, target, commit_group=False)

        def zeros(columns, dtype):
            return plgpu.layout_cast(jnp.zeros((GROUP_ROWS, columns), dtype), plgpu.Layout.WGMMA)

        def consume_tile(carry):
            turn, step, held, held_tile, (tile, _) = carry
            steps = tile.steps
            known = queue.known(turn + 1)
            take = partial(queue.take, turn + 1, known)

            def store_held(chunk):
                pl.when(turn > 0)(partial(store, held, held_tile, chunk))

            under = () if wide else [partial(store_held, chunk) for chunk in chunks]

            def end(accumulator):
                if not wide:
                    return accumulator.astype(dtype)
                for chunk in chunks:
                    store(accumulator, tile, chunk)
                return held

            def run(step):
                rows = (tile.start, tile.end)
                step, accumulator, taken = ring.multiply(step, steps, product, rows, under, last=take)
                return step, end(accumulator), taken

            def nothing_to_add(step):
                for work in under:
                    work()
                return step, end(zeros(TILE_COLUMNS, jnp.float32)), take()

            step, held, taken = lax.cond(steps > 0, run, nothing_to_add, step)
            return turn + 1, step, held, tile, known or taken

        zero = jnp.int32(0)
        held = zeros(8 if wide else TILE_COLUMNS, dtype)  # nothing is held of a wide result
        known = queue.known(zero)
        carry = (zero, zero, held, _Tile(zero, zero, zero, zero, zero), known or queue.take(zero, known))
        turns, _, held, tile, _ = lax.while_loop(lambda carry: carry[-1][1], consume_tile, carry)
        for chunk in () if wide else chunks:
            pl.when(turns > 0)(partial(store, held, tile, chunk))

    result = jax.ShapeDtypeStruct((num_experts, *(shape[::-1] if transposed else shape)), dtype)
    return launch(
        name,
        _Tile,
        find_tile,
        produce,
        consume,
        tiles=num_tiles,
        operands={
            "offsets": groups.expert_token_offsets,
            "token_indices": groups.expert_token_indices,
            "tokens": tokens,
            "stored": stored,
        },
        results={"results": (result,) * len(stored)},
        tuning=tuning,
        dtype=tokens[0].dtype,
        copies=PANELS,
        gathers=True,
        buffers=store_buffers(dtype, chunk_columns),
        barriers={"zeroed": plgpu.Barrier(num_arrivals=2)},
    ).results
