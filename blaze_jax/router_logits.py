"""What the router chooses by."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from blaze_jax.compiled_once import compiled_once
from pallas_kernels.contract import accumulator_dtype


@compiled_once()
def router_logits(tokens: Float[Array, "T d"], params: Mapping[str, Array]) -> Float[Array, "T E"]:
    """The product of the tokens and the router's matrix, in float32 or wider, plus its bias if there is one."""
    wide = accumulator_dtype(tokens.dtype)

    @jax.checkpoint  # the backward pass widens the tokens again, or it would keep a wide copy of them
    def product(tokens, w_router):
        return jnp.dot(tokens.astype(wide), w_router.astype(wide), precision=jax.lax.Precision.HIGHEST)

    logits = product(tokens, params["w_router"])
    return logits + params["b_router"].astype(wide)[None] if "b_router" in params else logits
