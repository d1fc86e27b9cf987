"""Backward of the down projection and the activation, which is recomputed from the saved pre-activations."""

# pyright: reportCallIssue=false, reportAbstractUsage=false, reportArgumentType=false

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.mosaic_gpu.elementwise import value_and_gradients
from pallas_kernels.mosaic_gpu.inline import K_STEP
from pallas_kernels.mosaic_gpu.ragged_store import ragged_copy
from pallas_kernels.mosaic_gpu.row_groups import GROUP_ROWS, TILE_COLUMNS, TILE_ROWS, RowGroups, rows_of_tiles
from pallas_kernels.mosaic_gpu.row_matmul import RowMatmul, row_matmul
from pallas_kernels.mosaic_gpu.support import no_biases

PIECE = 16  # columns computed at a time: more would not fit the registers
GROUP = 32  # columns fetched at a time
PIECES, GROUPS = GROUP // PIECE, TILE_COLUMNS // GROUP
PIECE_TILES = (plgpu.TilingTransform((8, PIECE)), plgpu.SwizzleTransform(32))
ROWS = plgpu.Layout.WGMMA.reduce(1)
STAGES = 3


def down_backward(
    dy: Float[Array, "T d"],
    w_down: Float[Array, "E n d"],
    b_down: Float[Array, "E d"] | None,
    pre_activations: tuple[Float[Array, "R n"], ...],
    row_weights: Float[Array, " R"],
    groups: RowGroups,
    *,
    activation: Callable[..., Array],
) -> tuple[tuple[Float[Array, "R n"], ...], Float[Array, "R n"], Float[Array, " R"]]:
    """Gradients of the pre-activations, weighted activation, gradient of the row weights; see the portable twin.

    The gradient of the activation waits in shared memory, in 16 bits, for the next tile's products. Under those, in
    turns, 32 columns of pre-activations come in by bulk copy and are worked on, 16 columns at a time; the results leave
    from the buffers of what they were made from.
    """
    no_biases(b_down)
    num_pre = len(pre_activations)
    num_rows, n = pre_activations[0].shape
    dtype = pre_activations[0].dtype
    w_down, row_weights = w_down.astype(dtype), row_weights.astype(jnp.float32)
    column_tiles = -(-n // TILE_COLUMNS)
    k_steps = -(-dy.shape[1] // K_STEP)

    def load(inputs, expert, row, column_tile, k, lhs, rhs, barrier):
        w_down = inputs[2]
        block = w_down.at[expert, pl.ds(column_tile * TILE_COLUMNS, TILE_COLUMNS), pl.ds(k * K_STEP, K_STEP)]
        plgpu.copy_gmem_to_smem(block, rhs, barrier)

    def columns_of(group, piece, where):
        column = where.column_tile * TILE_COLUMNS + group * GROUP + piece * PIECE
        return pl.ds(pl.multiple_of(column, PIECE), PIECE)

    def waiting(scratch, group, piece, where):
        """Where a piece waits, and where its weighted activation leaves from."""
        return scratch[0].at[(group * PIECES + piece) * 2 + where.warpgroup]

    def fetched(scratch, array, piece, where):
        return scratch[1].at[(array * PIECES + piece) * 2 + where.warpgroup]

    def fetch(group, where, inputs, scratch):
        rows = pl.ds(pl.multiple_of(where.row, 8), GROUP_ROWS)
        for array, pre in enumerate(inputs[4:]):
            for piece in range(PIECES):
                source = pre.at[rows, columns_of(group, piece, where)]
                plgpu.copy_gmem_to_smem(source, fetched(scratch, array, piece, where), scratch[2].at[where.warpgroup])

    def finish(accumulator, where, inputs, outputs, scratch):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        pl.when(where.rows > 0)(lambda: fetch(0, where, inputs, scratch))
        for group in range(GROUPS):
            for piece in range(PIECES):
                first = group * GROUP + piece * PIECE
                waiting(scratch, group, piece, where)[...] = accumulator[:, first : first + PIECE].astype(dtype)
        return plgpu.layout_cast(jnp.zeros((GROUP_ROWS,), jnp.float32), ROWS)

    def work_on(group, piece, d_weight, where, inputs, outputs, scratch):
        """Computes and stores one piece, and adds to the rows' weight gradients."""
        buffers = [fetched(scratch, array, piece, where) for array in range(num_pre)]
        buffers.append(waiting(scratch, group, piece, where))
        *pre, d_hidden = (plgpu.load(b, layout=plgpu.Layout.WGMMA).astype(jnp.float32) for b in buffers)
        weight_ref = inputs[3].at[pl.ds(pl.multiple_of(where.row, 8), GROUP_ROWS)]
        weight = plgpu.load(weight_ref, layout=ROWS, optimized=False)
        weight = lax.broadcast_in_dim(weight, (GROUP_ROWS, PIECE), (0,))
        hidden, d_pre = value_and_gradients(activation, pre, weight * d_hidden)
        for buffer, result in zip(buffers, (*d_pre, weight * hidden), strict=True):
            buffer[...] = result.astype(dtype)
        plgpu.commit_smem()
        for buffer, output in zip(buffers, (*inputs[4:], outputs[0]), strict=True):
            ragged_copy(buffer, output, where, (columns_of(group, piece, where),))
        plgpu.commit_smem_to_gmem_group()
        return d_weight + (d_hidden * hidden).sum(axis=1)

    def store(d_weight, turn, where, inputs, outputs, scratch):
        """In turns works on a group and fetches the next."""
        group = turn // 2
        refs = (where, inputs, outputs, scratch)

        def work(d_weight):
            plgpu.barrier_wait(scratch[2].at[where.warpgroup])
            return lax.fori_loop(0, PIECES, lambda piece, d: work_on(group, piece, d, *refs), d_weight)

        def fetch_next(d_weight):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            fetch(group + 1, where, inputs, scratch)
            return d_weight

        def run(d_weight):
            d_weight = lax.cond(lax.rem(turn, 2) == 0, work, fetch_next, d_weight)

            @pl.when(turn == turns - 1)
            def _():
                rows = pl.ds(where.warpgroup * GROUP_ROWS, GROUP_ROWS)
                outputs[1].at[where.row_tile, where.column_tile, rows][...] = d_weight

            return d_weight

        return lax.cond(where.rows > 0, run, lambda d: d, d_weight)

    turns = 2 * GROUPS - 1
    rows = jax.ShapeDtypeStruct((num_rows, n), dtype)
    sums_shape = (groups.tiles.num_tiles, column_tiles, TILE_ROWS)
    # The gradients take the place of the pre-activations, which every tile has read before it writes.
    in_place = tuple(jax.new_ref(p) for p in pre_activations)
    weighted_hidden, sums = row_matmul(
        RowMatmul(
            name="moe_down_backward",
            inputs=(dy, groups.token_indices, w_down, row_weights, *in_place),
            outputs=(rows, jax.ShapeDtypeStruct(sums_shape, jnp.float32)),
            num_column_tiles=column_tiles,
            k_steps=k_steps,
            gathers=True,
            transposed_weights=True,
            copies=1,
            load=load,
            finish=finish,
            store=store,
            held=plgpu.ShapeDtypeStruct((GROUP_ROWS,), jnp.float32, layout=ROWS),
            chunks=turns,
            looped_chunks=turns,
            scratch=(
                plgpu.SMEM((2 * GROUPS * PIECES, GROUP_ROWS, PIECE), dtype, transforms=PIECE_TILES),
                plgpu.SMEM((2 * num_pre * PIECES, GROUP_ROWS, PIECE), dtype, transforms=PIECE_TILES),
                plgpu.Barrier(num_arrivals=num_pre * PIECES, num_barriers=2),
            ),
            stages=STAGES,
        ),
        groups.tiles,
    )
    d_pre_activations = tuple(jax.freeze(r) for r in in_place)
    return d_pre_activations, weighted_hidden, rows_of_tiles(sums.sum(1), groups.tiles, num_rows)
