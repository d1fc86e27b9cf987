"""`--token-rounding`: the experts with plain top-k against whole kernel tiles of tokens for each expert."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from blaze_jax.benchmark.inputs import expert_inputs, forward_and_backward
from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.benchmark.timing import time_calls
from blaze_jax.experts import expert_ffn
from blaze_jax.routing import Routing, route

PLAIN = "top-k"
TILE = 128


def measure_rounding(sizes: Sizes, dtype, *, repeats: int, implementation=None) -> dict[str, Any]:
    """Forward+backward of the experts under each kind of routing, as it goes into the JSON file."""
    x, w_gate, w_up, w_down, *_ = expert_inputs(sizes, dtype)
    logits = jax.random.normal(jax.random.key(4), (sizes.num_tokens, sizes.num_experts))
    tile = min(TILE, max(1, sizes.pairs // sizes.num_experts))

    def routed(mode) -> Routing:
        options = {} if mode is None else {"token_rounding": mode, "rounding_tile": tile}
        return jax.jit(partial(route, experts_per_token=sizes.experts_per_token, **options))(logits)

    routings = {PLAIN: routed(None), **{f"rounded {mode}": routed(mode) for mode in ("nearest", "down")}}
    run = jax.jit(forward_and_backward(partial(expert_ffn, implementation=implementation)))
    calls = {
        name: partial(run, x, w_gate, w_up, w_down, routing.weights, routing.experts, x)
        for name, routing in routings.items()
    }
    timings = time_calls(calls, repeats=repeats)
    rows = {}
    for name, routing in routings.items():
        counts = routing.tokens_per_expert
        pairs, us = int(counts.sum()), timings[name].us
        rows[name] = {
            "us": us,
            "spread": timings[name].spread,
            "clock": timings[name].clock,
            "note": timings[name].note,
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


def print_rounding(record: dict[str, Any]) -> None:
    """The record as a table."""
    print(f"  forward+backward of the experts, tiles of {record['tile']} rows")
    header = f"  {'routing':18s} {'ms':>9s} {'spread':>7s} {'pairs':>9s} {'rows of tiles':>14s} {'TFLOP/s':>8s}"
    print(f"{header} {'speed-up':>8s}")
    for name, row in record["routings"].items():
        print(
            f"  {name:18s} {row['us'] / 1e3:9.3f} {row['spread']:7.1%} {row['pairs']:9d} {row['rows_of_tiles']:14d} "
            f"{row['tflops']:8.4g} {row['speedup']:8.3f}"
        )
    for note in dict.fromkeys(row["note"] for row in record["routings"].values() if row["note"]):
        print(f"  note: {note}")
