"""The experts of a block, computed by blaze_jax, or by a conventional layer to compare it with."""

from collections.abc import Callable

import jax
from jaxtyping import Array

from blaze_jax import expert_ffn
from blaze_jax.benchmark.peers import UnavailableError, sorted_layer, tokamax_ragged_dot
from train_example.config import ExpertsLayer, UserError


def experts_function(experts_layer: ExpertsLayer) -> Callable[..., Array]:
    """The function that `blaze_jax.MoE` calls for its experts.

    The conventional ones are SwiGLU without biases, for tokens whose slots are all in use.

    Raises:
      UserError: it is not installed.
    """
    if experts_layer == "blaze_jax":
        return expert_ffn
    layer = sorted_layer(_grouped_product(experts_layer))

    def experts(x, w_gate, w_up, w_down, weights, experts, *, activation, b_gate, b_up, b_down, **options):
        if activation != "swiglu" or not (b_gate is b_up is b_down is None):
            raise ValueError(f"experts_layer={experts_layer!r} has no {activation=} or biases, only swiglu")
        return layer(x, *(w.astype(x.dtype) for w in (w_gate, w_up, w_down)), weights, experts)

    return experts


def _grouped_product(experts_layer: ExpertsLayer):
    if experts_layer == "sort+ragged_dot":
        return jax.lax.ragged_dot
    try:
        return tokamax_ragged_dot()
    except UnavailableError as error:
        raise UserError(f"--experts-layer sort+tokamax cannot run: {error}") from error
