"""`--scaling`: time and memory per token from few tokens to many."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from blaze_jax.benchmark.inputs import abstract_inputs, expert_inputs, forward_and_backward
from blaze_jax.benchmark.plan import MIB, plan_of
from blaze_jax.benchmark.residuals import saved_bytes
from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.benchmark.timing import time_calls
from blaze_jax.experts import expert_ffn

FLAT_FROM = 65536
FLAT_WITHIN = 0.15
"""From that many tokens on, time and memory per token should stay within that share of each other."""


def measure_scaling_point(sizes: Sizes, dtype, *, repeats: int, implementation=None) -> dict[str, Any]:
    """Forward+backward at one number of tokens, as it goes into the JSON file."""
    layer = partial(expert_ffn, implementation=implementation)
    inputs = expert_inputs(sizes, dtype)
    arguments = (*inputs, inputs[0])
    compiled = jax.jit(forward_and_backward(layer)).lower(*arguments).compile()
    plan = plan_of(compiled.memory_analysis())
    saved = saved_bytes(layer, *abstract_inputs(sizes, dtype))
    timing = time_calls({"ours": partial(compiled, *arguments)}, repeats=repeats)["ours"]
    weights = sizes.weight_elements * jnp.dtype(dtype).itemsize
    record: dict[str, Any] = {
        "kind": "scaling",
        "sizes": sizes._asdict(),
        "dtype": jnp.dtype(dtype).name,
        **timing.record(),
        "tflops": 3 * sizes.forward_flops / timing.us / 1e6,
        "ns_per_token": timing.us * 1e3 / sizes.num_tokens,
        "saved_mib": saved / MIB,
        "saved_bytes_per_token": saved / sizes.num_tokens,
    }
    if plan is not None:
        record["peak_mib"] = plan.peak / MIB
        # The weights' gradients are part of the peak and no token's.
        record["peak_bytes_per_token"] = (plan.peak - weights) / sizes.num_tokens
    return record


def flatness(records: Sequence[dict[str, Any]], name: str) -> float | None:
    """Largest over smallest value of `name`, less one, from `FLAT_FROM` tokens on; None for fewer than two values."""
    values = _of_many_tokens(records, name)
    return max(values) / min(values) - 1 if len(values) > 1 else None


def grows(records: Sequence[dict[str, Any]], name: str) -> bool:
    """Whether a value of `name` is more than `FLAT_WITHIN` above one of fewer tokens, from `FLAT_FROM` on."""
    values = _of_many_tokens(records, name)
    return any(value > (1 + FLAT_WITHIN) * min(values[: i + 1]) for i, value in enumerate(values))


def _of_many_tokens(records: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [r[name] for r in records if r["sizes"]["num_tokens"] >= FLAT_FROM and name in r]


def print_flatness(records: Sequence[dict[str, Any]]) -> None:
    """How much time and memory per token vary where they should not grow."""
    for name in ("ns_per_token", "saved_bytes_per_token", "peak_bytes_per_token"):
        flat = flatness(records, name)
        if flat is not None:
            verdict = "grows" if grows(records, name) else "flat" if flat <= FLAT_WITHIN else "falls"
            print(f"  {name} varies by {flat:.1%} from {FLAT_FROM} tokens on: {verdict} (within {FLAT_WITHIN:.0%})")
