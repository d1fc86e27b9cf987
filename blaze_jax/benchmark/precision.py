"""Experts that multiply 8 bits next to those that multiply 16, pass by pass and kernel by kernel, with the bounds."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from blaze_jax.activations import get_activation
from blaze_jax.benchmark.back_to_back import take_turns
from blaze_jax.benchmark.compiling import compile_together
from blaze_jax.benchmark.memory import MIB, plan_of
from blaze_jax.benchmark.rates import DENSE, CeilingCalls, Ceilings, Work, kernel_work, work_of
from blaze_jax.benchmark.results import Record, head
from blaze_jax.benchmark.sizes import BOTH, FORWARD, PASSES, Sizes, expert_inputs, forward_and_backward
from blaze_jax.benchmark.timing import Call, KernelTotal, Timing, time_calls
from blaze_jax.casts import cast_experts
from blaze_jax.experts import expert_ffn
from blaze_jax.precision import fp8_everywhere, hidden_bound
from blaze_jax.quantized import WEIGHTS
from pallas_kernels.fp8 import E4M3, CastWeight

DENSE_FP8 = "dense matmul, fp8"
CAST_BEFORE = "fp8, weights cast before"
OTHERS = "of XLA"
"""All kernels that are not ours, together."""


def measure_precision(
    sizes: Sizes, dtype, *, repeats: int, turns: int, turn_seconds: float, implementation=None
) -> Record:
    """Times both passes of the experts with products of 8 bits and without, in turns, and their kernels.

    All sizes multiply 8 bits here, also those where `precision="fp8"` would not; once with weights cast before, which
    a step of several microbatches does once, and is not in their time.
    """
    inputs = expert_inputs(sizes, dtype)
    plain = partial(expert_ffn, implementation=implementation)
    in_8_bits = partial(plain, precision="fp8")
    with fp8_everywhere():
        config = sizes.config(precision="fp8", implementation=implementation)
        cast = jax.jit(partial(cast_experts, config=config))(dict(zip(WEIGHTS, inputs[1:4], strict=True)))
    casts = [replace(cast[name], weight=None) for name in WEIGHTS]
    layers = {jnp.dtype(dtype).name: (plain, []), "fp8": (in_8_bits, []), CAST_BEFORE: (in_8_bits, casts)}
    compiled = _compiled(layers, inputs)
    calls: dict[Any, Call] = {key: partial(program, *arguments) for key, (program, arguments) in compiled.items()}
    ceiling_calls = CeilingCalls(dtype)
    dense_fp8 = {DENSE_FP8: _dense_fp8(ceiling_calls.width)}
    timings: dict[Any, Timing] = time_calls(calls | ceiling_calls.calls | dense_fp8, repeats=repeats)
    runs: dict[Any, dict[str, Any]] = take_turns(
        calls | {DENSE: ceiling_calls.calls[DENSE]} | dense_fp8, turns=turns, seconds=turn_seconds
    )
    ceilings = ceiling_calls.rates(timings)
    fp8_ceilings = Ceilings(ceiling_calls.dense_tflops(timings[DENSE_FP8].us), ceilings.gbs)
    rows, by_kernel = {}, {}
    for name in layers:
        row = rows[name] = {}
        for phase, factor in PASSES.items():
            timed = ceilings.pass_record(timings[name, phase], factor * sizes.forward_flops)
            row[phase] = timed | {"sustained": runs[name, phase]}
        if (plan := plan_of(compiled[name, BOTH][0].memory_analysis())) is not None:
            row |= {"temporaries_mib": plan.temporaries / MIB, "peak_mib": plan.peak / MIB}
        in_fp8 = name.startswith("fp8")
        work = (fp8_work if in_fp8 else kernel_work)(sizes, jnp.dtype(dtype).itemsize)
        rates = ceilings, fp8_ceilings if in_fp8 else ceilings
        by_kernel[name] = {phase: _kernels(timings[name, phase].kernels, work, *rates) for phase in PASSES}
    dense = {
        "sustained_tflops": ceiling_calls.dense_tflops(runs[DENSE]["us"]),
        "fp8_tflops": fp8_ceilings.tflops,
        "sustained_fp8_tflops": ceiling_calls.dense_tflops(runs[DENSE_FP8]["us"]),
    }
    found = {"ceilings": ceilings._asdict() | dense, "layers": rows}
    if timings["fp8", BOTH].kernels:
        found["by_kernel"] = by_kernel
    return head("precision", sizes, dtype) | found


def _compiled(
    layers: Mapping[str, tuple[Callable, list[CastWeight]]], inputs: tuple
) -> dict[tuple[str, str], tuple[jax.stages.Compiled, tuple]]:
    """Each layer's passes with its casts of the weights, compiled side by side, and their arguments."""
    lowered, given = {}, {}
    for name, (layer, casts) in layers.items():
        for phase in PASSES:
            function = partial(_forward if phase == FORWARD else _both, layer)
            arguments = (casts, *inputs) if phase == FORWARD else (casts, *inputs, inputs[0])
            with fp8_everywhere():
                lowered[name, phase] = jax.jit(function).lower(*arguments)
            given[name, phase] = arguments
    return {key: (program, given[key]) for key, program in compile_together(lowered).items()}


def _forward(layer: Callable, casts: list[CastWeight], x: Array, *others: Array) -> Array:
    """The layer's output, with the weights, which are the first of the others, cast before if there are casts."""
    weights = (replace(cast, weight=weight) for cast, weight in zip(casts, others, strict=False))
    return layer(x, *weights, *others[len(casts) :])


def _both(layer: Callable, casts: list[CastWeight], *arguments: Array) -> tuple:
    """Both passes; the last argument is the gradient of the output."""
    return forward_and_backward(partial(_forward, layer, casts))(*arguments)


def _dense_fp8(width: int) -> Call:
    """The dense product of square matrices of 8 bits, the contracted axis last in both, as tensor cores ask."""
    factor = jax.random.normal(jax.random.key(1), (width, width), jnp.float32).astype(E4M3)

    @jax.jit
    def product(a, b):
        return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)

    return partial(product, factor, factor)


def fp8_work(sizes: Sizes, itemsize: int) -> dict[str, Work]:
    """`kernel_work` where rows and weights are read in 8 bits by the products of rows, and cast to them once a pass."""
    tokens, d, n, experts, slots = sizes
    pairs = tokens * slots
    matrix, token, narrow, wide = experts * d * n, tokens * d, pairs * n, pairs * d
    bounded = hidden_bound(get_activation("swiglu"), d, "pre_activations", adapted=False) is not None
    hidden = narrow if bounded else narrow * itemsize  # bytes of the activation as the up projection writes it
    work = kernel_work(sizes, itemsize)
    bytes_of = {
        "moe_up_projection": token + 2 * matrix + 2 * narrow * itemsize + hidden,
        "moe_down_projection": narrow + matrix + wide * itemsize,
        "moe_down_backward": token + matrix + 5 * narrow * itemsize,
        "moe_up_backward": 2 * narrow + 2 * matrix + wide * itemsize,
    }
    work |= {name: Work(work[name].flops, float(num_bytes)) for name, num_bytes in bytes_of.items()}
    # tokens and their gradients, the pre-activations' gradients, and the activation; weights in both orientations
    cast = 2 * token + (2 if bounded else 3) * narrow + 3 * matrix
    work["moe_quantize"] = Work(0.0, cast * (itemsize + 1.0))
    work["moe_quantize_columns"] = Work(0.0, 3 * matrix * (itemsize + 1.0))
    return work


_IN_8_BITS = ("moe_up_projection", "moe_down_projection", "moe_down_backward", "moe_up_backward")


def _kernels(
    kernels: Mapping[str, KernelTotal], table: dict[str, Work], ceilings: Ceilings, of_rows: Ceilings
) -> dict[str, dict[str, Any]]:
    """Microseconds by the name of a kernel in the table, all others together, with what each must take at least."""
    found: dict[str, dict[str, Any]] = {}
    for name, total in kernels.items():
        ours = [known for known in table if known in name]
        known = max(ours, key=len, default=OTHERS)
        row = found.setdefault(known, {"launches": 0.0, "us": 0.0})
        row["launches"] += total.launches
        row["us"] += total.us
        if (work := work_of(name, table)) is not None:
            rates = of_rows if known in _IN_8_BITS else ceilings
            row["least_us"], row["bound"] = rates.least_us(*work)
    return dict(sorted(found.items(), key=lambda item: -item[1]["us"]))
