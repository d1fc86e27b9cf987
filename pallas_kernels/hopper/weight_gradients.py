"""Weight gradients: products that contract over an expert's rows, the gather on the contracted dimension.

One persistent block per SM walks over 128 x 256 tiles of the experts' gradients. A k step is 64 rows of the expert:
gathered token rows on one side, rows stored by expert on the other. Rows past the expert's last are zero on both sides,
since a neighbour's NaN times zero would be NaN.
"""

# pyright: reportCallIssue=false, reportAbstractUsage=false, reportArgumentType=false

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.contract import Dispatch
from pallas_kernels.hopper import inline
from pallas_kernels.hopper.inline import K_STEP, PANEL, SWIZZLED, RowGather
from pallas_kernels.hopper.support import WIDTH_MULTIPLE
from pallas_kernels.mosaic import in_place, interpreter
from pallas_kernels.mosaic.device import num_sms
from pallas_kernels.mosaic.row_groups import GROUP_ROWS, TILE_COLUMNS, TILE_ROWS, TileSchedule
from pallas_kernels.mosaic.traced_once import traced_once
from pallas_kernels.tuning.parameters import TileTuning, find_tuning, shape_key

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 72, 216
RHS_PANELS = TILE_COLUMNS // PANEL


@traced_once("dtypes", "bias_dtypes", "tuning")
def up_weight_gradients(
    x: Float[Array, "T d"],
    d_pre_activations: tuple[Float[Array, "R n"], ...],
    groups: Dispatch[TileSchedule],
    *,
    dtypes: tuple,
    bias_dtypes: tuple,
    tuning: TileTuning | None = None,
) -> tuple[tuple[Float[Array, "E d n"], ...], tuple[Float[Array, "E n"], ...]]:
    """`X_gᵀ · dP` per projection, in one pass over the gathered token rows; see the portable twin."""
    (num_rows, n), num_experts = d_pre_activations[0].shape, groups.num_experts
    shape = shape_key(num_rows, x.dtype, d=x.shape[1], n=n, E=num_experts)
    gradients = _row_contraction(
        "moe_up_weight_gradients",
        x,
        d_pre_activations,
        groups,
        dtypes=dtypes,
        transposed=False,
        tuning=find_tuning(TileTuning, "up_weight_gradients", tuning, shape),
    )
    if not bias_dtypes:
        return gradients, ()
    # Sums over rows are products with ones: every row gathers the same token.
    is_row = groups.expert_token_indices < x.shape[0]
    rows_of_ones = groups._replace(expert_token_indices=jnp.where(is_row, jnp.int32(0), 1))
    ones = jnp.ones((1, WIDTH_MULTIPLE), x.dtype)
    sums = _row_contraction(
        "moe_up_bias_gradients",
        ones,
        d_pre_activations,
        rows_of_ones,
        dtypes=(jnp.float32,) * len(bias_dtypes),
        transposed=False,
    )
    return gradients, tuple(s[:, 0].astype(t) for s, t in zip(sums, bias_dtypes, strict=True))


@traced_once("dtype", "bias_dtype", "tuning")
def down_weight_gradients(
    weighted_hidden: Float[Array, "R n"],
    dy: Float[Array, "T d"],
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
    shape = shape_key(num_rows, dy.dtype, d=dy.shape[1], n=n, E=num_experts)
    (gradient,) = _row_contraction(
        "moe_down_weight_gradients",
        dy,
        (weighted_hidden,),
        groups,
        dtypes=(dtype,),
        transposed=True,
        tuning=find_tuning(TileTuning, "down_weight_gradients", tuning, shape),
    )
    if bias_dtype is None:
        return gradient, None
    stored = jnp.broadcast_to(row_weights.astype(dy.dtype)[:, None], (groups.num_rows, WIDTH_MULTIPLE))
    (sums,) = _row_contraction("moe_down_bias_gradients", dy, (stored,), groups, dtypes=(bias_dtype,), transposed=True)
    return gradient, sums[:, 0]


class _Where(NamedTuple):
    """The part of the result that one consumer warpgroup holds."""

    warpgroup: jax.Array
    expert: jax.Array
    row_tile: jax.Array
    column_tile: jax.Array


def _row_contraction(
    name: str,
    tokens: jax.Array,
    stored: tuple[jax.Array, ...],
    groups: Dispatch[TileSchedule],
    *,
    dtypes: tuple,
    transposed: bool,
    tuning: TileTuning = TileTuning(),
) -> tuple[jax.Array, ...]:
    """`tokens_gᵀ · s` over each expert's rows, or its transpose, for every `s` of `stored`, side by side in a tile.

    Args:
      name: of the kernel in profiles.
      tokens: `(T, a)`, read by token index.
      stored: arrays `(R, b)`, read by row.
      groups: the rows by expert.
      dtypes: of the results, all the same.
      transposed: results are `(E, b, a)` instead of `(E, a, b)`.
      tuning: slots of the ring, and the order of an expert's tiles.
    """
    num_experts = groups.num_experts
    num_stored, stages = len(stored), tuning.stages
    shape = (tokens.shape[1], stored[0].shape[1])
    panel = TILE_COLUMNS // num_stored
    row_tiles, column_tiles = -(-shape[0] // TILE_ROWS), -(-shape[1] // panel)
    total, blocks = num_experts * row_tiles * column_tiles, interpreter.blocks(num_sms())
    wide = any(jnp.dtype(t) == jnp.float32 for t in dtypes)
    # A chunk of the result is 128 bytes wide. 16-bit results wait in registers for the next tile's products.
    chunk_columns = 32 if wide else 64
    chunks = TILE_COLUMNS // chunk_columns
    held_dtype = jnp.float32 if wide else dtypes[0]
    gather = RowGather(rows=K_STEP, columns=TILE_ROWS, num_tokens=tokens.shape[0], width=tokens.shape[1])

    def kernel(offsets, indices, gathered, *refs):
        stored, refs = refs[:num_stored], refs[num_stored:]
        results, (lhs, rhs, buffers, landed, full, empty, zeroed) = refs[:num_stored], refs[num_stored:]
        warpgroup, block = lax.axis_index("wg"), lax.axis_index("sm")
        num_mine = (total - block + blocks - 1) // blocks

        def panel_of(slot, i):
            return slot.at[pl.ds(i * PANEL, PANEL)]

        def tile_at(i):  # past the end the last tile is repeated; its values are not used
            linear = jnp.maximum(block + jnp.minimum(i, num_mine - 1) * blocks, 0)
            expert = linear // (row_tiles * column_tiles)
            in_expert = lax.rem(linear, row_tiles * column_tiles)
            row_tile, column_tile = plgpu.planar_snake(
                in_expert, (row_tiles, column_tiles), tuning.minor_dim, tuning.tile_width
            )
            return expert, row_tile, column_tile, offsets[expert], offsets[expert + 1]

        zero = jnp.int32(0)
        inline.init_landed(landed, stages)

        @pl.when(warpgroup == 2)
        def produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def produce_tile(i, carry):
                step, tokens, (_, row_tile, column_tile, start, end), following = carry
                steps = (end - start + K_STEP - 1) // K_STEP

                def k_step(k, carry):
                    step, tokens = carry
                    slot = lax.rem(step, stages)
                    row = start + k * K_STEP
                    pl.when(step >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
                    rows = pl.ds(row, K_STEP)
                    for i in range(RHS_PANELS):
                        source, column = stored[i * PANEL // panel], i * PANEL % panel
                        block = source.at[rows, pl.ds(column_tile * panel + column, PANEL)]
                        plgpu.copy_gmem_to_smem(block, panel_of(rhs.at[slot], i), full.at[slot])
                    offsets = gather.row_chunks(tokens, end - row)
                    gather.copy(gathered, offsets, lhs.at[slot], landed, slot, row_tile * TILE_ROWS)
                    following_row = jnp.where(k + 1 < steps, row + K_STEP, following[3])
                    return step + 1, gather.load_tokens(indices, following_row)

                step, tokens = lax.fori_loop(0, steps, k_step, (step, tokens))
                after = tile_at(i + 2)
                # An empty expert has no step to load the next tile's first tokens in.
                tokens = lax.cond(steps > 0, lambda t: t, lambda _: gather.load_tokens(indices, following[3]), tokens)
                return step, tokens, following, after

            first = tile_at(zero)
            carry = (zero, gather.load_tokens(indices, first[3]), first, tile_at(jnp.int32(1)))
            lax.fori_loop(0, num_mine, produce_tile, carry)

        @pl.when(warpgroup < 2)
        def consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")

            def store(values, chunk, where):
                """Stores the columns of a chunk of the tile's (64, 256) part."""
                column = chunk * chunk_columns
                result, column_in_panel = results[column // panel], column % panel
                buffer = buffers.at[where.warpgroup * 2 + chunk % 2]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                values = values[:, column : column + chunk_columns].astype(result.dtype)
                inline.store_panels(buffer, values, transposed=transposed)
                plgpu.commit_smem()
                rows, columns = where.row_tile * TILE_ROWS + where.warpgroup * GROUP_ROWS, where.column_tile * panel
                columns += column_in_panel
                if not transposed:
                    target = result.at[where.expert, pl.ds(rows, GROUP_ROWS), pl.ds(columns, chunk_columns)]
                    plgpu.copy_smem_to_gmem(buffer, target, commit_group=False)
                else:
                    for i in range(GROUP_ROWS // chunk_columns):
                        own = pl.ds(rows + i * chunk_columns, chunk_columns)
                        target = result.at[where.expert, pl.ds(columns, chunk_columns), own]
                        part = buffer.at[pl.ds(i * chunk_columns, chunk_columns)]
                        plgpu.copy_smem_to_gmem(part, target, commit_group=False)
                plgpu.commit_smem_to_gmem_group()

            def release(step):
                plgpu.barrier_arrive(empty.at[lax.rem(step, stages)])

            def k_step(step, row, end, accumulator, first=False):
                slot = lax.rem(step, stages)
                plgpu.barrier_wait(full.at[slot])
                inline.wait_landed(landed, slot, lax.rem(step // stages, 2))

                # The gather left zeros in the rows past the expert's last; the other side must not hold a NaN there.
                @pl.when(end - row < K_STEP)
                def _():
                    own = pl.ds(warpgroup * (TILE_COLUMNS // 2), TILE_COLUMNS // 2)
                    inline.zero_rows(rhs.at[slot, own], RHS_PANELS // 2, end - row)
                    plgpu.barrier_arrive(zeroed)
                    plgpu.barrier_wait(zeroed)

                accumulator = inline.wgmma(
                    accumulator, panel_of(lhs.at[slot], warpgroup), rhs.at[slot], first=first, transpose_lhs=True
                )
                plgpu.wgmma_wait(1)
                if not first:
                    release(step + stages - 1)
                return step + 1, row + K_STEP, end, accumulator

            def consume_tile(i, carry):
                step, done, done_where, (expert, row_tile, column_tile, start, end) = carry
                steps = (end - start + K_STEP - 1) // K_STEP
                where = _Where(warpgroup, expert, row_tile, column_tile)

                def multiply(step):
                    def k_steps(count, products):
                        return lax.fori_loop(0, count, lambda _, c: k_step(*c), products)

                    products = k_step(step, start, end, inline.zero_accumulator(GROUP_ROWS, TILE_COLUMNS), first=True)
                    if not wide:
                        apart = jnp.maximum((steps - 1) // chunks, 1)
                        for chunk in range(chunks):
                            store_done(chunk)
                            products = k_steps(jnp.clip(steps - 1 - chunk * apart, 0, apart), products)
                        products = k_steps(jnp.maximum(steps - 1 - chunks * apart, 0), products)
                    else:
                        products = k_steps(steps - 1, products)
                    step, *_, accumulator = products
                    accumulator = inline.finish_wgmma(accumulator)
                    release(step + stages - 1)
                    return step, accumulator

                def store_done(chunk):
                    pl.when(i > 0)(lambda: store(done, chunk, done_where))

                def run(step):
                    step, accumulator = multiply(step)
                    return step, end_tile(accumulator)

                def nothing_to_add(step):
                    if not wide:
                        for chunk in range(chunks):
                            store_done(chunk)
                    return step, end_tile(zeros((GROUP_ROWS, TILE_COLUMNS), jnp.float32))

                def end_tile(accumulator):
                    if not wide:
                        return accumulator.astype(held_dtype)
                    for chunk in range(chunks):
                        store(accumulator, chunk, where)
                    return done

                step, done = lax.cond(steps > 0, run, nothing_to_add, step)
                return step, done, where, tile_at(i + 1)

            def zeros(shape, dtype):
                return plgpu.layout_cast(jnp.zeros(shape, dtype), plgpu.Layout.WGMMA)

            held = zeros((GROUP_ROWS, 8 if wide else TILE_COLUMNS), held_dtype)  # nothing is held of a wide result
            carry = (zero, held, _Where(warpgroup, zero, zero, zero), tile_at(zero))
            _, done, where, _ = lax.fori_loop(0, num_mine, consume_tile, carry)
            if not wide:
                for chunk in range(chunks):
                    pl.when(num_mine > 0)(lambda chunk=chunk: store(done, chunk, where))
            plgpu.wait_smem_to_gmem(0)

    kernel.__name__ = name
    result_shape = (num_experts, *(shape[::-1] if transposed else shape))
    return in_place.kernel(
        kernel,
        in_place={},
        out_type=tuple(jax.ShapeDtypeStruct(result_shape, t) for t in dtypes),
        scratch_types=[
            plgpu.SMEM((stages, TILE_ROWS, PANEL), tokens.dtype, transforms=SWIZZLED),  # panels (K_STEP, PANEL)
            plgpu.SMEM((stages, TILE_COLUMNS, PANEL), tokens.dtype, transforms=SWIZZLED),
            plgpu.SMEM((4, GROUP_ROWS, chunk_columns), held_dtype, transforms=SWIZZLED),
            inline.landed_barriers(stages),
            plgpu.Barrier(num_arrivals=RHS_PANELS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=(blocks,),
        grid_names=("sm",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(groups.expert_token_offsets, groups.expert_token_indices, tokens, *stored)
