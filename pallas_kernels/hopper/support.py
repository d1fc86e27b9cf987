"""What the Hopper kernels cannot do."""

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.simt.dispatch import dispatch_unsupported

WIDTH_MULTIPLE = 8
"""Rows must be whole multiples of 16 bytes, what bulk copies and the gather move."""


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
    num_experts, d, n = weights[0].shape
    if reason := dispatch_unsupported(num_experts):
        return reason
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return (
            f"x has dtype {x.dtype}, the tensor cores take bfloat16 or float16 (MoE(..., dtype=jnp.bfloat16) casts the "
            "tokens; parameters may stay float32)"
        )
    for array in (*weights, *biases):
        if array.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"a weight or bias has dtype {array.dtype}, must be bfloat16, float16 or float32"
    if len({weight.dtype for weight in weights[:-1]}) > 1:
        return f"w_gate and w_up have dtypes {weights[0].dtype} and {weights[1].dtype}, must have the same"
    for name, width in (("d", d), ("n", n)):
        if width % WIDTH_MULTIPLE:
            return f"{name}={width} must be a multiple of {WIDTH_MULTIPLE}"
    if x.shape[0] * d // 8 >= 2**31:
        return f"x of shape {x.shape} is too large for the gather's 32-bit offsets in units of 16 bytes"
    return None
