"""Down projection of a block of output columns: activations through the down weights of their expert."""

from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.contract import Dispatch, accumulator_dtype
from pallas_kernels.xla.row_groups import empty, map_rows, product, read_rows


def down_projection(
    hidden: Float[Array, "R n"],
    w_down: Float[Array, "E n d"],
    b_down: Float[Array, "E d"] | None,
    groups: Dispatch,
    first_column: Int[Array, ""] | int,
    num_columns: int,
) -> Float[Array, "R columns"]:
    """Columns `first_column` to `first_column + num_columns` of every row's expert output, in the dtype of `hidden`."""
    wide = accumulator_dtype(hidden.dtype)

    def prepare(own):
        weight, *bias = (lax.dynamic_slice_in_dim(a, first_column, num_columns, axis=-1) for a in own)
        return (weight.astype(hidden.dtype), *(b.astype(wide)[:, None] for b in bias))

    def compute(own, tile, _):
        out = product(read_rows(hidden, tile), own[0], 2, 1)
        return (out if b_down is None else out + own[1],)

    weights = (w_down,) if b_down is None else (w_down, b_down)
    buffer = empty((groups.num_rows, num_columns), hidden.dtype, hidden)
    return map_rows(groups, weights, prepare, compute, (buffer,))[0]
