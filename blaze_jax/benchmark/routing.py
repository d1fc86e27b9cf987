"""`--routing`: the router and the index building, compared with what XLA makes of top-k and sorts."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from blaze_jax.benchmark.timing import time_calls, wall_times
from blaze_jax.implementation import Implementation, kernels_of
from blaze_jax.router import Router
from blaze_jax.routing import route, route_and_group
from pallas_kernels.mosaic.device import on_nvidia_gpu

OURS = "blaze_jax route + dispatch"
XLA = "XLA top_k + argsort dispatch"

DECIDERS: dict[str, dict[str, Any]] = {
    "capacity factor 1": {"capacity_factor": 1.0},
    "rounded to nearest": {"token_rounding": "nearest"},
    "rounded down": {"token_rounding": "down"},
}
"""What else may decide which tokens an expert takes, each timed as `OURS` with it."""


def measure_routing(
    num_tokens: int,
    num_experts: int,
    slots: int,
    *,
    repeats: int,
    implementation: Implementation | None = None,
) -> dict[str, Any]:
    """Times of both ways from logits to the experts' index arrays, and of their parts, as in the JSON file.

    Ours is also timed with what else may decide which tokens an expert takes; its index arrays are then built anew.

    A separate call costs what the host needs to launch it, which hides the kernels' time; in a step that time counts.
    """
    logits = jax.random.normal(jax.random.key(0), (num_tokens, num_experts))
    implementation = implementation or ("mosaic_gpu" if on_nvidia_gpu() else "xla")
    dispatch = partial(kernels_of(implementation).dispatch, num_experts=num_experts)

    def ours_route(logits):
        routing = route(logits, slots, implementation=implementation)
        return routing.experts, routing.weights, routing.tokens_per_expert

    def ours(logits, **options):
        routing, grouped = route_and_group(logits, slots, Router(**options), implementation=implementation)
        routed = routing.experts, routing.weights, routing.tokens_per_expert
        return routed, grouped.dispatch if grouped else dispatch(routing.experts)

    def xla(logits):
        experts, weights = xla_route(logits, slots)
        return experts, weights, sorted_dispatch(experts, num_experts)

    experts = jax.jit(ours_route)(logits)[0]
    calls = {
        OURS: partial(jax.jit(ours), logits),
        XLA: partial(jax.jit(xla), logits),
        **{name: partial(jax.jit(partial(ours, **options)), logits) for name, options in DECIDERS.items()},
        "route": partial(jax.jit(ours_route), logits),
        "dispatch": partial(jax.jit(dispatch), experts),
        "XLA top_k": partial(jax.jit(partial(xla_route, slots=slots)), logits),
        "XLA argsort dispatch": partial(jax.jit(partial(sorted_dispatch, num_experts=num_experts)), experts),
    }
    timings = time_calls(calls, repeats=repeats)
    walls = wall_times(calls, repeats=repeats)
    return {
        "kind": "routing",
        "num_tokens": num_tokens,
        "num_experts": num_experts,
        "experts_per_token": slots,
        "implementation": implementation,
        "calls": {
            name: {**t.record(), "kernels": len(t.kernels), "wall_us": walls[name].us} for name, t in timings.items()
        },
        "speedup": timings[XLA].us / timings[OURS].us,
    }


def xla_route(logits, slots: int):
    """Top-k and its softmax, as one would write them: experts and weights."""
    probabilities = jax.nn.softmax(logits, axis=-1)
    weights, experts = jax.lax.top_k(probabilities, slots)
    return experts, weights / weights.sum(-1, keepdims=True)


def sorted_dispatch(experts, num_experts: int):
    """Token ids by expert, where each expert's start, and where each pair went, by two sorts and a count."""
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(jnp.bincount(flat, length=num_experts))])
    return order // experts.shape[1], offsets, jnp.argsort(order).reshape(experts.shape)
