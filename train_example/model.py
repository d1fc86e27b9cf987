"""The decoder: RMSNorm, rotary attention, and Mixture-of-Experts blocks stacked with `nn.scan`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from blaze_jax import RESIDUAL_NAMES, MoE, MoEConfig
from train_example.config import ModelConfig, Remat
from train_example.data import VOCABULARY
from train_example.experts_layer import ExpertsLayer, experts_function

_ROTARY_BASE = 10_000.0


class Decoder(nn.Module):
    """A causal language model over bytes.

    Attributes:
      config: the sizes.
      moe: the Mixture-of-Experts layer of every block but the dense ones.
      dtype: of the computation; parameters are float32.
      remat: what the backward pass computes again, see `Remat`.
      experts_layer: what computes the experts.
    """

    config: ModelConfig
    moe: MoEConfig
    dtype: DTypeLike
    remat: Remat = "none"
    experts_layer: ExpertsLayer = "blaze_jax"

    @nn.compact
    def __call__(self, tokens: Int[Array, "B S"], *, train: bool = False) -> Float[Array, "B S V"]:
        """Float32 logits of the byte that follows each of `tokens`; `train` is that of `blaze_jax.MoE`."""
        config = self.config
        embedding = self.param("embedding", nn.initializers.normal(1.0), (VOCABULARY, config.width))
        # Not a gather: its gradient is a scatter, and a GPU leaves open in which order that adds up.
        x = jax.nn.one_hot(tokens, VOCABULARY, dtype=self.dtype) @ embedding.astype(self.dtype)
        if config.num_dense_layers:
            x = self._stack("dense_blocks", config.num_dense_layers, None, train)(x)[0]
        x = self._stack("moe_blocks", config.num_layers - config.num_dense_layers, self.moe, train)(x)[0]
        x = nn.RMSNorm(dtype=self.dtype, name="final_norm")(x)
        return nn.Dense(VOCABULARY, use_bias=False, dtype=self.dtype, name="head")(x).astype(jnp.float32)

    def _stack(self, name: str, length: int, moe: MoEConfig | None, train: bool) -> nn.Module:
        """`length` blocks as one loop: compiled once, each variable stacked on a leading axis of layers."""
        scanned = nn.scan(
            _rematerialized(Block, self.remat),
            variable_axes={"params": 0, "losses": 0, "intermediates": 0, "router_state": 0},
            split_rngs={"params": True},
            length=length,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return scanned(self.config, moe, self.dtype, train, self.experts_layer, name=name)


class Block(nn.Module):
    """Attention, then a feed-forward layer, each behind a norm and with a residual connection.

    Attributes:
      config: the sizes.
      moe: the Mixture-of-Experts layer; None for a dense feed-forward layer.
      dtype: of the computation.
      train: see `Decoder`.
      experts_layer: see `Decoder`.
    """

    config: ModelConfig
    moe: MoEConfig | None
    dtype: DTypeLike
    train: bool
    experts_layer: ExpertsLayer

    @nn.compact
    def __call__(self, x: Float[Array, "B S d"]) -> tuple[Float[Array, "B S d"], None]:
        """`(y, None)`: the pair that `nn.scan` takes."""
        normed = nn.RMSNorm(dtype=self.dtype, name="attention_norm")(x)
        x = x + Attention(self.config, self.dtype, name="attention")(normed)
        normed = nn.RMSNorm(dtype=self.dtype, name="feed_forward_norm")(x)
        if self.moe is None:
            return x + DenseFeedForward(self.config.dense_width, self.dtype, name="feed_forward")(normed), None
        moe = MoE(self.moe, dtype=self.dtype, experts=experts_function(self.experts_layer), name="moe")
        return x + moe(normed, train=self.train), None


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped keys and values."""

    config: ModelConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "B S d"]) -> Float[Array, "B S d"]:
        def project(heads: int, name: str) -> Float[Array, "B S heads h"]:
            return nn.DenseGeneral((heads, head_width), use_bias=False, dtype=self.dtype, name=name)(x)

        head_width = self.config.width // self.config.num_heads
        query = rotate(project(self.config.num_heads, "query"))
        key = rotate(project(self.config.num_kv_heads, "key"))
        value = project(self.config.num_kv_heads, "value")
        y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), use_bias=False, dtype=self.dtype, name="out")(y)


class DenseFeedForward(nn.Module):
    """SwiGLU of one hidden width for every token."""

    width: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "B S d"]) -> Float[Array, "B S d"]:
        gate = nn.Dense(self.width, use_bias=False, dtype=self.dtype, name="gate")(x)
        up = nn.Dense(self.width, use_bias=False, dtype=self.dtype, name="up")(x)
        return nn.Dense(x.shape[-1], use_bias=False, dtype=self.dtype, name="down")(jax.nn.silu(gate) * up)


def rotate(x: Float[Array, "B S heads h"]) -> Float[Array, "B S heads h"]:
    """Rotary position embedding (RoFormer, arXiv 2104.09864): the halves of a head turned by the position's angles."""
    length, width = x.shape[1], x.shape[-1]
    frequency = _ROTARY_BASE ** -(jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _rematerialized(block: type[nn.Module], remat: Remat) -> type[nn.Module]:
    if remat == "none":
        return block
    kept = RESIDUAL_NAMES if remat == "except-experts" else ()
    policy = jax.checkpoint_policies.save_only_these_names(*kept)
    return nn.remat(block, policy=policy, prevent_cse=False)  # inside a loop nothing can be merged anyway
