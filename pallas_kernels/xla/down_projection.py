"""Down projection of a block of output columns: activations through the down weights of their expert."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.xla.row_groups import RowGroups, accumulator_dtype, map_rows, read_rows, zeros


def down_projection(
    hidden: Float[Array, "R n"],
    w_down: Float[Array, "E n d"],
    b_down: Float[Array, "E d"] | None,
    groups: RowGroups,
    first_column: Int[Array, ""] | int,
    num_columns: int,
) -> Float[Array, "R columns"]:
    """Columns `first_column` to `first_column + num_columns` of every row's expert output, in the dtype of `hidden`."""
    wide = accumulator_dtype(hidden.dtype)

    def columns(array):
        return lax.dynamic_slice_in_dim(array, first_column, num_columns, axis=-1)

    def compute(own, tile, _):
        out = jnp.dot(read_rows(hidden, tile), columns(own[0]).astype(hidden.dtype), preferred_element_type=wide)
        out = out + columns(own[1])[None].astype(wide) if b_down is not None else out
        return (out,)

    weights = (w_down,) if b_down is None else (w_down, b_down)
    buffer = zeros((groups.num_rows, num_columns), hidden.dtype, hidden)
    return map_rows(groups, weights, compute, (buffer,))[0]
