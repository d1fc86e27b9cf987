"""Down projection of a block of output columns: activations through the down weights of their expert."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic_gpu.inline import K_STEP
from pallas_kernels.mosaic_gpu.ragged_store import CHUNK, pack, packed_tile, store_buffers, store_packed
from pallas_kernels.mosaic_gpu.row_groups import TILE_COLUMNS, TILE_ROWS, RowGroups
from pallas_kernels.mosaic_gpu.row_matmul import RowMatmul, row_matmul
from pallas_kernels.mosaic_gpu.support import no_biases


def down_projection(
    hidden: Float[Array, "R n"],
    w_down: Float[Array, "E n d"],
    b_down: Float[Array, "E d"] | None,
    groups: RowGroups,
    first_column: Int[Array, ""] | int,
    num_columns: int,
) -> Float[Array, "R columns"]:
    """Columns `first_column` to `first_column + num_columns` of every row's expert output; see the portable twin."""
    no_biases(b_down)
    w_down = w_down.astype(hidden.dtype)

    def load(inputs, expert, row, column_tile, k, lhs, rhs, barrier):
        hidden, w_down, first_column = inputs
        column = pl.multiple_of(first_column[0] + column_tile * TILE_COLUMNS, K_STEP)
        steps = pl.ds(k * K_STEP, K_STEP)
        plgpu.copy_gmem_to_smem(hidden.at[pl.ds(pl.multiple_of(row, 8), TILE_ROWS), steps], lhs, barrier)
        plgpu.copy_gmem_to_smem(w_down.at[expert, steps, pl.ds(column, TILE_COLUMNS)], rhs, barrier)

    return row_matmul(
        RowMatmul(
            name="moe_down_projection",
            inputs=(hidden, w_down, jnp.asarray(first_column, jnp.int32).reshape(1)),
            outputs=(jax.ShapeDtypeStruct((hidden.shape[0], num_columns), hidden.dtype),),
            num_column_tiles=-(-num_columns // TILE_COLUMNS),
            k_steps=-(-hidden.shape[1] // K_STEP),
            gathers=False,
            transposed_weights=False,
            copies=2,
            load=load,
            finish=pack,
            store=store_packed,
            held=packed_tile(hidden.dtype),
            chunks=TILE_COLUMNS // CHUNK,
            scratch=(store_buffers(hidden.dtype),),
        ),
        groups.tiles,
    )[0]
