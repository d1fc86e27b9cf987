"""Studies of one layer: many and few tokens, token rounding, routing, compile time and a checkpoint's reader.

A study is a function that measures one case and returns its record, which goes into the results file and is shown by
`tables` and `plots`. Those of the layer's kernels, its peers and several devices have files of their own.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from blaze_jax.benchmark.memory import MIB, plan_of, saved_bytes
from blaze_jax.benchmark.own_process import run_apart
from blaze_jax.benchmark.rates import CeilingCalls
from blaze_jax.benchmark.results import Record, head
from blaze_jax.benchmark.sizes import Sizes, abstract_inputs, expert_inputs, forward_and_backward
from blaze_jax.benchmark.timing import in_turns, time_calls, wall_times
from blaze_jax.checkpoints.loading import load
from blaze_jax.checkpoints.writing import NewTensor, write_tensors
from blaze_jax.dispatch import Grouped
from blaze_jax.experts import compute_experts, expert_ffn
from blaze_jax.implementation import kernels_of
from blaze_jax.layer import moe
from blaze_jax.quantized import decoded, quantize_experts
from blaze_jax.router import Router
from blaze_jax.routing import Routing, route, route_and_group
from pallas_kernels.codings import CODINGS
from pallas_kernels.compile_only import absent, kernel_hashes, on_gpu
from pallas_kernels.mosaic.device import on_nvidia_gpu

TILE = 128
LAYERS = (1, 3, 24)
"""Layers of the models that are compiled: they stand one after the other, as a Python loop has them."""


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


def measure_few_tokens(sizes: Sizes, dtype, *, repeats: int, implementation=None) -> Record:
    """Times the layer with its router on few tokens, forward, next to a copy of the experts' weights that they use."""
    x, *weights, _, _ = expert_inputs(sizes, dtype)
    w_router = jax.random.normal(jax.random.key(1), (sizes.model_width, sizes.num_experts), dtype)
    params = {"w_router": w_router} | dict(zip(("w_gate", "w_up", "w_down"), weights, strict=True))
    layer = partial(moe, config=sizes.config(implementation=implementation))
    used = int((jax.jit(layer)(x, params)[1].tokens_per_expert > 0).sum())
    forward = jax.jit(lambda x, params: layer(x, params)[0])  # without the losses of the routing
    num_bytes = used * sizes.weight_elements // sizes.num_experts * jnp.dtype(dtype).itemsize
    ceilings = CeilingCalls(dtype)
    timings = time_calls({"layer": partial(forward, x, params)} | ceilings.calls, repeats=repeats)
    timing, floor = timings["layer"], ceilings.rates(timings).least_us(0.0, num_bytes)[0]
    return head("few_tokens", sizes, dtype) | {
        **timing.record(),
        "experts_used": used,
        "bytes": num_bytes,
        "floor_us": floor,
        "times_floor": timing.us / floor,
        "us_by_kernel": {kernel: total.us for kernel, total in timing.kernels.items()},
    }


DECODED_BEFORE = "nf4, decoded before"


def measure_bases(sizes: Sizes, dtype, *, repeats: int, implementation=None) -> Record:
    """Times frozen experts on compressed weights, and on their numbers: forward, and with the gradient of tokens."""
    x, *weights, of_slots, experts = expert_inputs(sizes, dtype)
    plain = dict(zip(("w_gate", "w_up", "w_down"), weights, strict=True))
    options = {"activation": "swiglu", "save": "pre_activations", "implementation": implementation, "frozen": True}

    def forward(base, x):
        return compute_experts(x, base, of_slots, experts, **options)

    def both(base, x):
        y, vjp = jax.vjp(partial(forward, base), x)
        return y, vjp(y)

    def before(pass_, base, x):
        return pass_(decoded(base, x.dtype), x)

    bases = {jnp.dtype(dtype).name: plain} | {
        form: jax.jit(quantize_experts, static_argnums=1)(plain, form) for form in CODINGS
    }
    passes = {"forward": forward, "both": both}
    calls = {(name, p): partial(jax.jit(run), base, x) for name, base in bases.items() for p, run in passes.items()}
    calls |= {(DECODED_BEFORE, p): partial(jax.jit(partial(before, run)), bases["nf4"], x) for p, run in passes.items()}
    timings = time_calls({" ".join(key): call for key, call in calls.items()}, repeats=repeats)
    rows = {}
    for name in (*bases, DECODED_BEFORE):
        arrays = jax.tree.leaves(bases[name if name in bases else "nf4"])
        own = {p: timings[f"{name} {p}"] for p in passes}
        rows[name] = {
            "bytes": sum(array.nbytes for array in arrays),
            **{f"{p}_us": timing.us for p, timing in own.items()},
            "us_by_kernel": {kernel: total.us for kernel, total in own["both"].kernels.items()},
        }
    plain_row = rows[jnp.dtype(dtype).name]
    for row in rows.values():
        row |= {f"{p}_of_plain": row[f"{p}_us"] / plain_row[f"{p}_us"] for p in passes}
    return head("bases", sizes, dtype) | {"clock": timings["nf4 forward"].clock, "bases": rows}


class Routed(NamedTuple):
    """T tokens, E experts, K experts per token, of which a router knows."""

    num_tokens: int
    num_experts: int
    experts_per_token: int

    def __str__(self) -> str:
        return "T={}, E={}, K={}".format(*self)


OUR_ROUTING, XLA_ROUTING = "blaze_jax route + dispatch", "XLA top_k + argsort dispatch"

DECIDERS: dict[str, dict[str, Any]] = {
    "capacity factor 1": {"capacity_factor": 1.0},
    "rounded to nearest": {"token_rounding": "nearest"},
    "rounded down": {"token_rounding": "down"},
}
"""Other deciders of which tokens an expert takes, each timed as `OUR_ROUTING` with it; index arrays are then new."""


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

    def xla_route(logits):
        weights, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), slots)
        return experts, weights / weights.sum(-1, keepdims=True)

    def sorted_dispatch(experts):
        """Token ids by expert, where each expert's start, and where each pair went, by two sorts and a count."""
        flat = experts.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(jnp.bincount(flat, length=num_experts))])
        return order // slots, offsets, jnp.argsort(order).reshape(experts.shape)

    def xla(logits):
        experts, weights = xla_route(logits)
        return experts, weights, sorted_dispatch(experts)

    experts = jax.jit(ours_route)(logits)[0]
    functions = {OUR_ROUTING: (ours, logits), XLA_ROUTING: (xla, logits)}
    functions |= {name: (partial(ours, **options), logits) for name, options in DECIDERS.items()}
    functions |= {"route": (ours_route, logits), "dispatch": (dispatch, experts)}
    functions |= {"XLA top_k": (xla_route, logits), "XLA argsort dispatch": (sorted_dispatch, experts)}
    calls = {name: partial(jax.jit(function), argument) for name, (function, argument) in functions.items()}
    timings, walls = time_calls(calls, repeats=repeats), wall_times(calls, repeats=repeats)
    rows = {name: {**t.record(), "kernels": len(t.kernels), "wall_us": walls[name].us} for name, t in timings.items()}
    speedup = timings[XLA_ROUTING].us / timings[OUR_ROUTING].us
    return {"kind": "routing", **sizes._asdict(), "implementation": implementation, "calls": rows, "speedup": speedup}


def measure_compile_time(sizes: Sizes, dtype) -> Record:
    """Times tracing, lowering and compiling the gradient of models of several layers for an absent H200.

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
    config = sizes.config(implementation="mosaic_gpu")
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


def measure_reading(sizes: Sizes, dtype=None, *, repeats: int, folder: str | None = None) -> Record:
    """Times how fast a layer of a public checkpoint is read, in turns with its bare file.

    The file is written in bfloat16 into `folder`, or a temporary one, and removed again. `checkpoints.load` makes
    arrays of jax of it, the other reader bytes in memory. Both read what the operating system has cached, unless the
    file is larger than its cache, so that a disk cannot hide what the reader costs.
    """
    config = sizes.config()
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = write_layer(Path(place), sizes)
        calls = {"file": lambda: np.fromfile(path, np.uint8), "layer": lambda: load(path.parent, 0, config).params}
        seconds, size = in_turns(calls, repeats), path.stat().st_size
    share = statistics.median(seconds["file"]) / statistics.median(seconds["layer"])
    return {"kind": "reading", "sizes": sizes._asdict(), "bytes": size, "seconds": seconds, "share_of_file": share}


def write_layer(folder: Path, sizes: Sizes) -> Path:
    """Writes a layer of random bits as Qwen3-MoE has it."""
    prefix, width, n, experts = "model.layers.0.mlp.", sizes.model_width, sizes.expert_width, sizes.num_experts
    shapes = {"gate_proj": (n, width), "up_proj": (n, width), "down_proj": (width, n)}
    dtype = np.dtype(jnp.bfloat16)
    numbers = np.random.default_rng(0).integers(0, 2**15, n * width, np.uint16).view(dtype)
    router = NewTensor(f"{prefix}gate.weight", "BF16", (experts, width), lambda: [np.zeros((experts, width), dtype)])
    tensors = [
        NewTensor(f"{prefix}experts.{expert}.{name}.weight", "BF16", shape, lambda: [numbers])
        for expert in range(experts)
        for name, shape in shapes.items()
    ]
    return write_tensors(folder, [*tensors, router])[0]
