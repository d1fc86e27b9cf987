"""Backward of the up projection with respect to its input, for a block of columns."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.xla.row_groups import RowGroups, accumulator_dtype, map_rows, read_rows, zeros


def up_backward(
    d_pre_activations: tuple[Float[Array, "R n"], ...],
    weights: tuple[Float[Array, "E d n"], ...],
    groups: RowGroups,
    first_column: Int[Array, ""] | int,
    num_columns: int,
) -> Float[Array, "R columns"]:
    """`Σ dP · Wᵀ` over the projections: `num_columns` columns from `first_column` of every row's input gradient."""
    dtype = d_pre_activations[0].dtype
    wide = accumulator_dtype(dtype)

    def compute(own, tile, _):
        total = jnp.zeros((), wide)
        for d_pre, weight in zip(d_pre_activations, own, strict=True):
            columns = lax.dynamic_slice_in_dim(weight, first_column, num_columns, axis=0).astype(dtype)
            total += jnp.dot(read_rows(d_pre, tile), columns.T, preferred_element_type=wide)
        return (total,)

    buffer = zeros((groups.num_rows, num_columns), dtype, d_pre_activations)
    return map_rows(groups, weights, compute, (buffer,))[0]
