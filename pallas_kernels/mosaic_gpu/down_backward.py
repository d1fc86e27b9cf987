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
from pallas_kernels.mosaic_gpu.inline import K_STEP, PANEL, SWIZZLED, load_panel, store_panels
from pallas_kernels.mosaic_gpu.ragged_store import ragged_copy
from pallas_kernels.mosaic_gpu.row_groups import GROUP_ROWS, TILE_COLUMNS, TILE_ROWS, RowGroups, rows_of_tiles
from pallas_kernels.mosaic_gpu.row_matmul import RowMatmul, row_matmul

ROWS = plgpu.Layout.WGMMA.reduce(1)
PANELS = TILE_COLUMNS // PANEL
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

    The epilogue works from the accumulators, on panels of 64 columns. The pre-activations of the first two come in
    under the tile's products, those of a later panel while the one before it is worked on; the gradients leave from the
    buffers of what they were made from.
    """
    num_pre = len(pre_activations)
    num_rows, n = pre_activations[0].shape
    dtype = pre_activations[0].dtype
    w_down, row_weights = w_down.astype(dtype), row_weights.astype(jnp.float32)
    column_tiles = -(-n // TILE_COLUMNS)

    def load(inputs, expert, row, column_tile, k, lhs, rhs, barrier):
        w_down = inputs[2]
        block = w_down.at[expert, pl.ds(column_tile * TILE_COLUMNS, TILE_COLUMNS), pl.ds(k * K_STEP, K_STEP)]
        plgpu.copy_gmem_to_smem(block, rhs, barrier)

    def columns_of(panel, where):
        return pl.ds(where.column_tile * TILE_COLUMNS + panel * PANEL, PANEL)

    def buffer_set(panel, where, scratch):
        """Where a panel's pre-activations arrive and its gradients leave from, and the barrier of the arrival."""
        buffers, _, arrived = scratch
        turn = panel % 2 * 2 + where.warpgroup
        return [buffers.at[turn * num_pre + i] for i in range(num_pre)], arrived.at[turn]

    def fetch(panel, where, inputs, scratch):
        """Starts the copies of 64 columns of pre-activations."""
        buffers, arrived = buffer_set(panel, where, scratch)
        for pre, buffer in zip(inputs[4:], buffers, strict=True):
            plgpu.copy_gmem_to_smem(pre.at[pl.ds(where.row, GROUP_ROWS), columns_of(panel, where)], buffer, arrived)

    def prefetch(where, inputs, outputs, scratch):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last panels of the tile before have left

        @pl.when(where.rows > 0)
        def _():
            for panel in range(2):
                fetch(panel, where, inputs, scratch)

    def finish(accumulator, where, inputs, outputs, scratch):
        pl.when(where.rows > 0)(lambda: epilogue(accumulator, where, inputs, outputs, scratch))
        return ()

    def epilogue(accumulator, where, inputs, outputs, scratch):
        weight = plgpu.load(inputs[3].at[pl.ds(where.row, GROUP_ROWS)], layout=ROWS, optimized=False)
        weight = lax.broadcast_in_dim(weight, (GROUP_ROWS, PANEL), (0,))
        d_weight = plgpu.layout_cast(jnp.zeros((GROUP_ROWS,), jnp.float32), ROWS)
        for panel in range(PANELS):
            if panel > 0:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if 0 < panel < PANELS - 1:
                fetch(panel + 1, where, inputs, scratch)
            buffers, arrived = buffer_set(panel, where, scratch)
            plgpu.barrier_wait(arrived)
            pre = [load_panel(b).astype(jnp.float32) for b in buffers]
            d_hidden = accumulator[:, panel * PANEL : (panel + 1) * PANEL]
            hidden, d_pre = value_and_gradients(activation, pre, weight * d_hidden)
            d_weight += (d_hidden * hidden).sum(axis=1)
            buffers = (*buffers, scratch[1].at[where.warpgroup])
            for buffer, result in zip(buffers, (*d_pre, weight * hidden), strict=True):
                store_panels(buffer, result.astype(dtype))
            plgpu.commit_smem()
            for buffer, output in zip(buffers, (*inputs[4:], outputs[0]), strict=True):
                ragged_copy(buffer, output, where, (columns_of(panel, where),))
            plgpu.commit_smem_to_gmem_group()
        rows = pl.ds(where.warpgroup * GROUP_ROWS, GROUP_ROWS)
        outputs[1].at[where.row_tile, where.column_tile, rows][...] = d_weight

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
            k_steps=-(-dy.shape[1] // K_STEP),
            gathers=True,
            transposed_weights=True,
            copies=1,
            load=load,
            prefetch=prefetch,
            finish=finish,
            scratch=(
                plgpu.SMEM((4 * num_pre, GROUP_ROWS, PANEL), dtype, transforms=SWIZZLED),
                plgpu.SMEM((2, GROUP_ROWS, PANEL), dtype, transforms=SWIZZLED),
                plgpu.Barrier(num_arrivals=num_pre, num_barriers=4),
            ),
            stages=STAGES,
            registers=(56, 224),
        ),
        groups.tiles,
    )
    d_pre_activations = tuple(jax.freeze(r) for r in in_place)
    d_row_weights = rows_of_tiles(sums.sum(1), groups.tiles, num_rows)
    if b_down is not None:
        d_row_weights += _bias_part(dy, b_down, groups)
    return d_pre_activations, weighted_hidden, d_row_weights


def _bias_part(dy: Float[Array, "T d"], b_down: Float[Array, "E d"], groups: RowGroups) -> Float[Array, " R"]:
    """`⟨dy, b_down⟩` of every row: a product for all experts is cheaper than gathering rows of dy for it."""
    products = jnp.dot(dy, b_down.astype(dy.dtype).T, preferred_element_type=jnp.float32)
    row = jnp.arange(groups.num_rows, dtype=jnp.int32)
    expert = jnp.searchsorted(groups.offsets[1:], row, side="right", method="compare_all").astype(jnp.int32)
    return products.at[groups.token_indices, expert].get(mode="fill", fill_value=0)
