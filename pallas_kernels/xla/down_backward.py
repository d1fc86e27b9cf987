"""Backward of the down projection and the activation, which is recomputed from the saved pre-activations."""

from collections.abc import Callable

import jax
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.contract import Dispatch, accumulator_dtype
from pallas_kernels.xla.row_groups import empty, gather_rows, map_rows, product, read_rows


def down_backward(
    dy: Float[Array, "T d"],
    w_down: Float[Array, "E n d"],
    b_down: Float[Array, "E d"] | None,
    pre_activations: tuple[Float[Array, "R n"], ...],
    row_weights: Float[Array, " R"],
    groups: Dispatch,
    *,
    activation: Callable[..., Array],
    into: Float[Array, "R n"] | None = None,
) -> tuple[tuple[Float[Array, "R n"], ...], Float[Array, "R n"], Float[Array, " R"]]:
    """Gradients of the pre-activations, the weighted activation, and each row's routing-weight gradient.

    Args:
      dy: gradient of the layer's output, gathered by row.
      w_down: down weights.
      b_down: down biases, or None.
      pre_activations: as saved by the up projection; the result takes their place in memory.
      row_weights: routing weight of each row.
      groups: the rows by expert.
      activation: the elementwise function of the up projection.
      into: the weighted activation of other groups' rows, which are kept; None if there are none.

    Returns:
      `(d pre-activations, weights · activation, d row_weights)`, the first two in the dtype of the pre-activations, the
      last wide: the inner product of `dy` with the expert's output, without that output.
    """
    dtype = pre_activations[0].dtype
    wide = accumulator_dtype(dtype)

    def prepare(own):
        return tuple(a.astype(dtype) for a in own)

    def compute(own, tile, rows):
        *pre, _, _ = rows
        dy_rows = gather_rows(dy, groups, tile)
        d_hidden = product(dy_rows, own[0], 2, 2)
        hidden, activation_vjp = jax.vjp(activation, *(read_rows(p, tile).astype(wide) for p in pre))
        d_weight = (d_hidden * hidden).sum(-1, keepdims=True)
        if b_down is not None:
            d_weight += product(dy_rows, own[1][:, None], 2, 2)
        weight = read_rows(row_weights, tile).astype(wide)[..., None]
        values = (*(v.astype(dtype) for v in (*activation_vjp(weight * d_hidden), weight * hidden)), d_weight)
        # Every read of the tile before the first write: otherwise XLA copies whole buffers for each tile.
        return lax.optimization_barrier(values)

    weights = (w_down,) if b_down is None else (w_down, b_down)
    like = (dy, w_down, pre_activations, row_weights)
    weighted_hidden = empty(pre_activations[0].shape, dtype, like) if into is None else into
    buffers = (*pre_activations, weighted_hidden, empty((groups.num_rows, 1), wide, like))
    *d_pre_activations, weighted_hidden, d_row_weights = map_rows(groups, weights, prepare, compute, buffers)
    return tuple(d_pre_activations), weighted_hidden, d_row_weights[:, 0]
