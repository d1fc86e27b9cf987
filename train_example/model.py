"""The decoder: attention and `blaze_jax.MoE` in blocks, which `nn.scan` stacks; embedding and head around them."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from blaze_jax import RESIDUAL_NAMES, MoE, MoEConfig, Parallelism, expert_ffn
from train_example.config import AttentionKernel, ModelConfig, Remat
from train_example.layers import Attention, DenseFeedForward, RMSNorm, Rotation, rotation


class Decoder(nn.Module):
    """A causal language model over bytes, or other tokens.

    Attributes:
      config: the sizes.
      moe: the Mixture-of-Experts layer of every block but the dense ones.
      dtype: dtype of the computation; parameters are float32.
      remat: what the backward pass computes again, see `Remat`.
      experts: what computes the experts, see `blaze_jax.MoE`.
      attention: what computes the attention; None for the best that can run here.
      unroll: whether the program has every block by itself, instead of a loop over one: the compiler takes longer, and
        the program copies less.
      parallel: how the Mixture-of-Experts layers are split over devices.
    """

    config: ModelConfig
    moe: MoEConfig
    dtype: DTypeLike
    remat: Remat = "none"
    experts: Callable[..., Array] = expert_ffn
    attention: AttentionKernel | None = None
    unroll: bool = False
    parallel: Parallelism | None = None

    @nn.compact
    def __call__(self, tokens: Int[Array, "B S"], *, train: bool = False) -> Float[Array, "B S V"]:
        """Float32 logits of the token that follows each of `tokens`; `train` is that of `blaze_jax.MoE`."""
        config = self.config
        embedding = self.param("embedding", nn.initializers.normal(1.0), (config.vocabulary, config.width))
        with jax.named_scope("embedding"):
            # Not a gather: its gradient is a scatter, and a GPU leaves open in which order that adds up.
            x = jax.nn.one_hot(tokens, config.vocabulary, dtype=self.dtype) @ embedding.astype(self.dtype)
        angles = rotation(tokens.shape[1], config.head_width or config.width // config.num_heads, config.rotary_base)
        for name, layers in config.stacks().items():
            x = self._stack(name, len(layers), self.moe if name.startswith("moe") else None, train)(x, angles)[0]
        x = RMSNorm(self.dtype, config.norm_epsilon, name="final_norm")(x)
        if config.tied_head:
            return (x @ embedding.astype(self.dtype).T).astype(jnp.float32)
        return nn.Dense(config.vocabulary, use_bias=False, dtype=self.dtype, name="head")(x).astype(jnp.float32)

    def _stack(self, name: str, length: int, moe: MoEConfig | None, train: bool) -> nn.Module:
        """`length` blocks, one after the other, each variable stacked on a leading axis of layers."""
        scanned = nn.scan(
            _rematerialized(Block, self.remat, merges=self.unroll),
            variable_axes={"params": 0, "losses": 0, "intermediates": 0, "router_state": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]
            length=length,
            unroll=length if self.unroll else 1,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return scanned(self.config, moe, self.dtype, train, self.experts, self.attention, self.parallel, name=name)


class Block(nn.Module):
    """Attention, then a feed-forward layer, each behind a norm and with a residual connection.

    Attributes:
      config: the sizes.
      moe: the Mixture-of-Experts layer; None for a dense feed-forward layer.
      dtype: dtype of the computation.
      train: see `Decoder`.
      experts: see `Decoder`.
      attention: see `Decoder`.
      parallel: see `Decoder`.
    """

    config: ModelConfig
    moe: MoEConfig | None
    dtype: DTypeLike
    train: bool
    experts: Callable[..., Array]
    attention: AttentionKernel | None
    parallel: Parallelism | None

    @nn.compact
    def __call__(self, x: Float[Array, "B S d"], rotation: Rotation) -> tuple[Float[Array, "B S d"], None]:
        """`(y, None)`: the pair that `nn.scan` takes."""
        config = self.config
        attention = Attention(
            config.num_heads,
            config.num_kv_heads,
            self.dtype,
            self.attention,
            config.qk_norm,
            config.norm_epsilon,
            name="attention",
        )
        x = x + attention(RMSNorm(self.dtype, config.norm_epsilon, name="attention_norm")(x), rotation)
        normed = RMSNorm(self.dtype, config.norm_epsilon, name="feed_forward_norm")(x)
        if self.moe is None:
            dense = DenseFeedForward(config.dense_width, config.activation, self.dtype, name="feed_forward")
            return x + dense(normed), None
        moe = MoE(self.moe, dtype=self.dtype, experts=self.experts, parallel=self.parallel, name="moe")
        return x + moe(normed, train=self.train), None


def _rematerialized(block: type[nn.Module], remat: Remat, *, merges: bool) -> type[nn.Module]:
    """The block with its recomputation; `merges` if XLA could merge that with what it repeats, as not in a loop."""
    if remat == "none":
        return block
    kept = RESIDUAL_NAMES if remat == "except-experts" else ()
    policy = jax.checkpoint_policies.save_only_these_names(*kept)
    return nn.remat(block, policy=policy, prevent_cse=merges)
