"""Studies of one layer: its kernels, many tokens, token rounding, routing, and the time to compile models of it.

Each function measures one case and returns its record, which goes into the results file and is shown by `tables`.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from blaze_jax.benchmark.inputs import BOTH, FORWARD, PASSES, abstract_inputs, expert_inputs, forward_and_backward
from blaze_jax.benchmark.memory import MIB, plan_of, saved_bytes
from blaze_jax.benchmark.own_process import run_apart
from blaze_jax.benchmark.rates import DENSE, CeilingCalls, kernel_records
from blaze_jax.benchmark.results import Record
from blaze_jax.benchmark.sizes import Routed, Sizes
from blaze_jax.benchmark.timing import Call, sustain, time_calls, wall_times
from blaze_jax.config import MoEConfig
from blaze_jax.dispatch import Grouped, group_by_expert
from blaze_jax.experts import compute_experts, expert_ffn
from blaze_jax.implementation import choose_implementation, kernels_of
from blaze_jax.layer import moe
from blaze_jax.router import Router
from blaze_jax.routing import Routing, route, route_and_group
from pallas_kernels.compile_only import absent, kernel_hashes, on_gpu
from pallas_kernels.mosaic.device import on_nvidia_gpu

ONE_EXPERT = "one expert"
TILE = 128
LAYERS = (1, 3, 24)
"""Layers of the models that are compiled: they stand one after the other, as a Python loop has them."""


def head(kind: str, sizes: Sizes, dtype) -> Record:
    """The beginning of every record of a layer."""
    return {"kind": kind, "sizes": sizes._asdict(), "dtype": jnp.dtype(dtype).name}


def measure_kernels(sizes: Sizes, dtype, *, repeats: int, implementation=None) -> Record:
    """Times both passes of our layer and each of their kernels, alone and back to back, next to this device's rates."""
    inputs = expert_inputs(sizes, dtype)
    layer = partial(expert_ffn, implementation=implementation)
    ceiling_calls = CeilingCalls(dtype)
    passes = {
        FORWARD: partial(jax.jit(layer), *inputs),
        BOTH: partial(jax.jit(forward_and_backward(layer)), *inputs, inputs[0]),
    }
    one_expert, one_expert_flops = product_of_one_expert(dtype, implementation)
    timings = time_calls(passes | ceiling_calls.calls | {ONE_EXPERT: one_expert}, repeats=repeats)
    ceilings = ceiling_calls.rates(timings)
    seconds = 1.0 if jax.default_backend() == "gpu" else 0.1
    rows = {}
    for name, call in passes.items():
        flops, run = PASSES[name] * sizes.forward_flops, sustain(call, seconds=seconds, warm_seconds=0.3 * seconds)
        rows[name] = ceilings.pass_record(timings[name], flops)
        rows[name]["sustained"] = run._asdict() | {"tflops": flops / run.us / 1e6}
    ceiling_run = partial(sustain, seconds=0.5 * seconds, warm_seconds=0.3 * seconds)
    return head("kernels", sizes, dtype) | {
        "ceilings": ceilings._asdict()
        | {
            "sustained_tflops": ceiling_calls.dense_tflops(ceiling_run(ceiling_calls.calls[DENSE]).us),
            "one_expert_tflops": one_expert_flops / timings[ONE_EXPERT].us / 1e6,
            "sustained_one_expert_tflops": one_expert_flops / ceiling_run(one_expert).us / 1e6,
        },
        "passes": rows,
        "kernels": kernel_records(timings[BOTH].kernels, sizes, jnp.dtype(dtype).itemsize, ceilings),
    }


def product_of_one_expert(dtype, implementation) -> tuple[Call, float]:
    """The down projection of a single expert, a dense product, which these kernels reach at most; and its FLOPs.

    Its factors are random and it takes as long as a pass: a GPU at its power limit multiplies equal numbers faster, and
    in its first milliseconds.
    """
    rows, n, d = (65536, 4096, 4096) if jax.default_backend() == "gpu" else (16, 8, 8)
    w_down = (jax.random.normal(jax.random.key(3), (1, n, d), jnp.float32) * n**-0.5).astype(dtype)
    kernels = kernels_of(choose_implementation(implementation, w_down[0], (w_down,), ()), dtype=dtype)
    groups = group_by_expert(kernels, jnp.zeros((rows, 1), jnp.int32), 1)
    hidden = jax.random.normal(jax.random.key(2), (groups.num_rows, n), jnp.float32).astype(dtype)
    product = jax.jit(kernels.down_projection, static_argnums=(4, 5))
    return partial(product, hidden, w_down, None, groups, 0, d), 2.0 * rows * n * d


def measure_scaling(sizes: Sizes, dtype, *, repeats: int, implementation=None) -> Record:
    """Times forward+backward at one number of tokens, and tells its memory."""
    layer = partial(expert_ffn, implementation=implementation)
    inputs = expert_inputs(sizes, dtype)
    arguments = (*inputs, inputs[0])
    compiled = jax.jit(forward_and_backward(layer)).lower(*arguments).compile()
    plan = plan_of(compiled.memory_analysis())
    saved = saved_bytes(layer, *abstract_inputs(sizes, dtype))
    timing = time_calls({"ours": partial(compiled, *arguments)}, repeats=repeats)["ours"]
    record = head("scaling", sizes, dtype) | {
        **timing.record(),
        "tflops": 3 * sizes.forward_flops / timing.us / 1e6,
        "ns_per_token": timing.us * 1e3 / sizes.num_tokens,
        "saved_mib": saved / MIB,
        "saved_bytes_per_token": saved / sizes.num_tokens,
    }
    if plan is not None:
        weights = sizes.weight_elements * jnp.dtype(dtype).itemsize  # whose gradients are part of the peak, no token's
        record |= {"peak_mib": plan.peak / MIB, "peak_bytes_per_token": (plan.peak - weights) / sizes.num_tokens}
    return record


def measure_rounding(sizes: Sizes, dtype, *, repeats: int, implementation=None) -> Record:
    """Times forward+backward of the experts with plain top-k and with whole tiles, without and with the router."""
    x, *weights, _, _ = expert_inputs(sizes, dtype)
    logits = jax.random.normal(jax.random.key(4), (sizes.num_tokens, sizes.num_experts))
    tile = min(TILE, max(1, sizes.pairs // sizes.num_experts))
    options = {"experts_per_token": sizes.experts_per_token, "implementation": implementation}
    settings = {"activation": "swiglu", "save": "pre_activations", "implementation": implementation}

    def alone(grouped: Grouped | None, routing: Routing, x, *weights):
        def layer(x, w_gate, w_up, w_down, *routed):
            params = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down}
            return compute_experts(x, params, *routed, grouped=grouped, **settings)

        return forward_and_backward(layer)(x, *weights, routing.weights, routing.experts, x)

    def routed(router: Router, logits, *arrays):
        routing, grouped = route_and_group(logits, router=router, **options)
        return alone(grouped, routing, *arrays)

    ungrouped = jax.jit(partial(alone, None))

    rounded = {f"rounded {mode}": Router(token_rounding=mode, rounding_tile=tile) for mode in ("nearest", "down")}
    calls, counts = {}, {}
    for name, router in ({"top-k": Router()} | rounded).items():
        routing = jax.jit(partial(route, router=router, **options))(logits)
        counts[name] = routing.tokens_per_expert
        calls[name] = partial(ungrouped, routing, x, *weights)
        calls[f"{name}, routed"] = partial(jax.jit(partial(routed, router)), logits, x, *weights)
    timings = time_calls(calls, repeats=repeats)
    rows = {}
    for name, count in counts.items():
        own, with_router, pairs = timings[name], timings[f"{name}, routed"].us, int(count.sum())
        rows[name] = {
            **own.record(),
            "us_with_router": with_router,
            "speedup_with_router": timings["top-k, routed"].us / with_router,
            "us_by_kernel": {kernel: total.us for kernel, total in own.kernels.items()},
            "pairs": pairs,
            "rows_of_tiles": int((-(-count // tile) * tile).sum()),
            "tflops": 18 * pairs * sizes.model_width * sizes.expert_width / own.us / 1e6,
            "speedup": timings["top-k"].us / own.us,
        }
    return head("token_rounding", sizes, dtype) | {"tile": tile, "routings": rows}


OURS, XLA = "blaze_jax route + dispatch", "XLA top_k + argsort dispatch"

DECIDERS: dict[str, dict[str, Any]] = {
    "capacity factor 1": {"capacity_factor": 1.0},
    "rounded to nearest": {"token_rounding": "nearest"},
    "rounded down": {"token_rounding": "down"},
}
"""Other deciders of which tokens an expert takes, each timed as `OURS` with it; index arrays are then built anew."""


def measure_routing(sizes: Routed, dtype=None, *, repeats: int, implementation=None) -> Record:
    """Times the ways from logits to the experts' index arrays, ours and XLA's, and their parts.

    A separate call costs what the host needs to launch it, which hides the kernels' time; in a step that time counts.
    """
    tokens, num_experts, slots = sizes
    logits = jax.random.normal(jax.random.key(0), (tokens, num_experts))
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
    timings, walls = time_calls(calls, repeats=repeats), wall_times(calls, repeats=repeats)
    rows = {name: {**t.record(), "kernels": len(t.kernels), "wall_us": walls[name].us} for name, t in timings.items()}
    speedup = timings[XLA].us / timings[OURS].us
    return {"kind": "routing", **sizes._asdict(), "implementation": implementation, "calls": rows, "speedup": speedup}


def xla_route(logits, slots: int):
    """Top-k and its softmax, as one would write them: experts and weights."""
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), slots)
    return experts, weights / weights.sum(-1, keepdims=True)


def sorted_dispatch(experts, num_experts: int):
    """Token ids by expert, where each expert's start, and where each pair went, by two sorts and a count."""
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(jnp.bincount(flat, length=num_experts))])
    return order // experts.shape[1], offsets, jnp.argsort(order).reshape(experts.shape)


def measure_compile_time(sizes: Sizes, dtype) -> Record:
    """Times tracing, lowering and compiling the gradient of models of `LAYERS` layers for an absent H200.

    Wall time, and CPU time of the process and of the assemblers that it starts. Each model has a process of its own,
    where jax and the compiler have started but nothing is compiled that could serve it.

    Raises:
      NotImplementedError: jax's CUDA plugin is not installed, or the kernels cannot do these sizes.
    """
    absent()  # complains here and not in another process
    models = [run_apart(compiled_model, sizes, jnp.dtype(dtype).name, layers) for layers in LAYERS]
    return head("compile_time", sizes, dtype) | {"target": "h200", "models": models}


def compiled_model(sizes: Sizes, dtype, layers: int) -> dict[str, Any]:
    """Seconds by stage for forward and backward of `x + moe(x)`, so many times, and the kernels of the program."""
    jax.config.update("jax_enable_compilation_cache", False)
    array = jax.ShapeDtypeStruct
    jax.jit(jnp.negative).lower(on_gpu(array((1,), dtype))).compile()
    config = MoEConfig(**sizes.config_fields(), implementation="mosaic_gpu")
    parameters = {name: array(p.shape, dtype) for name, p in config.parameters(sizes.model_width).items()}
    tokens = array((sizes.num_tokens, sizes.model_width), dtype)

    def model(x, all_parameters):
        for own in all_parameters:
            x = x + moe(x, own, config)[0]
        return x

    times: dict[str, float] = {}

    def timed(stage: str, run: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), sum(os.times()[:4])
        out = run()
        times[f"{stage}_s"], times[f"{stage}_cpu_s"] = time.perf_counter() - wall, sum(os.times()[:4]) - cpu
        return out

    step, arguments = jax.jit(forward_and_backward(model)), on_gpu((tokens, [parameters] * layers, tokens))
    lowered = timed("lower", timed("trace", lambda: step.trace(*arguments)).lower)
    kernels = kernel_hashes(lowered)
    timed("compile", lowered.compile)
    return {"layers": layers, "kernels": len(kernels), "different_kernels": len(set(kernels)), **times}
