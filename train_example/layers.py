"""The layers of a block beside its experts: RMSNorm, rotary attention with grouped keys, a dense feed-forward layer."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from train_example.config import AttentionKernel, QKNorm

_CUDNN_CAPABILITY, _CUDNN_MAX_WIDTH = (8, 0), 128


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
    """The norm, in the dtype of `x`. Its derivative keeps `x`; automatic ones keep float32 arrays of that size."""
    return _norm_forward(x, scale, epsilon)[0]


def _norm_forward(x, scale, epsilon):
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + epsilon)
    return (wide * inverse * scale).astype(x.dtype), (x, scale, inverse)


def _norm_backward(_, residuals, dy):
    x, scale, inverse = residuals
    normed, dy = x.astype(jnp.float32) * inverse, dy.astype(jnp.float32)
    d_normed = dy * scale
    dx = inverse * (d_normed - normed * jnp.mean(d_normed * normed, -1, keepdims=True))
    d_scale = jnp.sum(dy * normed, range(dy.ndim - 1))
    return dx.astype(x.dtype), d_scale.astype(scale.dtype)


rms_norm.defvjp(_norm_forward, _norm_backward)


class Context(NamedTuple):
    """Where the tokens of a call stand in their sequences, whose earlier ones are in the collection "cache".

    Attributes:
      first: how many tokens of each sequence are there.
      added: how many of its new ones are real; those behind are padding, which nothing sees and no expert gets.
    """

    first: Int[Array, " B"]
    added: Int[Array, " B"]

    def positions(self, length: int) -> Int[Array, "B S"]:
        """The position of each of `length` new tokens, which is its place in the cache, too."""
        return self.first[:, None] + jnp.arange(length)

    def real(self, length: int) -> Bool[Array, "B S"]:
        """Which of `length` new tokens are no padding."""
        return jnp.arange(length) < self.added[:, None]


class Rotation(NamedTuple):
    """Cosine and sine of every position's angles, float32 `(S, 1, h/2)`, or `(B, S, 1, h/2)` where sequences differ.

    And how many positions a token sees, which is each layer's own where a model has windows; None for all.
    """

    cos: Float[Array, "*B S 1 half"]
    sin: Float[Array, "*B S 1 half"]
    window: Int[Array, ""] | None = None


def frequencies(head_width: int, base: float = 10_000.0) -> Float[Array, " half"]:
    """Radians a position by which RoFormer turns each pair of a head's numbers."""
    return base ** -(jnp.arange(0, head_width, 2, dtype=jnp.float32) / head_width)


def rotation(length: int, frequency: Float[Array, " half"], first: Array | None = None) -> Rotation:
    """The angles of `length` positions, which all layers share: from 0, or from each sequence's `first`, int32 (B,)."""
    with jax.named_scope("rotation"):
        position = jnp.arange(length, dtype=jnp.float32)[:, None, None]
        angle = (position if first is None else position + first[:, None, None, None]) * frequency
        return Rotation(jnp.cos(angle), jnp.sin(angle))


def rotate(x: Float[Array, "B S heads h"], rotation: Rotation) -> Float[Array, "B S heads h"]:
    """Rotary position embedding (RoFormer, arXiv 2104.09864): the halves of a head turned by the position's angles."""
    cos, sin, _ = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Attention(nn.Module):
    """Causal self-attention; with a context also over the keys and values that the collection "cache" has.

    Attributes:
      num_heads: heads of the queries.
      num_kv_heads: heads of keys and values, a divisor of `num_heads`.
      dtype: dtype of the computation.
      kernel: what computes the attention; None for the best that can run here.
      qk_norm: what the norms of queries and keys take together; None for no norms.
      norm_epsilon: ε of these norms.
      projection: what makes the projections, like `nn.DenseGeneral`.
      use_bias: whether they have biases.
    """

    num_heads: int
    num_kv_heads: int
    dtype: DTypeLike
    kernel: AttentionKernel | None = None
    qk_norm: QKNorm | None = None
    norm_epsilon: float = 1e-6
    projection: Callable[..., nn.Module] = nn.DenseGeneral
    use_bias: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "B S d"], rotation: Rotation, context: Context | None = None
    ) -> Float[Array, "B S d"]:
        head_width = 2 * rotation.cos.shape[-1]

        def project(heads: int, name: str) -> Float[Array, "B S heads h"]:
            return self.projection((heads, head_width), use_bias=self.use_bias, dtype=self.dtype, name=name)(x)

        query = rotate(self._normed(project(self.num_heads, "query"), "query_norm"), rotation)
        key = rotate(self._normed(project(self.num_kv_heads, "key"), "key_norm"), rotation)
        value = project(self.num_kv_heads, "value")
        positions = context and context.positions(x.shape[1])
        if positions is not None:
            key, value = self._cached("key", key, positions), self._cached("value", value, positions)
        y = self.mixed(query, key, value, positions, rotation.window)
        return self.projection(x.shape[-1], axis=(-2, -1), use_bias=self.use_bias, dtype=self.dtype, name="out")(y)

    def mixed(self, query: Array, key: Array, value: Array, positions: Array | None, window: Array | None) -> Array:
        """The values that each query sees, mixed: those up to its place in a cache, which `positions` are if any.

        Subclasses have a `window`, see `Rotation`.
        """
        if positions is None:
            kernel = self.kernel or best_kernel(query)
            return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=kernel)
        visible = (jnp.arange(key.shape[1]) <= positions[..., None])[:, None]
        return jax.nn.dot_product_attention(query, key, value, mask=visible, implementation=self.kernel)

    def _cached(
        self, name: str, new: Float[Array, "B S heads h"], positions: Int[Array, "B S"]
    ) -> Float[Array, "B slots heads h"]:
        """The cache of that name with the new tokens at their positions; padding beyond its end is dropped.

        It is `(B, heads, slots, h)`, as products take it: nothing is transposed to read or to write it.
        """
        sequence, head = jnp.arange(new.shape[0])[:, None, None], jnp.arange(new.shape[2])
        cache = jnp.asarray(self.get_variable("cache", name)).at[sequence, head, positions[..., None]]
        cache = cache.set(new, mode="drop", unique_indices=True)
        self.put_variable("cache", name, cache)
        return cache.swapaxes(1, 2)

    def _normed(self, x: Float[Array, "B S heads h"], name: str) -> Float[Array, "B S heads h"]:
        if self.qk_norm is None:
            return x
        norm = RMSNorm(self.dtype, self.norm_epsilon, name=name)
        return norm(x) if self.qk_norm == "head" else norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)


def best_kernel(query: Float[Array, "B S heads h"]) -> AttentionKernel:
    """CuDNN's where it can run: 16-bit types on an NVIDIA GPU since Ampere, heads of a width that it takes."""
    device = jax.devices()[0]
    if device.platform != "gpu" or "cuda" not in device.client.platform_version:
        return "xla"
    capability = tuple(int(number) for number in device.compute_capability.split("."))
    _, length, _, width = query.shape
    fits = length % 2 == 0 and width % 8 == 0 and width <= _CUDNN_MAX_WIDTH
    return "cudnn" if fits and query.dtype.itemsize == 2 and capability >= _CUDNN_CAPABILITY else "xla"


class DenseFeedForward(nn.Module):
    """A gated feed-forward layer of one hidden width for every token; `activation` is a name of `GATES`."""

    width: int
    activation: str
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "B S d"]) -> Float[Array, "B S d"]:
        gate = nn.Dense(self.width, use_bias=False, dtype=self.dtype, name="gate")(x)
        up = nn.Dense(self.width, use_bias=False, dtype=self.dtype, name="up")(x)
        return nn.Dense(x.shape[-1], use_bias=False, dtype=self.dtype, name="down")(GATES[self.activation](gate) * up)


GATES: dict[str, Callable[[Array], Array]] = {
    "swiglu": jax.nn.silu,
    "geglu": partial(jax.nn.gelu, approximate=False),
    "geglu_tanh": partial(jax.nn.gelu, approximate=True),
    "reglu": jax.nn.relu,
}
"""The functions that the gated activations of `blaze_jax` apply to their gate."""
