"""RMSNorm that keeps its input for the backward pass, and no float32 copy of it."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x²) + ε) · scale` (arXiv 1910.07467), computed in float32, input and output in `dtype`."""

    dtype: DTypeLike
    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        return rms_norm(x.astype(self.dtype), scale, self.epsilon)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: Float[Array, "... d"], scale: Float[Array, " d"], epsilon: float = 1e-6) -> Float[Array, "... d"]:
    """The norm, in the dtype of `x`. Automatic derivatives would keep several float32 arrays of the size of `x`."""
    return _forward(x, scale, epsilon)[0]


def _forward(x, scale, epsilon):
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + epsilon)
    return (wide * inverse * scale).astype(x.dtype), (x, scale, inverse)


def _backward(_, residuals, dy):
    x, scale, inverse = residuals
    normed, dy = x.astype(jnp.float32) * inverse, dy.astype(jnp.float32)
    d_normed = dy * scale
    dx = inverse * (d_normed - normed * jnp.mean(d_normed * normed, -1, keepdims=True))
    d_scale = jnp.sum(dy * normed, range(dy.ndim - 1))
    return dx.astype(x.dtype), d_scale.astype(scale.dtype)


rms_norm.defvjp(_forward, _backward)
