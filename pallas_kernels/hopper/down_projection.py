"""Down projection of a block of output columns: activations through the down weights of their expert."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.contract import Dispatch
from pallas_kernels.hopper.inline import K_STEP, PANEL
from pallas_kernels.hopper.ragged_store import pack, packed_tile, store_buffers, store_packed
from pallas_kernels.hopper.row_matmul import RowMatmul, row_matmul, tile_panel
from pallas_kernels.mosaic.row_groups import TILE_COLUMNS, TILE_ROWS, TileSchedule
from pallas_kernels.mosaic.traced_once import traced_once
from pallas_kernels.tuning.parameters import TileTuning, find_tuning, shape_key


@traced_once("num_columns", "tuning")
def down_projection(
    hidden: Float[Array, "R n"],
    w_down: Float[Array, "E n d"],
    b_down: Float[Array, "E d"] | None,
    groups: Dispatch[TileSchedule],
    first_column: Int[Array, ""] | int,
    num_columns: int,
    *,
    tuning: TileTuning | None = None,
) -> Float[Array, "R columns"]:
    """Columns `first_column` to `first_column + num_columns` of every row's expert output; see the portable twin."""
    num_experts, n, d = w_down.shape
    shape = shape_key(groups.num_rows, hidden.dtype, d=d, n=n, E=num_experts)
    first_column = jnp.asarray(first_column, jnp.int32)
    weight_column = first_column
    if w_down.dtype != hidden.dtype:  # converted for the block alone
        w_down = lax.dynamic_slice_in_dim(w_down, first_column, num_columns, axis=2).astype(hidden.dtype)
        weight_column = jnp.zeros_like(first_column)

    def load(inputs, expert, row, column_tile, k, lhs, rhs, barrier):
        hidden, w_down, weight_column = inputs[:3]
        column = weight_column[0] + column_tile * TILE_COLUMNS
        steps = pl.ds(k * K_STEP, K_STEP)
        plgpu.copy_gmem_to_smem(hidden.at[pl.ds(row, TILE_ROWS), steps], lhs, barrier)
        for panel in range(0, TILE_COLUMNS, PANEL):
            block = w_down.at[expert, steps, pl.ds(column + panel, PANEL)]
            plgpu.copy_gmem_to_smem(block, rhs.at[pl.ds(panel, PANEL)], barrier)

    def finish(accumulator, where, inputs, outputs, scratch):
        if b_down is None:
            return pack(accumulator, where, inputs, outputs, scratch)
        panels = [tile_panel(accumulator, panel, where, inputs[-1]) for panel in range(TILE_COLUMNS // PANEL)]
        return lax.concatenate([panel.astype(hidden.dtype) for panel in panels], 1)

    column_tiles = -(-num_columns // TILE_COLUMNS)
    bias = ()
    if b_down is not None:
        padded = jnp.pad(b_down.astype(jnp.float32), ((0, 0), (0, column_tiles * TILE_COLUMNS)))
        block = lax.dynamic_slice_in_dim(padded, first_column, column_tiles * TILE_COLUMNS, axis=1)
        bias = (block.reshape(-1, column_tiles, TILE_COLUMNS),)

    return row_matmul(
        RowMatmul(
            name="moe_down_projection",
            inputs=(hidden, w_down, weight_column.reshape(1), *bias),
            outputs=(jax.ShapeDtypeStruct((hidden.shape[0], num_columns), hidden.dtype),),
            num_column_tiles=column_tiles,
            k_steps=-(-hidden.shape[1] // K_STEP),
            gathers=False,
            transposed_weights=False,
            copies=1 + TILE_COLUMNS // PANEL,
            load=load,
            finish=finish,
            store=store_packed,
            held=packed_tile(hidden.dtype),
            chunks=TILE_COLUMNS // PANEL,
            scratch=(store_buffers(hidden.dtype),),
            tuning=find_tuning(TileTuning, "down_projection", tuning, shape),
        ),
        groups.tiles,
    )[0]
