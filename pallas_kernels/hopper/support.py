"""What the Hopper kernels cannot do."""

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.mosaic.support import weights_unsupported
from pallas_kernels.routing.dispatch import dispatch_unsupported


def unsupported(
    x: Array,
    weights: tuple[Array, ...],
    biases: tuple[Array, ...],
) -> str | None:
    """Why an expert FFN of these arrays cannot run on the kernels, or None if it can.

    Args:
      x: tokens `(T, d)`.
      weights: up weights `(E, d, n)`, then the down weights.
      biases: every bias there is.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return (
            f"x has dtype {x.dtype}, the tensor cores take bfloat16 or float16 (MoE(..., dtype=jnp.bfloat16) casts the "
            "tokens; parameters may stay float32)"
        )
    if reason := dispatch_unsupported(weights[0].shape[0]) or weights_unsupported(weights, biases):
        return reason
    if len({weight.dtype for weight in weights[:-1]}) > 1:
        return f"w_gate and w_up have dtypes {weights[0].dtype} and {weights[1].dtype}, must have the same"
    if x.size // 8 >= 2**31:
        return f"x of shape {x.shape} is too large for the gather's 32-bit offsets in units of 16 bytes"
    return None
