"""The GPU that kernels are launched on, and what its tensor cores and copies cannot do."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

H200_SMS = 132


def num_sms() -> int:
    """Streaming multiprocessors of the GPU that jax computes on; an H200's where a program is made elsewhere."""
    return jax.devices()[0].core_count if jax.default_backend() == "gpu" else H200_SMS


def compute_capability() -> str | None:
    """That of the GPU that jax computes on, such as "9.0"; None without one. GPUs of AMD have a name, "gfx942"."""
    return jax.devices()[0].compute_capability if jax.default_backend() == "gpu" else None


def on_nvidia_gpu() -> bool:
    """Whether jax computes on an NVIDIA GPU with kernels here: of compute capability 8.0 or newer."""
    major = (compute_capability() or "").partition(".")[0]
    return major.isdigit() and int(major) >= 8


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
