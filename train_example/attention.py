"""Causal self-attention with rotary positions and grouped keys and values."""

from typing import Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from train_example.norm import RMSNorm

AttentionKernel = Literal["cudnn", "xla"]
"""What multiplies by scores: cuDNN's flash attention, which keeps no scores, or plain XLA, which runs everywhere."""

QKNorm = Literal["head", "token"]
"""What a norm of queries and keys takes together: the numbers of a head, or those of all heads of a token."""

_CUDNN_CAPABILITY = (8, 0)
_CUDNN_MAX_WIDTH = 128


class Rotation(NamedTuple):
    """Cosine and sine of every position's angles, float32 `(S, 1, h/2)`."""

    cos: Float[Array, "S 1 half"]
    sin: Float[Array, "S 1 half"]

    @property
    def head_width(self) -> int:
        """Of the heads that it turns."""
        return 2 * self.cos.shape[-1]


class Attention(nn.Module):
    """The layer.

    Attributes:
      num_heads: of the queries.
      num_kv_heads: of keys and values, a divisor of `num_heads`.
      dtype: of the computation.
      kernel: what computes the attention; None for the best that can run here.
      qk_norm: what the norms of queries and keys take together; None for no norms.
      norm_epsilon: of these norms.
    """

    num_heads: int
    num_kv_heads: int
    dtype: DTypeLike
    kernel: AttentionKernel | None = None
    qk_norm: QKNorm | None = None
    norm_epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x: Float[Array, "B S d"], rotation: Rotation) -> Float[Array, "B S d"]:
        def project(heads: int, name: str) -> Float[Array, "B S heads h"]:
            return nn.DenseGeneral((heads, rotation.head_width), use_bias=False, dtype=self.dtype, name=name)(x)

        query = rotate(self._normed(project(self.num_heads, "query"), "query_norm"), rotation)
        key = rotate(self._normed(project(self.num_kv_heads, "key"), "key_norm"), rotation)
        value = project(self.num_kv_heads, "value")
        kernel = self.kernel or best_kernel(query)
        y = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=kernel)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), use_bias=False, dtype=self.dtype, name="out")(y)

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


def rotation(length: int, head_width: int, base: float = 10_000.0) -> Rotation:
    """The angles of `length` positions, of which all layers use the same."""
    with jax.named_scope("rotation"):
        frequency = base ** -(jnp.arange(0, head_width, 2, dtype=jnp.float32) / head_width)
        angle = jnp.arange(length, dtype=jnp.float32)[:, None, None] * frequency
        return Rotation(jnp.cos(angle), jnp.sin(angle))


def rotate(x: Float[Array, "B S heads h"], rotation: Rotation) -> Float[Array, "B S heads h"]:
    """Rotary position embedding (RoFormer, arXiv 2104.09864): the halves of a head turned by the position's angles."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
