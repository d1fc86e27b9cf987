"""Backward of the down projection and the activation, which is recomputed from the saved pre-activations."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.xla.row_groups import RowGroups, accumulator_dtype, gather_rows, map_rows, read_rows, zeros


def down_backward(
    dy: Float[Array, "T d"],
    w_down: Float[Array, "E n d"],
    b_down: Float[Array, "E d"] | None,
    pre_activations: tuple[Float[Array, "R n"], ...],
    row_weights: Float[Array, " R"],
    groups: RowGroups,
    *,
    activation: Callable[..., Array],
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

    Returns:
      `(d pre-activations, weights · activation, d row_weights)`, the first two in the dtype of the pre-activations, the
      last wide: the inner product of `dy` with the expert's output, without that output.
    """
    dtype = pre_activations[0].dtype
    wide = accumulator_dtype(dtype)

    def compute(own, tile, rows):
        *pre, _, _ = rows
        dy_rows = gather_rows(dy, groups, tile)
        d_hidden = jnp.dot(dy_rows, own[0].astype(dtype).T, preferred_element_type=wide)
        hidden, activation_vjp = jax.vjp(activation, *(read_rows(p, tile).astype(wide) for p in pre))
        d_weight = (d_hidden * hidden).sum(-1)
        if b_down is not None:
            d_weight += jnp.dot(dy_rows, own[1].astype(dtype), preferred_element_type=wide)
        weight = read_rows(row_weights, tile).astype(wide)[:, None]
        return *activation_vjp(weight * d_hidden), weight * hidden, d_weight[:, None]

    weights = (w_down,) if b_down is None else (w_down, b_down)
    like = (dy, w_down, pre_activations, row_weights)
    buffers = (*pre_activations, zeros(pre_activations[0].shape, dtype, like), zeros((groups.num_rows, 1), wide, like))
    *d_pre_activations, weighted_hidden, d_row_weights = map_rows(groups, weights, compute, buffers)
    return tuple(d_pre_activations), weighted_hidden, d_row_weights[:, 0]
