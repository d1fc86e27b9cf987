"""The decoder: attention and `blaze_jax.MoE` in blocks, which `nn.scan` stacks; embedding and head around them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from blaze_jax import RESIDUAL_NAMES, DenseTwin, MoE, MoEConfig, Parallelism, adapter_mask, expert_ffn
from train_example.config import AttentionKernel, ModelConfig, Remat
from train_example.layers import Attention, Context, DenseFeedForward, RMSNorm, Rotation, frequencies, rotation

type Tree = Any


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
        the program copies less, nothing if it is given the parameters as `layers_apart` has them.
      parallel: how the Mixture-of-Experts layers are split over devices.
      projection: what makes the projections of attention, like `nn.DenseGeneral`.
      dense_twin: the dense layer that takes the place of each Mixture-of-Experts layer; None for none.
    """

    config: ModelConfig
    moe: MoEConfig
    dtype: DTypeLike
    remat: Remat = "none"
    experts: Callable[..., Array] = expert_ffn
    attention: AttentionKernel | None = None
    unroll: bool = False
    parallel: Parallelism | None = None
    projection: Callable[..., nn.Module] = nn.DenseGeneral
    dense_twin: DenseTwin | None = None

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B S"],
        *,
        train: bool = False,
        context: Context | None = None,
        last: bool = False,
        hidden: bool = False,
    ) -> Float[Array, "B S V"]:
        """Float32 logits of the token that follows each of `tokens`; `train` is that of `blaze_jax.MoE`.

        With `context`, the tokens go on where those end whose keys and values are in the collection "cache", and join
        them there: apply with `mutable=["cache"]`. With `last` the logits `(B, 1, V)` are of the last real ones alone.
        With `hidden` there are no logits, but what the head would make them of, `(B, S, d)` in `dtype`.
        """
        config = self.config
        embedding = self.param("embedding", nn.initializers.normal(1.0), (config.vocabulary, config.width))
        with jax.named_scope("embedding"):
            if context is None and self.moe.adapter is None:
                # Not a gather: its gradient is a scatter, and a GPU leaves open in which order that adds up.
                x = jax.nn.one_hot(tokens, config.vocabulary, dtype=self.dtype) @ embedding.astype(self.dtype)
            else:
                x = embedding[tokens].astype(self.dtype)
        norm = partial(RMSNorm, self.dtype, config.norm_epsilon)
        for name, layers in config.stacks().items():
            angles = self.angles(tokens.shape[1], context and context.first, layers)
            x = self._stack(name, len(layers), norm, train)(x, angles, context)[0]
        if context is not None and last:
            x = jnp.take_along_axis(x, jnp.maximum(context.added - 1, 0)[:, None, None], axis=1)
        x = norm(name="final_norm")(x)
        if hidden:
            return x
        if config.tied_head:
            return (x @ embedding.astype(self.dtype).T).astype(jnp.float32)
        return nn.Dense(config.vocabulary, use_bias=False, dtype=self.dtype, name="head")(x).astype(jnp.float32)

    def angles(self, length: int, first: Array | None = None, layers: Sequence[int] = ()) -> Rotation:
        """The rotation of so many positions, from 0 or from each sequence's `first`; a window for each layer if any."""
        head_width = self.config.head_width or self.config.width // self.config.num_heads
        return rotation(length, frequencies(head_width, self.config.rotary_base), first)

    def parts(self, name: str, train: bool = False) -> tuple[Callable[..., Attention], Callable[[], Any]]:
        """What makes the attention, as `name=` calls it, and the feed-forward layer of the stack's blocks."""
        config, dtype = self.config, self.dtype
        sizes = config.num_heads, config.num_kv_heads, dtype, self.attention, config.qk_norm, config.norm_epsilon
        attention = partial(Attention, *sizes, self.projection)
        if name.startswith("moe") and self.dense_twin is None:
            options = {"experts": self.experts, "parallel": self.parallel, "train": train}
            feed_forward = partial(MoE, self.moe, dtype=dtype, **options, name="moe")
        else:
            width = self.dense_twin.width if self.dense_twin and name.startswith("moe") else config.dense_width
            feed_forward = partial(DenseFeedForward, width, config.activation, dtype, name="feed_forward")
        return attention, feed_forward

    def _stack(self, name: str, length: int, norm: Callable[..., RMSNorm], train: bool) -> nn.Module:
        """`length` blocks, one after the other, each variable stacked on a leading axis of layers."""
        block, (attention, feed_forward) = Block, self.parts(name, train)
        if self.remat != "none":
            kept = RESIDUAL_NAMES if self.remat == "except-experts" else ()
            policy = jax.checkpoint_policies.save_only_these_names(*kept)
            # Outside a loop XLA could merge the recomputation with what it repeats.
            block = nn.remat(Block, policy=policy, prevent_cse=self.unroll)
        scanned = nn.scan(
            block,
            variable_carry="gradient_sums",
            variable_axes={"params": 0, "losses": 0, "intermediates": 0, "router_state": 0, "routing": 0, "cache": 0},
            split_rngs={"params": True},
            in_axes=(Rotation(nn.broadcast, nn.broadcast, 0), nn.broadcast),  # pyright: ignore[reportArgumentType]
            length=length,
            unroll=length if self.unroll else 1,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return scanned(norm, attention, feed_forward, name=name)


def layers_apart(config: ModelConfig, variables: Tree) -> Tree:
    """Variables of a decoder with a tuple of each layer's in the place of each stack, which may be one already."""

    def apart(tree: Tree, layers: int) -> Tree:
        def layer(at: int) -> Tree:
            return jax.tree.map(lambda stack: lax.index_in_dim(stack, at, keepdims=False), tree)

        return tree if isinstance(tree, tuple) else tuple(map(layer, range(layers)))

    stacks = config.stacks()
    return {name: apart(tree, len(stacks[name])) if name in stacks else tree for name, tree in variables.items()}


def stacked(variables: Tree) -> Tree:
    """Undoes `layers_apart`, for `nn.scan`. In an unrolled program XLA finds each layer's arrays and stacks none."""

    def stack(tree: Tree) -> Tree:
        return jax.tree.map(lambda *layers: jnp.stack(layers), *tree) if isinstance(tree, tuple) else tree

    return {name: stack(tree) for name, tree in variables.items()}


def adapters_of(params: Tree) -> Tree:
    """The adapters among a model's parameters, and nothing else."""
    flat, mask = flatten_dict(params), flatten_dict(adapter_mask(params))
    return unflatten_dict({path: value for path, value in flat.items() if mask[path]})


def together(adapters: Tree, base: Tree) -> Tree:
    """A model's parameters: those that are trained and those that are not, if there are any; of layers apart, too."""
    if isinstance(base, tuple):
        return tuple(map(together, adapters, base))
    shared = adapters.keys() & base.keys()
    return {**adapters, **base, **{name: together(adapters[name], base[name]) for name in shared}}


class Block(nn.Module):
    """Attention, then a feed-forward layer, each behind a norm and with a residual connection.

    Attributes:
      norm: makes a norm, as `name=` calls it.
      attention: makes the attention, as `name=` calls it.
      feed_forward: makes `blaze_jax.MoE` or a dense feed-forward layer, with its name.
    """

    norm: Callable[..., RMSNorm]
    attention: Callable[..., Attention]
    feed_forward: Callable[[], MoE | DenseFeedForward]

    @nn.compact
    def __call__(
        self, x: Float[Array, "B S d"], rotation: Rotation, context: Context | None = None
    ) -> tuple[Float[Array, "B S d"], None]:
        """`(y, None)`: the pair that `nn.scan` takes."""
        x = x + self.attention(name="attention")(self.norm(name="attention_norm")(x), rotation, context)
        feed_forward, normed = self.feed_forward(), self.norm(name="feed_forward_norm")(x)
        options: Any = {"mask": context.real(x.shape[1])} if context and isinstance(feed_forward, MoE) else {}
        return x + feed_forward(normed, **options), None
