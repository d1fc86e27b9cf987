"""Times the parts of a training step on a GPU, and what each could reach: `python -m train_example.profile_step`.

Nothing is saved but what `--json` and `--plot` name.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import jax

from blaze_jax.benchmark.rates import CeilingCalls, Ceilings
from blaze_jax.benchmark.results import ResultsFile, command_line, describe, environment
from blaze_jax.benchmark.tables import terminal
from blaze_jax.benchmark.timing import Kernel, TraceError, time_calls, trace
from train_example.config import ExpertsLayer, TrainConfig, UserError
from train_example.program.arguments import whole
from train_example.program.devices import allow_all_memory
from train_example.program.measured import Run, configuration, options_parser
from train_example.program.step_parts import by_part, memory_floor, parts_of_instructions, step_work

_WARM_STEPS, _TIMED_STEPS = 3, 30
"""Steps before a measurement, and those that are timed."""

_WITHOUT_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
"""The profiler does not say which instruction the kernels of a CUDA graph come from."""


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = options_parser("train_example.profile_step", __doc__)
    add = parser.add_argument
    layers = [layer for layer in get_args(ExpertsLayer) if layer != "dense-twin"]  # whose parts are not told apart
    add("--experts-layer", choices=layers, default="blaze_jax", help="what computes the experts")
    add("--traced", type=whole(1), default=5, metavar="STEPS", help="steps under the profiler (5)")
    add(
        "--after",
        type=whole(0),
        default=0,
        metavar="STEPS",
        help="train so many steps first (0): the router of an untrained model gives its experts uneven work",
    )
    add("--json", type=Path, metavar="FILE", help="write the result")
    add("--plot", type=Path, metavar="FILE", help="draw it as a PNG file")
    arguments = parser.parse_args(argv)
    allow_all_memory()
    try:
        file = ResultsFile(arguments.json, environment(), command_line("train_example.profile_step", argv))
        print(describe(file.content["environment"]), flush=True)
        file.add(measure(configuration(arguments, arguments.experts_layer), arguments.traced, arguments.after))
    except (UserError, TraceError, NotImplementedError, ValueError) as error:
        print(f"profile_step: {error}", file=sys.stderr)
        return 2
    print(terminal(file.content["records"][0]))
    if arguments.plot is not None:
        from blaze_jax.benchmark.plots import draw_one  # needs matplotlib

        draw_one(file.content, arguments.plot)
    return 0


def on_gpu() -> bool:
    """Whether there is one, of any make."""
    return jax.default_backend() == "gpu"


def measure(config: TrainConfig, traced: int, after: int = 0) -> dict[str, Any]:
    """The record of a configuration, from `traced` steps that follow `after` others.

    Raises:
      TraceError: there is no GPU to trace.
    """
    if not on_gpu():
        raise TraceError(f"there is no GPU to trace, the device here is {jax.devices()[0].device_kind}")
    calls = CeilingCalls(config.dtype)
    ceilings = calls.rates(time_calls(calls.calls, repeats=10))
    del calls
    run = Run(config)
    batch = jax.device_put(run.batch(0))

    def steps(program: jax.stages.Compiled, number: int) -> None:
        metrics = None
        for _ in range(number):
            run.state, metrics = program(run.state, batch)
        jax.block_until_ready((run.state, metrics))

    compiled = run.compile()
    for number in range(after):
        batch = jax.device_put(run.batch(number))
        steps(compiled, 1)
    steps(compiled, _WARM_STEPS)
    start = time.perf_counter()
    steps(compiled, _TIMED_STEPS)
    wall_ms = (time.perf_counter() - start) / _TIMED_STEPS * 1e3
    record = run.record(compiled)
    profiled = run.compile(**_WITHOUT_GRAPHS)
    steps(profiled, _WARM_STEPS)
    kernels = trace(lambda: steps(profiled, traced))
    sizes = {name: getattr(config, name) for name in ("preset", "batch_size", "sequence_length", "accumulate")}
    record |= {"kind": "step_profile", **sizes, "after": after, "wall_ms": wall_ms}
    record["floor_gib"] = {name: size / 2**30 for name, size in memory_floor(config, run.parameters).items()}
    record["tokens_per_second"] = config.batch_size * config.sequence_length / wall_ms * 1e3
    program = parts_of_instructions(profiled.as_text() or "")
    return record | profile_record(kernels, traced, program, config, run.parameters, ceilings)


def profile_record(
    kernels: Sequence[Kernel],
    steps: int,
    program: Mapping[str, str | None],
    config: TrainConfig,
    parameters: int,
    ceilings: Ceilings,
) -> dict[str, Any]:
    """Milliseconds of a step, part by part, and their bounds, from the kernels of several equal steps."""
    work, rows = step_work(config, parameters), by_part(kernels, program, steps)
    for row in rows:
        least: dict[str, float] = defaultdict(float)
        for us, bound in (ceilings.least_us(*one) for one in work.get(row["part"], [])):
            least[bound] += us / 1e3
        row |= {"bound_ms": sum(least.values()), "bound": max(least, key=least.__getitem__, default=None)}
    step_ms = (max(k.end_ns for k in kernels) - min(k.start_ns for k in kernels)) / steps / 1e6
    busy = sum(row["ms"] for row in rows)
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


if __name__ == "__main__":
    sys.exit(main())
