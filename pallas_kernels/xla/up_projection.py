"""Up projection: gathered token rows through the gate and up weights of their expert, then the activation."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.xla.row_groups import RowGroups, accumulator_dtype, gather_rows, map_rows, zeros


def up_projection(
    x: Float[Array, "T d"],
    weights: tuple[Float[Array, "E d n"], ...],
    biases: tuple[Float[Array, "E n"], ...],
    groups: RowGroups,
    *,
    activation: Callable[..., Array],
) -> tuple[tuple[Float[Array, "R n"], ...], Float[Array, "R n"]]:
    """Pre-activations and activation of every row.

    Args:
      x: tokens; the arithmetic runs in their dtype with wide accumulation.
      weights: `(w_gate, w_up)` of a gated activation, `(w_up,)` of an ungated one, any floating dtype.
      biases: as many as `weights`, or none.
      groups: the rows by expert.
      activation: elementwise function of the pre-activations.

    Returns:
      The pre-activations (one array per weight) and the activation, in the dtype of `x`. The activation is computed
      from the accumulators, before the pre-activations are rounded.
    """
    wide = accumulator_dtype(x.dtype)
    shape = (groups.num_rows, weights[0].shape[-1])

    def compute(own, tile, _):
        own_weights, own_biases = own[: len(weights)], own[len(weights) :]
        gathered = gather_rows(x, groups, tile)
        pre = [jnp.dot(gathered, w.astype(x.dtype), preferred_element_type=wide) for w in own_weights]
        pre = [p + b[None].astype(wide) for p, b in zip(pre, own_biases, strict=True)] if own_biases else pre
        return *pre, activation(*pre)

    buffers = tuple(zeros(shape, x.dtype, x) for _ in range(len(weights) + 1))
    *pre_activations, hidden = map_rows(groups, weights + biases, compute, buffers)
    return tuple(pre_activations), hidden
