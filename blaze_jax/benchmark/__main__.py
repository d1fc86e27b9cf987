"""`python -m blaze_jax.benchmark`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from blaze_jax.benchmark import sizes as known
from blaze_jax.benchmark.arguments import parse_arguments
from blaze_jax.benchmark.compare import compare
from blaze_jax.benchmark.compile_only import measure_memory
from blaze_jax.benchmark.compile_time import measure_compile_time
from blaze_jax.benchmark.environment import describe, environment
from blaze_jax.benchmark.kernels import measure_kernels
from blaze_jax.benchmark.mesh import default_sizes, measure_mesh, mesh_text
from blaze_jax.benchmark.results_file import Record, ResultsFile, read_results
from blaze_jax.benchmark.rounding import measure_rounding
from blaze_jax.benchmark.routing import measure_routing
from blaze_jax.benchmark.scaling import measure_scaling_point, print_flatness
from blaze_jax.benchmark.tables import terminal
from blaze_jax.implementation import demanded_family
from blaze_jax.progress import Say, counted, write
from pallas_kernels.compile_only import missing_compiler


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    arguments = parse_arguments(argv)
    try:
        recorded = [read_results(path) for path in arguments.recorded or ()]
        with demanded_family(arguments.family):
            results = recorded or [_measure(arguments)]
        if arguments.plot is not None:
            _draw(results, arguments.plot)
    except (ValueError, NotImplementedError) as error:
        print(f"python -m blaze_jax.benchmark: {error}", file=sys.stderr)
        return 2
    return 0 if arguments.recorded or all(map(_is_done, results[0]["records"])) else 1


def _is_done(record: Record) -> bool:
    """Whether all of it was measured, where the record says so, as one over a mesh."""
    return record.get("status", "ok") == "ok"


def _draw(results: Sequence[dict[str, Any]], folder) -> None:
    try:
        from blaze_jax.benchmark.plots import draw
    except ImportError as error:
        raise NotImplementedError("--plot needs matplotlib: pip install 'blaze_jax[benchmark]'") from error
    for file in draw(results, folder):
        print(f"drew {file}")


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.mesh:
        return _measure_mesh(arguments)
    target = arguments.compile_only or arguments.compile_time
    if target and (reason := missing_compiler()):
        mode = "--compile-only" if arguments.compile_only else "--compile-time"
        raise NotImplementedError(f"{mode} {target} cannot run: {reason}")
    values = environment()
    if target:
        values["device"] = f"{values['device']}, compiled for {target}"
    if arguments.family:
        values["device"] = f"{values['device']}, kernels for {arguments.family.capitalize()}"
    file = ResultsFile(arguments.json, values)
    print(describe(file.environment))
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and not target:
        print(
            f"no GPU here but {jax.default_backend()}: wall time, and small sizes unless --config or --preset says so"
        )
    dtype = jnp.dtype(arguments.dtype or ("bfloat16" if on_gpu or target else "float32"))
    items, measure = _plan(arguments, dtype, on_gpu)
    for item, say in counted(items):
        say(str(item))
        file.add(measure(item, say))
        heading = f"{item}, {dtype.name}" if isinstance(item, known.Sizes) else "T={}, E={}, K={}".format(*item)
        write(f"{heading}\n{terminal(file.records[-1])}")
    if arguments.scaling:
        print_flatness(file.records)
    return file.content


def _measure_mesh(arguments: argparse.Namespace) -> dict[str, Any]:
    """Cases in processes of their own: this one leaves the devices to them."""
    file = ResultsFile(arguments.json, {})
    sizes = [*arguments.config, *(known.preset(name, arguments.tokens) for name in arguments.preset)]
    items = [(item, variant) for item in sizes or default_sizes() for variant in arguments.variant or [{}]]
    for item, say in counted(items):
        say(str(item[0]))
        values, record = measure_mesh(
            item,
            arguments.mesh,
            layers=arguments.layers,
            dtype=arguments.dtype,
            repeats=arguments.repeats,
            implementation=arguments.implementation,
            limit_seconds=arguments.case_seconds,
        )
        if values and not file.environment:
            file.environment = values
            write(describe(values))
        file.add(record)
        write(mesh_text(record))
    return file.content


def _plan(arguments, dtype, on_gpu: bool) -> tuple[Sequence[Any], Callable[[Any, Say], Record]]:
    """The items to measure, and how to measure one."""
    common = {"repeats": arguments.repeats, "implementation": arguments.implementation}
    chosen = [*arguments.config, *(known.preset(name, arguments.tokens) for name in arguments.preset)]
    if arguments.routing:
        items = known.ROUTING_SIZES if on_gpu else known.CPU_ROUTING_SIZES
        return items, lambda item, _: measure_routing(*item, **common)
    if arguments.scaling:
        items = known.SCALING_SIZES if on_gpu else known.CPU_SCALING_SIZES
        return items, lambda item, _: measure_scaling_point(item, dtype, **common)
    if arguments.token_rounding:
        items = chosen or [known.ROUNDING_SIZES if on_gpu else known.CPU_ROUNDING_SIZES]
        return items, lambda item, _: measure_rounding(item, dtype, **common)
    if arguments.compile_time:
        return chosen or known.GPU_SIZES[:1], lambda item, _: measure_compile_time(item, dtype)
    items = chosen or (known.GPU_SIZES if on_gpu or arguments.compile_only else known.CPU_SIZES)
    if arguments.compile_only:
        return items, lambda item, _: measure_memory(item, dtype, peers=arguments.peers)
    if arguments.kernels:
        return items, lambda item, _: measure_kernels(item, dtype, **common)
    names = ("peers", "same_experts", "float32_weights", "limit_seconds")
    options = common | {name: getattr(arguments, name) for name in names}
    return items, lambda item, say: compare(item, dtype, progress=say, **options)


if __name__ == "__main__":
    sys.exit(main())
