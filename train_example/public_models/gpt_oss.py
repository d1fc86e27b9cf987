"""gpt-oss (arXiv 2508.10925): the decoder with sinks in its attention, windows in every other layer, YaRN, biases."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from blaze_jax import MoEConfig
from train_example.config import ModelConfig
from train_example.layers import Attention, Rotation, rotation
from train_example.model import Decoder

_SCORES = 2**25
"""Scores that are in memory at a time: 128 MiB."""

_EVERYTHING = 2**30
"""More positions than there are."""


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(ModelConfig):
    """Sizes of the decoder.

    Attributes:
      windows: how many positions a token of each layer sees, itself the last; 0 for all.
      rotary_frequencies: radians a position by which each pair of a head's numbers turns.
      rotary_scale: what rotated queries and keys are times.
    """

    windows: tuple[int, ...]
    rotary_frequencies: tuple[float, ...]
    rotary_scale: float

    def moe(self, **options: Any) -> MoEConfig:
        """The layer, whose router has a bias."""
        return super().moe(router_bias=True, **options)


def decoder_class(config: ModelConfig) -> type[Decoder]:
    """What makes a model of these sizes."""
    return GptOss if isinstance(config, GptOssConfig) else Decoder


class GptOss(Decoder):
    """The model; see `Decoder`."""

    config: GptOssConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def angles(self, length: int, first: Array | None = None, layers: Sequence[int] = ()) -> Rotation:
        """See `Decoder`."""
        config = self.config
        cos, sin, _ = rotation(length, jnp.array(config.rotary_frequencies, jnp.float32), first)
        windows = jnp.array([config.windows[layer] or _EVERYTHING for layer in layers], jnp.int32)
        return Rotation(config.rotary_scale * cos, config.rotary_scale * sin, windows)

    def parts(self, name: str, train: bool = False) -> tuple[Callable[..., Attention], Callable[[], Any]]:
        """See `Decoder`."""
        attention, feed_forward = super().parts(name, train)
        assert isinstance(attention, partial)
        of_experts: Any = feed_forward
        return partial(SinkAttention, *attention.args, use_bias=True), partial(of_experts, use_bias=True)


class SinkAttention(Attention):
    """Attention in a window, in whose softmax each head has a learned logit more, the sink, of no value."""

    def mixed(self, query: Array, key: Array, value: Array, positions: Array | None, window: Array | None) -> Array:
        """See `Attention`."""
        assert window is not None
        positions = jnp.arange(query.shape[1])[None] if positions is None else positions
        distance = positions[..., None] - jnp.arange(key.shape[1])
        visible = (distance >= 0) & (distance < window)
        sinks = self.param("sinks", nn.initializers.zeros, (self.num_heads,))
        return attention_with_sinks(query, key, value, sinks, visible)


def attention_with_sinks(
    query: Float[Array, "B S heads h"],
    key: Float[Array, "B slots kv_heads h"],
    value: Float[Array, "B slots kv_heads h"],
    sinks: Float[Array, " heads"],
    visible: Bool[Array, "B|1 S slots"],
) -> Float[Array, "B S heads h"]:
    """Attention whose softmax has the sinks' share, which nobody gets.

    Scores, float32, exist for some of the kv heads at a time, `_SCORES` of them; the backward pass computes them again.
    """
    batch, length, heads, width = query.shape
    slots, kv_heads = key.shape[1:3]

    @jax.checkpoint
    def of_head(part: tuple[Array, ...]) -> Float[Array, "B S group h"]:
        query, key, value, sink = part
        scores = jnp.einsum("bsgh,bth->bgst", query, key, preferred_element_type=jnp.float32) * width**-0.5
        scores = jnp.where(visible[:, None], scores, jnp.finfo(jnp.float32).min)
        sink = sink.astype(jnp.float32)[:, None, None]
        peak = lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), sink))
        share = jnp.exp(scores - peak)
        share /= share.sum(-1, keepdims=True) + jnp.exp(sink - peak)
        return jnp.einsum("bgst,bth->bsgh", share.astype(value.dtype), value)

    grouped = query.reshape(batch, length, kv_heads, -1, width), key, value
    parts = *(jnp.moveaxis(array, 2, 0) for array in grouped), sinks.reshape(kv_heads, -1)
    together = max(1, _SCORES * kv_heads // (batch * heads * length * slots))
    return jnp.moveaxis(lax.map(of_head, parts, batch_size=together), 0, 2).reshape(query.shape)


def yarn(
    head_width: int,
    base: float,
    factor: float,
    length: int,
    fast: float = 32.0,
    slow: float = 1.0,
    truncate: bool = True,
) -> tuple[float, ...]:
    """The frequencies of half a head by YaRN (arXiv 2309.00071).

    A pair that turns at least `fast` times in a text of `length` keeps its frequency, and one that turns at most `slow`
    times gets one that is `factor` times lower, so that a longer text turns it no further; between the two there is a
    ramp, whose ends are whole pairs with `truncate`.
    """

    def pair(turns: float) -> float:
        """The one that makes so many turns in such a text."""
        return head_width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(fast), pair(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_width - 1)
    pairs = np.arange(head_width // 2)
    lowered = np.clip((pairs - low) / (high - low if high != low else 1e-3), 0, 1)
    plain = base ** -(2 * pairs / head_width)
    return tuple((plain / factor * lowered + plain * (1 - lowered)).tolist())


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """What YaRN multiplies rotated queries and keys with."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
