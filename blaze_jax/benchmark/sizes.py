"""Layers to measure: their sizes, by number or by the name of a public model, random inputs, and the two passes."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from blaze_jax.config import MoEConfig
from blaze_jax.routing import route

FORWARD, BOTH = "forward", "forward+backward"
PASSES = {FORWARD: 1, BOTH: 3}
"""The two passes that are timed, and how many times the forward pass's arithmetic they take."""


class Sizes(NamedTuple):
    """T tokens, d model width, n expert width, E experts, K experts per token."""

    num_tokens: int
    model_width: int
    expert_width: int
    num_experts: int
    experts_per_token: int

    @classmethod
    def parse(cls, text: str) -> "Sizes":
        """Sizes from "T,d,n,E,K"."""
        try:
            sizes = cls(*(int(part) for part in text.split(",")))
        except (TypeError, ValueError):
            raise argparse.ArgumentTypeError(f"{text!r} must be five whole numbers T,d,n,E,K") from None
        if min(sizes) < 1 or sizes.experts_per_token > sizes.num_experts:
            raise argparse.ArgumentTypeError(f"{text!r} must have sizes of at least 1 and K of at most E")
        return sizes

    @property
    def pairs(self) -> int:
        """(token, slot) pairs, T·K."""
        return self.num_tokens * self.experts_per_token

    @property
    def forward_flops(self) -> int:
        """Floating-point operations of the three products of every pair, 6·T·K·d·n."""
        return 6 * self.pairs * self.model_width * self.expert_width

    @property
    def weight_elements(self) -> int:
        """Numbers in the experts' three weight arrays."""
        return 3 * self.num_experts * self.model_width * self.expert_width

    def config(self, **options) -> MoEConfig:
        """The configuration of a layer of these sizes, with other fields of `MoEConfig`."""
        fields = ("num_experts", "experts_per_token", "expert_width")
        return MoEConfig(**{name: getattr(self, name) for name in fields}, **options)

    def __str__(self) -> str:
        return "T={}, d={}, n={}, E={}, K={}".format(*self)


GPU_SIZES = (
    Sizes(24576, 1536, 256, 128, 8),
    Sizes(32768, 4096, 1024, 128, 8),
    Sizes(32768, 4096, 256, 256, 16),
    Sizes(65536, 1024, 4096, 16, 4),
    Sizes(32768, 2048, 8192, 16, 4),
    *(Sizes(tokens, 512, 2048, 4, 1) for tokens in (65536, 131072, 524288, 2097152)),
)
"""Fine-grained, wide and MoEBlaze's: the rows other libraries were measured at on an H200."""

PRESETS = {
    "mixtral": (4096, 14336, 8, 2),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "deepseek-v3": (7168, 2048, 256, 8),
    "olmoe": (2048, 1024, 64, 8),
    "gpt-oss-20b": (2880, 2880, 32, 4),
}
"""The Mixture-of-Experts layers of Mixtral 8x7B, Qwen3-30B-A3B, DeepSeek-V3, OLMoE and gpt-oss-20b: d, n, E, K."""


def expert_inputs(sizes: Sizes, dtype, *, same_experts: bool = False) -> tuple:
    """Random `(x, w_gate, w_up, w_down, weights, experts)`, routed at random, or all tokens to the same K experts."""
    tokens, d, n, num_experts, slots = sizes
    keys = jax.random.split(jax.random.key(0), 5)
    logits = jax.random.normal(keys[4], (1 if same_experts else tokens, num_experts))
    routing = route(jnp.broadcast_to(logits, (tokens, num_experts)), slots)
    matrices = (_matrices(keys[i], num_experts, shape, dtype) for i, shape in ((1, (d, n)), (2, (d, n)), (3, (n, d))))
    x = jax.random.normal(keys[0], (tokens, d), jnp.float32).astype(dtype)
    return x, *matrices, routing.weights, routing.experts


def abstract_inputs(sizes: Sizes, dtype, weight_dtype=None) -> tuple:
    """The shapes and dtypes of `expert_inputs`, for a compilation without data."""
    tokens, d, n, num_experts, slots = sizes
    up, down = (num_experts, d, n), (num_experts, n, d)
    weights = (jax.ShapeDtypeStruct(shape, jnp.dtype(weight_dtype or dtype)) for shape in (up, up, down))
    routed = (jax.ShapeDtypeStruct((tokens, slots), t) for t in (jnp.float32, jnp.int32))
    return jax.ShapeDtypeStruct((tokens, d), jnp.dtype(dtype)), *weights, *routed


@partial(jax.jit, static_argnums=(1, 2, 3))
def _matrices(key, number: int, shape: tuple[int, int], dtype):
    """A normal matrix per expert, scaled by its fan-in; one after the other, so that float32 copies stay small."""
    scale = shape[0] ** -0.5
    keys = jax.random.split(key, number)
    return jax.lax.map(lambda k: (jax.random.normal(k, shape, jnp.float32) * scale).astype(dtype), keys)


def forward_and_backward(function: Callable) -> Callable:
    """`function` and its gradient with respect to all floating arguments but the cotangent, given last."""

    def run(*args):
        *inputs, cotangent = args
        y, vjp = of_floating(function, inputs)
        return y, vjp(cotangent)

    return run


def of_floating(function: Callable, inputs) -> tuple:
    """`jax.vjp` of `function` in the floating arrays of its arguments; the others are held fixed."""
    flat, tree = jax.tree.flatten(tuple(inputs))
    floating = [i for i, a in enumerate(flat) if jnp.issubdtype(a.dtype, jnp.floating)]

    def in_floating(*values):
        merged = list(flat)
        for i, value in zip(floating, values, strict=True):
            merged[i] = value
        return function(*tree.unflatten(merged))

    return jax.vjp(in_floating, *(flat[i] for i in floating))
