"""`python -m blaze_jax.benchmark`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from blaze_jax.benchmark import sizes as known
from blaze_jax.benchmark.arguments import parse_arguments
from blaze_jax.benchmark.compare import compare, print_comparison
from blaze_jax.benchmark.compile_only import measure_memory, print_memory
from blaze_jax.benchmark.compile_time import measure_compile_time, print_compile_time
from blaze_jax.benchmark.environment import describe, environment
from blaze_jax.benchmark.kernels import measure_kernels, print_kernels
from blaze_jax.benchmark.plots import MissingLibraryError, draw
from blaze_jax.benchmark.results_file import Record, ResultsFile, read_results
from blaze_jax.benchmark.rounding import measure_rounding, print_rounding
from blaze_jax.benchmark.routing import measure_routing, print_routing
from blaze_jax.benchmark.scaling import measure_scaling_point, print_flatness, print_scaling_point
from blaze_jax.progress import Bar, counted
from pallas_kernels.compile_only import missing_for_h200


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    arguments = parse_arguments(argv)
    try:
        recorded = [read_results(path) for path in arguments.recorded or ()]
        results = recorded or [_measure(arguments)]
        if arguments.plot is not None:
            for file in draw(results, arguments.plot):
                print(f"drew {file}")
    except (ValueError, NotImplementedError, MissingLibraryError) as error:
        print(f"python -m blaze_jax.benchmark: {error}", file=sys.stderr)
        return 2
    return 0


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    target = arguments.compile_only or arguments.compile_time
    if target and (reason := missing_for_h200()):
        mode = "--compile-only" if arguments.compile_only else "--compile-time"
        raise NotImplementedError(f"{mode} {target} cannot run: {reason}")
    values = environment()
    if target:
        values["device"] = f"{values['device']}, compiled for {target}"
    file = ResultsFile(arguments.json, values)
    print(describe(file.environment))
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and not target:
        print(
            f"no GPU here but {jax.default_backend()}: wall time, and small sizes unless --config or --preset says so"
        )
    dtype = jnp.dtype(arguments.dtype or ("bfloat16" if on_gpu or target else "float32"))
    items, measure, show = _plan(arguments, dtype, on_gpu)
    for item, bar in counted(items):
        file.add(measure(item, bar))
        with bar.hidden():
            if isinstance(item, known.Sizes) and not arguments.scaling:
                print(f"{item}, {dtype.name}")
            show(file.records[-1])
            sys.stdout.flush()
    if arguments.scaling:
        print_flatness(file.records)
    return file.content


def _plan(
    arguments, dtype, on_gpu: bool
) -> tuple[Sequence[Any], Callable[[Any, Bar], Record], Callable[[Record], None]]:
    """The items to measure, how to measure one, and how to print it."""
    common = {"repeats": arguments.repeats, "implementation": arguments.implementation}
    chosen = [*arguments.config, *(known.preset(name, arguments.tokens) for name in arguments.preset)]
    if arguments.routing:
        items = known.ROUTING_SIZES if on_gpu else known.CPU_ROUTING_SIZES
        return items, lambda item, bar: measure_routing(*item, **common), print_routing
    if arguments.scaling:
        items = known.SCALING_SIZES if on_gpu else known.CPU_SCALING_SIZES
        return items, _said(partial(measure_scaling_point, dtype=dtype, **common)), print_scaling_point
    if arguments.token_rounding:
        items = chosen or [known.ROUNDING_SIZES if on_gpu else known.CPU_ROUNDING_SIZES]
        return items, _said(partial(measure_rounding, dtype=dtype, **common)), print_rounding
    if arguments.compile_time:
        return chosen or known.GPU_SIZES[:1], _said(partial(measure_compile_time, dtype=dtype)), print_compile_time
    items = chosen or (known.GPU_SIZES if on_gpu or arguments.compile_only else known.CPU_SIZES)
    if arguments.compile_only:
        return items, _said(partial(measure_memory, dtype=dtype, peers=arguments.peers)), print_memory
    if arguments.kernels:
        return items, _said(partial(measure_kernels, dtype=dtype, **common)), print_kernels
    of_layers = {"peers": arguments.peers, "same_experts": arguments.same_experts}
    run = partial(compare, dtype=dtype, limit_seconds=arguments.limit_seconds, **of_layers, **common)
    return items, lambda item, bar: run(item, progress=bar.say), print_comparison


def _said(measure: Callable[..., Record]) -> Callable[[Any, Bar], Record]:
    def run(item, bar: Bar) -> Record:
        bar.say(str(item))
        return measure(item)

    return run


if __name__ == "__main__":
    sys.exit(main())
