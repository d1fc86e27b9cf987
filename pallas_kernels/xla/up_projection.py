"""Up projection: gathered token rows through the gate and up weights of their expert, then the activation."""

from collections.abc import Callable

from jaxtyping import Array, Float

from pallas_kernels.contract import Dispatch, accumulator_dtype
from pallas_kernels.xla.row_groups import empty, gather_rows, map_rows, product


def up_projection(
    x: Float[Array, "T d"],
    weights: tuple[Float[Array, "E d n"], ...],
    biases: tuple[Float[Array, "E n"], ...],
    groups: Dispatch,
    *,
    activation: Callable[..., Array],
    keep_pre_activations: bool = True,
    into: tuple[tuple[Float[Array, "R n"], ...], Float[Array, "R n"]] | None = None,
) -> tuple[tuple[Float[Array, "R n"], ...], Float[Array, "R n"]]:
    """Pre-activations and activation of every row.

    Args:
      x: tokens; the arithmetic runs in their dtype with wide accumulation.
      weights: `(w_gate, w_up)` of a gated activation, `(w_up,)` of an ungated one, any floating dtype.
      biases: as many as `weights`, or none.
      groups: the rows by expert.
      activation: elementwise function of the pre-activations.
      keep_pre_activations: whether the caller wants them; if not, they are written nowhere.
      into: results of the same call for other groups, whose rows are kept; None if there are none.

    Returns:
      The pre-activations (one array per weight; none unless kept) and the activation, in the dtype of `x`. The
      activation is computed from the accumulators, before the pre-activations are rounded.
    """
    wide = accumulator_dtype(x.dtype)
    shape = (groups.num_rows, weights[0].shape[-1])

    def prepare(own):
        own_weights, own_biases = own[: len(weights)], own[len(weights) :]
        return (*(w.astype(x.dtype) for w in own_weights), *(b.astype(wide)[:, None] for b in own_biases))

    def compute(own, tile, _):
        own_weights, own_biases = own[: len(weights)], own[len(weights) :]
        tokens = gather_rows(x, groups, tile)
        pre = [product(tokens, w, 2, 1) for w in own_weights]
        pre = [p + b for p, b in zip(pre, own_biases, strict=True)] if own_biases else pre
        return (*pre, activation(*pre)) if keep_pre_activations else (activation(*pre),)

    num_buffers = len(weights) + 1 if keep_pre_activations else 1
    buffers = (*into[0], into[1]) if into else tuple(empty(shape, x.dtype, x) for _ in range(num_buffers))
    *pre_activations, hidden = map_rows(groups, weights + biases, prepare, compute, buffers)
    return tuple(pre_activations), hidden
