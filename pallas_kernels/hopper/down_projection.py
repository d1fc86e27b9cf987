"""Down projection of a block of output columns: activations through the down weights of their expert."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.contract import Dispatch
from pallas_kernels.hopper.inline import K_STEP, PANEL
from pallas_kernels.hopper.ring import PANELS
from pallas_kernels.hopper.row_matmul import ROUNDED_ROWS, row_matmul
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
    into: Float[Array, "R columns"] | None = None,
    tuning: TileTuning | None = None,
) -> Float[Array, "R columns"]:
    """Columns `first_column` to `first_column + num_columns` of every row's expert output; see the portable twin.

    `into` holds results of the same call for other groups, whose rows are kept.
    """
    num_experts, n, d = w_down.shape
    shape = shape_key(groups.num_rows, hidden.dtype, d=d, n=n, E=num_experts)
    first_column = jnp.asarray(first_column, jnp.int32)
    weight_column = first_column
    if w_down.dtype != hidden.dtype:  # converted for the block alone
        w_down = lax.dynamic_slice_in_dim(w_down, first_column, num_columns, axis=2).astype(hidden.dtype)
        weight_column = jnp.zeros_like(first_column)

    def load(refs, tile, k, slot):
        column = refs.first_column[0] + tile.column_tile * TILE_COLUMNS
        steps = pl.ds(k * K_STEP, K_STEP)
        slot.fetch(refs.hidden.at[pl.ds(tile.row, TILE_ROWS), steps], slot.lhs)
        for panel in range(PANELS):
            block = refs.w_down.at[tile.expert, steps, pl.ds(column + panel * PANEL, PANEL)]
            slot.fetch(block, slot.rhs_panel(panel))

    column_tiles = -(-num_columns // TILE_COLUMNS)
    bias = None
    if b_down is not None:
        padded = jnp.pad(b_down.astype(jnp.float32), ((0, 0), (0, column_tiles * TILE_COLUMNS)))
        block = lax.dynamic_slice_in_dim(padded, first_column, column_tiles * TILE_COLUMNS, axis=1)
        bias = block.reshape(-1, column_tiles, TILE_COLUMNS)

    return row_matmul(
        "moe_down_projection",
        groups.tiles,
        operands={
            "hidden": hidden,
            "w_down": w_down,
            "first_column": weight_column.reshape(1),
            "bias": bias,
            "into": into,
        },
        results={"rows": jax.ShapeDtypeStruct((hidden.shape[0], num_columns), hidden.dtype)},
        aliases=[] if into is None else [("into", "rows")],
        column_tiles=column_tiles,
        k_steps=-(-n // K_STEP),
        load=load,
        copies=1 + PANELS,
        end=ROUNDED_ROWS,
        tuning=find_tuning(TileTuning, "down_projection", tuning, shape),
    ).rows
