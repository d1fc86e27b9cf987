"""Backward of the up projection with respect to its input, for a block of columns."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.ampere.row_matmul import row_matmul
from pallas_kernels.ampere.store import for_rows, store_half
from pallas_kernels.ampere.tuning import tuned_tile
from pallas_kernels.contract import Dispatch
from pallas_kernels.mosaic.row_groups import TileSchedule
from pallas_kernels.traced_once import traced_once
from pallas_kernels.tuning.parameters import MmaTuning


@traced_once("num_columns", "tuning")
def up_backward(
    d_pre_activations: tuple[Float[Array, "R n"], ...],
    weights: tuple[Float[Array, "E d n"], ...],
    groups: Dispatch[TileSchedule],
    first_column: Int[Array, ""] | int,
    num_columns: int,
    *,
    tuning: MmaTuning | None = None,
) -> Float[Array, "R columns"]:
    """`Σ dP · Wᵀ` over the projections, into the same sums; see the portable twin."""
    num_rows, dtype = d_pre_activations[0].shape[0], d_pre_activations[0].dtype
    first_column = jnp.asarray(first_column, jnp.int32)
    if weights[0].dtype != dtype:  # converted for the block alone
        blocks = (lax.dynamic_slice_in_dim(w, first_column, num_columns, axis=1) for w in weights)
        weights = tuple(block.astype(dtype) for block in blocks)
        first_column = jnp.zeros_like(first_column)

    def end(_, results, where, sums):
        def end_rows(first, of_rows):
            for values, (_, column) in zip(of_rows, where.halves, strict=True):
                store_half(results[0], where, first, column, values, num_columns)

        for_rows(where, sums, end_rows)

    (rows,) = row_matmul(
        "moe_up_backward",
        groups.tiles,
        d_pre_activations,
        None,
        weights,
        transposed=True,
        first_column=first_column.reshape(1),
        num_columns=num_columns,
        results=[jax.ShapeDtypeStruct((num_rows, num_columns), dtype)],
        end=end,
        tile=tuned_tile("up_backward", tuning, d_pre_activations[0], weights[0].shape[1], groups),
    )
    return rows
