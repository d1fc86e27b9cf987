"""What every token passes through: the router's matrix and the shared experts."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from blaze_jax.activations import get_activation
from blaze_jax.config import MoEConfig
from pallas_kernels.contract import accumulator_dtype


def router_logits(tokens: Float[Array, "T d"], params: Mapping[str, Array]) -> Float[Array, "T E"]:
    """The router's logits, in float32 or wider."""
    wide = accumulator_dtype(tokens.dtype)
    logits = jnp.dot(tokens.astype(wide), params["w_router"].astype(wide), precision=jax.lax.Precision.HIGHEST)
    return logits + params["b_router"].astype(wide)[None] if "b_router" in params else logits


def shared_experts(tokens: Float[Array, "T d"], params: Mapping[str, Array], config: MoEConfig) -> Float[Array, "T d"]:
    """The dense FFN that every token passes through."""
    activation = get_activation(config.activation)
    wide = accumulator_dtype(tokens.dtype)
    names = ("shared_w_gate", "shared_w_up") if activation.gated else ("shared_w_up",)
    pre = [jnp.dot(tokens, params[name].astype(tokens.dtype), preferred_element_type=wide) for name in names]
    hidden = activation.function(*pre).astype(tokens.dtype)
    return jnp.dot(hidden, params["shared_w_down"].astype(tokens.dtype))
