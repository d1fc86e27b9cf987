"""What no kernel with tensor cores can do."""

import jax.numpy as jnp
from jaxtyping import Array

WIDTH_MULTIPLE = 8
"""Rows of 16 bits must be whole multiples of 16 bytes, what all copies move."""


def weights_unsupported(weights: tuple[Array, ...], biases: tuple[Array, ...]) -> str | None:
    """Why an expert FFN of these parameters cannot run on the kernels, or None if it can.

    Args:
      weights: up weights `(E, d, n)`, then the down weights.
      biases: every bias there is.
    """
    for array in (*weights, *biases):
        if array.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"a weight or bias has dtype {array.dtype}, must be bfloat16, float16 or float32"
    _, d, n = weights[0].shape
    for name, width in (("d", d), ("n", n)):
        if width % WIDTH_MULTIPLE:
            return f"{name}={width} must be a multiple of {WIDTH_MULTIPLE}"
    return None
