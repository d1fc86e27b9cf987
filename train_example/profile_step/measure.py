"""A few training steps under the profiler, as a record of their parts."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from blaze_jax.benchmark.ceilings import CeilingCalls, Ceilings
from blaze_jax.benchmark.device_trace import Kernel, TraceError, trace
from blaze_jax.benchmark.plan import plan_of
from blaze_jax.benchmark.timing import time_calls
from train_example.compile_step import jit_once, lower_step, xla_options
from train_example.config import TrainConfig
from train_example.data import Corpus, open_text
from train_example.loop import microbatches, peak_memory_gib
from train_example.profile_step.bounds import step_work
from train_example.profile_step.memory_floor import memory_floor
from train_example.profile_step.parts import by_part
from train_example.profile_step.program import Instruction, instructions
from train_example.program.setup import make_model
from train_example.step import init_state

_WARM_STEPS, _TIMED_STEPS = 3, 30
_WITHOUT_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
"""The profiler does not say which instruction the kernels of a CUDA graph come from."""


def on_gpu() -> bool:
    """Whether there is one, of any make."""
    return jax.default_backend() == "gpu"


def measure(config: TrainConfig, traced: int) -> dict[str, Any]:
    """The record of a configuration, from `traced` steps.

    Raises:
      TraceError: there is no GPU to trace.
    """
    if not on_gpu():
        raise TraceError(f"there is no GPU to trace, the device here is {jax.devices()[0].device_kind}")
    calls = CeilingCalls(config.dtype)
    ceilings = calls.rates(time_calls(calls.calls, repeats=10))
    del calls
    model = make_model(config)
    corpus = Corpus(open_text(config.data), config.sequence_length)
    state = jit_once(lambda: init_state(config, model))()
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    batch = jax.device_put(microbatches(config, corpus.batch(config.seed, 0, config.batch_size)))
    start = time.perf_counter()
    compiled = lower_step(config, model, state, batch).compile(xla_options(config))
    compile_seconds = time.perf_counter() - start

    def run(program: jax.stages.Compiled, steps: int) -> None:
        nonlocal state
        metrics = None
        for _ in range(steps):
            state, metrics = program(state, batch)
        jax.block_until_ready((state, metrics))

    run(compiled, _WARM_STEPS)
    start = time.perf_counter()
    run(compiled, _TIMED_STEPS)
    wall_ms = (time.perf_counter() - start) / _TIMED_STEPS * 1e3
    peak = peak_memory_gib()
    profiled = lower_step(config, model, state, batch).compile(xla_options(config) | _WITHOUT_GRAPHS)
    run(profiled, _WARM_STEPS)
    kernels = trace(lambda: run(profiled, traced))
    plan = plan_of(compiled.memory_analysis())
    return {
        "kind": "step_profile",
        "preset": config.preset,
        "batch_size": config.batch_size,
        "sequence_length": config.sequence_length,
        "accumulate": config.accumulate,
        "remat": config.remat,
        "parameters": parameters,
        "compile_seconds": compile_seconds,
        "peak_gib": peak,
        "planned_gib": None if plan is None else plan.total / 2**30,
        "floor_gib": {name: size / 2**30 for name, size in memory_floor(config, parameters).items()},
        "wall_ms": wall_ms,
        "tokens_per_second": config.batch_size * config.sequence_length / wall_ms * 1e3,
    } | profile_record(kernels, traced, instructions(profiled.as_text() or ""), config, parameters, ceilings)


def profile_record(
    kernels: Sequence[Kernel],
    steps: int,
    program: Mapping[str, Instruction],
    config: TrainConfig,
    parameters: int,
    ceilings: Ceilings,
) -> dict[str, Any]:
    """Milliseconds of a step, part by part, and their bounds, from the kernels of several equal steps."""
    work = step_work(config, parameters)
    rows = []
    for name, part in by_part(kernels, program).items():
        least = [ceilings.least_us(*one) for one in work.get(name, [])]
        by_bound = {bound: sum(us for us, other in least if other == bound) for _, bound in least}
        rows.append(
            {
                "part": name,
                "ms": part.ns / steps / 1e6,
                "launches": part.launches / steps,
                "bound_ms": sum(by_bound.values()) / 1e3,
                "bound": max(by_bound, key=by_bound.__getitem__, default=None),
                "kernels": [{"name": kernel, "ms": ns / steps / 1e6} for kernel, ns in part.kernels.items() if ns],
            }
        )
    span = max(k.end_ns for k in kernels) - min(k.start_ns for k in kernels)
    busy = sum(row["ms"] for row in rows)
    step_ms = span / steps / 1e6
    flops = sum(one.flops for works in work.values() for one in works)
    return {
        "steps": steps,
        "step_ms": step_ms,
        "device_ms": busy,
        "gaps_ms": step_ms - busy,
        "bound_ms": sum(row["bound_ms"] for row in rows),
        "model_tflop": flops / 1e12,
        "ceilings": ceilings._asdict(),
        "parts": sorted(rows, key=lambda row: -row["ms"]),
    }
