"""Random inputs of the experts, and the two passes that are timed on them."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.routing import route

FORWARD, BOTH = "forward", "forward+backward"
PASSES = {FORWARD: 1, BOTH: 3}
"""The two passes that are timed, and how many times the forward pass's arithmetic they take."""


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


@partial(jax.jit, static_argnums=(1, 2, 3))
def _matrices(key, number: int, shape: tuple[int, int], dtype):
    """A normal matrix per expert, scaled by its fan-in; one after the other, so that float32 copies stay small."""
    scale = shape[0] ** -0.5
    keys = jax.random.split(key, number)
    return jax.lax.map(lambda k: (jax.random.normal(k, shape, jnp.float32) * scale).astype(dtype), keys)
