"""A layer whose tokens take as many experts as they need, or are half padding, against one of K experts for each."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from blaze_jax.benchmark.back_to_back import take_turns
from blaze_jax.benchmark.memory import MIB, plan_of
from blaze_jax.benchmark.results import Record, head
from blaze_jax.benchmark.sizes import Sizes, forward_and_backward
from blaze_jax.benchmark.timing import time_calls
from blaze_jax.layer import init, moe
from blaze_jax.router import Router


def measure_routers(
    sizes: Sizes, dtype, *, repeats: int, turns: int, turn_seconds: float, implementation=None
) -> Record:
    """Times forward+backward of layers with their routers: K experts, half the tokens masked, ReLU of as many pairs.

    A ReLU router's logits have biases with which every expert takes `T·K/E` tokens, as BlockFFN's losses would have it.
    """
    made = {}
    for name, (layer, arguments, baseline) in router_layers(sizes, dtype, implementation).items():
        compiled = jax.jit(forward_and_backward(layer)).lower(*arguments).compile()
        made[name] = partial(compiled, *arguments), plan_of(compiled.memory_analysis()), baseline
    calls = {name: call for name, (call, _, _) in made.items()}
    timings, runs = time_calls(calls, repeats=repeats), take_turns(calls, turns=turns, seconds=turn_seconds)
    rows = {}
    for name, (call, plan, baseline) in made.items():
        row = timings[name].record() | {"sustained": runs[name], "pairs": int(call()[0][1])}
        if plan is not None:
            row |= {"temporaries_mib": plan.temporaries / MIB, "peak_mib": plan.peak / MIB}
        rows[name] = row
        for value in ("us", "temporaries_mib", "peak_mib") if name != baseline else ():
            if value in row:
                row[f"{value}_ratio"] = row[value] / rows[baseline][value]
    return head("routers", sizes, dtype) | {"layers": rows}


def router_layers(sizes: Sizes, dtype, implementation=None) -> dict[str, tuple[Callable, tuple, str]]:
    """By name a layer, its arguments with a cotangent, and the name of the one that it is compared with."""
    tokens, d, _, num_experts, slots = sizes
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (tokens, d), jnp.float32).astype(dtype)
    fixed = sizes.config(activation="silu", router_bias=True, implementation=implementation)
    relu = replace(fixed, experts_per_token=None, router=Router(scoring="relu", weight_norm="rms"))
    found = {}

    def add(name: str, config, baseline: str, mask=None) -> None:
        def layer(x, params, mask):
            y, routing = moe(x, params, config, mask=mask, train=True)
            pairs = routing.tokens_per_expert.sum().astype(jnp.float32)
            return y, pairs, sum(routing.weighted_losses.values())

        params = jax.jit(partial(init, config=config, width=d, dtype=dtype))(keys[1])
        logits = jnp.dot(x, params["w_router"], preferred_element_type=jnp.float32)
        params["b_router"] = -jnp.quantile(logits, 1 - slots / num_experts, axis=0).astype(dtype)
        found[name] = layer, (x, params, mask, (x, jnp.float32(0), jnp.float32(1))), baseline

    add("K experts", fixed, "K experts")
    add("ReLU, rows for K", replace(relu, mean_experts=slots), "K experts")
    add("ReLU, rows for E/4", relu, "K experts")
    gated = replace(fixed, activation="swiglu")
    add("K experts, gated", gated, "K experts, gated")
    add("K experts, gated, half masked", gated, "K experts, gated", jnp.arange(tokens) % 2 == 0)
    return found
