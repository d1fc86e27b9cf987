"""What the kernels for every GPU since Ampere cannot do."""

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.mosaic.device import weights_unsupported
from pallas_kernels.simt.dispatch import dispatch_unsupported


def unsupported(x: Array, weights: tuple[Array, ...], biases: tuple[Array, ...]) -> str | None:
    """Why an expert FFN of these arrays cannot run on the kernels, or None if it can.

    Args:
      x: tokens `(T, d)`.
      weights: up weights `(E, d, n)`, then the down weights.
      biases: every bias there is.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"x has dtype {x.dtype}, the tensor cores take bfloat16, float16 or float32"
    return dispatch_unsupported(weights[0].shape[0]) or weights_unsupported(weights, biases)
