"""`--token-rounding`: the experts with plain top-k against whole kernel tiles of tokens for each expert."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from blaze_jax.benchmark.inputs import expert_inputs, forward_and_backward
from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.benchmark.timing import time_calls
from blaze_jax.dispatch import Grouped
from blaze_jax.experts import compute_experts
from blaze_jax.router import Router
from blaze_jax.routing import Routing, route, route_and_group
from blaze_jax.token_rounding import TokenRounding

PLAIN = "top-k"
TILE = 128


def measure_rounding(sizes: Sizes, dtype, *, repeats: int, implementation=None) -> dict[str, Any]:
    """Forward+backward of the experts under each kind of routing, without and with it, as in the JSON file."""
    x, w_gate, w_up, w_down, *_ = expert_inputs(sizes, dtype)
    logits = jax.random.normal(jax.random.key(4), (sizes.num_tokens, sizes.num_experts))
    tile = min(TILE, max(1, sizes.pairs // sizes.num_experts))

    options = {"experts_per_token": sizes.experts_per_token, "implementation": implementation}

    def experts(grouped: Grouped | None, routing: Routing, x, w_gate, w_up, w_down):
        layer = partial(
            compute_experts, grouped, activation="swiglu", save="pre_activations", implementation=implementation
        )
        return forward_and_backward(layer)(x, w_gate, w_up, w_down, routing.weights, routing.experts, x)

    def routed_experts(router: Router, logits, *arrays):
        routing, grouped = route_and_group(logits, router=router, **options)
        return experts(grouped, routing, *arrays)

    modes: tuple[TokenRounding, ...] = ("nearest", "down")
    routers = {f"rounded {mode}": Router(token_rounding=mode, rounding_tile=tile) for mode in modes}
    routers = {PLAIN: Router(), **routers}
    routings = {name: jax.jit(partial(route, router=router, **options))(logits) for name, router in routers.items()}
    alone, arrays = jax.jit(partial(experts, None)), (x, w_gate, w_up, w_down)
    calls = {name: partial(alone, routing, *arrays) for name, routing in routings.items()}
    calls |= {
        _with_router(name): partial(jax.jit(partial(routed_experts, router)), logits, *arrays)
        for name, router in routers.items()
    }
    timings = time_calls(calls, repeats=repeats)
    rows = {}
    for name, routing in routings.items():
        counts = routing.tokens_per_expert
        pairs, us = int(counts.sum()), timings[name].us
        us_with_router = timings[_with_router(name)].us
        rows[name] = {
            **timings[name].record(),
            "us_with_router": us_with_router,
            "speedup_with_router": timings[_with_router(PLAIN)].us / us_with_router,
            "us_by_kernel": {kernel: total.us for kernel, total in timings[name].kernels.items()},
            "pairs": pairs,
            "rows_of_tiles": int((-(-counts // tile) * tile).sum()),
            "tflops": 18 * pairs * sizes.model_width * sizes.expert_width / us / 1e6,
            "speedup": timings[PLAIN].us / us,
        }
    return {
        "kind": "token_rounding",
        "sizes": sizes._asdict(),
        "dtype": jnp.dtype(dtype).name,
        "tile": tile,
        "routings": rows,
    }


def _with_router(name: str) -> str:
    return f"{name}, routed"
