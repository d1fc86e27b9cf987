"""Down projection of a block of output columns: activations through the down weights of their expert."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.ampere.row_matmul import row_matmul
from pallas_kernels.ampere.store import add_bias, bias_of, for_rows, store_half
from pallas_kernels.ampere.tuning import tuned_tile
from pallas_kernels.contract import Dispatch
from pallas_kernels.mosaic.row_groups import TileSchedule
from pallas_kernels.traced_once import traced_once
from pallas_kernels.tuning.parameters import MmaTuning


@traced_once("num_columns", "tuning")
def down_projection(
    hidden: Float[Array, "R n"],
    w_down: Float[Array, "E n d"],
    b_down: Float[Array, "E d"] | None,
    groups: Dispatch[TileSchedule],
    first_column: Int[Array, ""] | int,
    num_columns: int,
    *,
    tuning: MmaTuning | None = None,
) -> Float[Array, "R columns"]:
    """Columns `first_column`, a multiple of 8, to `first_column + num_columns` of every row's expert output."""
    first_column = weight_column = jnp.asarray(first_column, jnp.int32)
    if w_down.dtype != hidden.dtype:  # converted for the block alone
        w_down = lax.dynamic_slice_in_dim(w_down, first_column, num_columns, axis=2).astype(hidden.dtype)
        weight_column = jnp.zeros_like(first_column)
    bias = None
    if b_down is not None:
        bias = lax.dynamic_slice_in_dim(b_down.astype(jnp.float32), first_column, num_columns, axis=1)

    def end(bias, results, where, sums):
        own = [bias_of(bias, where, column, num_columns) for _, column in where.halves]

        def end_rows(first, of_rows):
            for values, of_columns, (_, column) in zip(of_rows, own, where.halves, strict=True):
                store_half(results[0], where, first, column, add_bias(values, of_columns), num_columns)

        for_rows(where, sums, end_rows)

    (rows,) = row_matmul(
        "moe_down_projection",
        groups.tiles,
        (hidden,),
        None,
        (w_down,),
        first_column=weight_column.reshape(1),
        num_columns=num_columns,
        extra=bias,
        results=[jax.ShapeDtypeStruct((hidden.shape[0], num_columns), hidden.dtype)],
        end=end,
        tile=tuned_tile("down_projection", tuning, hidden, w_down.shape[2], groups),
    )
    return rows
