"""The shared experts: a dense FFN that every token passes through, by XLA."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from blaze_jax.activations import get_activation
from blaze_jax.compiled_once import compiled_once
from blaze_jax.config import MoEConfig
from pallas_kernels.contract import accumulator_dtype


@compiled_once("config")
def shared_experts(
    tokens: Float[Array, "T d"], params: Mapping[str, Array], *, config: MoEConfig
) -> Float[Array, "T d"]:
    """Their output for `tokens`, in the tokens' dtype."""
    activation, dtype = get_activation(config.activation), tokens.dtype
    names = ("shared_w_gate", "shared_w_up") if activation.gated else ("shared_w_up",)
    wide = accumulator_dtype(dtype)

    def products(tokens, weights, result_dtype=dtype):
        return tuple(jnp.dot(tokens, w.astype(dtype), preferred_element_type=result_dtype) for w in weights)

    def activated(*pre_activations):
        return activation.function(*(p.astype(wide) for p in pre_activations)).astype(dtype)

    # Like the experts' kernels: the activation of the products' accumulators, and a backward pass that keeps the
    # pre-activations and takes the products in the tokens' dtype.
    @jax.custom_vjp
    def hidden(tokens, weights):
        return activated(*products(tokens, weights, wide))

    def forward(tokens, weights):
        pre_activations = products(tokens, weights, wide)
        return activated(*pre_activations), (tokens, weights, tuple(p.astype(dtype) for p in pre_activations))

    def backward(residuals, d_hidden):
        tokens, weights, pre_activations = residuals
        d_pre_activations = jax.vjp(activated, *pre_activations)[1](d_hidden)
        return jax.vjp(products, tokens, weights)[1](d_pre_activations)

    hidden.defvjp(forward, backward)
    return jnp.dot(hidden(tokens, [params[name] for name in names]), params["shared_w_down"].astype(dtype))
