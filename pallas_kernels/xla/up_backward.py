"""Backward of the up projection with respect to its input, for a block of columns."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.contract import Dispatch
from pallas_kernels.xla.row_groups import empty, map_rows, product, read_rows


def up_backward(
    d_pre_activations: tuple[Float[Array, "R n"], ...],
    weights: tuple[Float[Array, "E d n"], ...],
    groups: Dispatch,
    first_column: Int[Array, ""] | int,
    num_columns: int,
) -> Float[Array, "R columns"]:
    """`Σ dP · Wᵀ` over the projections: `num_columns` columns from `first_column` of every row's input gradient."""
    dtype = d_pre_activations[0].dtype

    def prepare(own):
        # Side by side along n: one product sums over the projections.
        columns = (lax.dynamic_slice_in_dim(w, first_column, num_columns, axis=1).astype(dtype) for w in own)
        return (jnp.concatenate(list(columns), axis=2),)

    def compute(own, tile, _):
        return (product(jnp.concatenate([read_rows(p, tile) for p in d_pre_activations], axis=2), own[0], 2, 2),)

    buffer = empty((groups.num_rows, num_columns), dtype, d_pre_activations)
    return map_rows(groups, weights, prepare, compute, (buffer,))[0]
