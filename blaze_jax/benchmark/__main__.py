"""`python -m blaze_jax.benchmark [COMMAND]`: one path for every command, from cases to records, a file and tables."""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from blaze_jax.benchmark import sizes as known
from blaze_jax.benchmark.checkpoint_reading import measure_reading
from blaze_jax.benchmark.layers import compare, measure_memory
from blaze_jax.benchmark.mesh import Case, measure_mesh, parse_mesh, parse_variant
from blaze_jax.benchmark.own_process import ProcessError, run_apart
from blaze_jax.benchmark.peers import PEERS
from blaze_jax.benchmark.results import (
    Record,
    ResultsFile,
    command_line,
    describe,
    environment,
    read_results,
    succeeded,
)
from blaze_jax.benchmark.studies import (
    measure_compile_time,
    measure_kernels,
    measure_rounding,
    measure_routing,
    measure_scaling,
)
from blaze_jax.benchmark.tables import flatness_text, terminal
from blaze_jax.benchmark.traffic import expected_efficiency
from blaze_jax.implementation import FAMILIES, demanded_family
from blaze_jax.progress import counted, write
from pallas_kernels.compile_only import missing_compiler

PROGRAM = "python -m blaze_jax.benchmark"
DESCRIPTION = """Times the experts, forward and forward+backward, and what a JAX user would otherwise run; other
commands measure other things. Times on a GPU are device time, by the profiler: kernels without the gaps between them,
each run on an emptied L2 cache. On other platforms they are wall times, and the default sizes are small."""

_COMMANDS: dict[str, Callable[..., Record]] = {
    "layers": compare,
    "kernels": measure_kernels,
    "routing": measure_routing,
    "scaling": measure_scaling,
    "rounding": measure_rounding,
    "memory": measure_memory,
    "compile-time": measure_compile_time,
    "mesh": measure_mesh,
    "reading": measure_reading,
    "expected": expected_efficiency,
}
"""`(case, dtype, **options) -> record`; a command's options are the keyword arguments of its function."""

_SETTINGS = {
    "routing": ("family",),
    "mesh": ("mesh", "variant", "config", "preset", "tokens", "dtype"),
    "reading": ("config",),
    "expected": (),
}
"""Options that say what the cases are and how numbers are stored, where they are not those of a layer."""

_OF_A_LAYER = ("config", "preset", "tokens", "dtype", "family")
_ABSENT = ("memory", "compile-time")
"""Commands that compile for a GPU that need not be here."""

_REMOVED = {
    "--token-rounding": "rounding",
    "--compile-only": "memory",
    "--recorded": "draw",
    **{f"--{name}": name for name in ("kernels", "routing", "scaling", "compile-time", "mesh")},
}


def _options() -> dict[str, dict[str, Any]]:
    """Keyword arguments of `add_argument` by the name of an option."""
    several = {"action": "append", "default": []}
    return {
        "config": {"type": known.Sizes.parse, "metavar": "T,d,n,E,K", "help": "sizes; repeatable"} | several,
        "preset": {"choices": known.PRESET_NAMES, "help": "a layer of a public model; repeatable"} | several,
        "tokens": _number(16384, "T", "tokens of the presets"),
        "dtype": {"choices": ("float32", "bfloat16", "float16"), "help": "(bfloat16 on a GPU, float32 elsewhere)"},
        "family": {"choices": tuple(FAMILIES), "help": "our kernels for GPUs (those of the GPU)"},
        "implementation": {"choices": ("mosaic_gpu", "xla"), "help": "our kernels (the best that can run)"},
        "repeats": _number(20, "N", "timed runs, taking turns"),
        "peers": {"nargs": "*", "choices": PEERS, "default": list(PEERS), "metavar": "PEER", "help": _PEERS_HELP},
        "limit_seconds": _number(20.0, "S", "a peer's call that takes longer is not timed"),
        "same_experts": {"action": "store_true", "help": "route all tokens to the same K experts"},
        "float32_weights": {"action": "store_true", "help": "time our layer with float32 weights, too"},
        "mesh": {"type": parse_mesh, "metavar": "ROLE=N,...", "help": "devices by role, such as fsdp=2,expert=4"},
        "variant": {"type": parse_variant, "metavar": "NAME=VALUE,...", "help": _VARIANT_HELP} | several,
        "layers": _number(1, "N", "layers, one after the other"),
        "case_seconds": _number(240.0, "S", "a case that takes longer is ended"),
        "folder": {"help": "where the file is written, and removed from again (a temporary one)"},
    }


_PEERS_HELP = f"{', '.join(PEERS)} (all)"
_VARIANT_HELP = "fields of Parallelism, such as exchange=permute,chunks=2; repeatable (default)"


def _number(default: float, metavar: str, text: str) -> dict[str, Any]:
    """An option that takes a positive number, whole if its default is."""

    def parse(written: str) -> float:
        try:
            value = type(default)(written)
        except ValueError:
            value = 0
        if not value > 0:
            least = "at least 1" if isinstance(default, int) else "positive"
            raise argparse.ArgumentTypeError(f"{written} must be {least}")
        return value

    return {"type": parse, "default": default, "metavar": metavar, "help": f"{text} ({default:g})"}


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit status: 1 if a case failed, 2 if nothing could be measured."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        arguments = parse_arguments(argv)
        if arguments.command == "draw":
            results = [read_results(path) for path in arguments.files]
        else:
            results = [_measure(arguments, argv)]
        if arguments.plot is not None:
            _draw(results, arguments.plot)
    except (ValueError, NotImplementedError, ProcessError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    return 0 if arguments.command == "draw" or all(map(succeeded, results[0]["records"])) else 1


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line; errors end the program with a message.

    Raises:
      ValueError: an option has become a command.
    """
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        for flag in argv:
            if command := _REMOVED.get(flag.split("=")[0]):
                raise ValueError(f"{flag} has become a command: {PROGRAM} {command} ...")
        argv = ["layers", *argv]
    parser = argparse.ArgumentParser(prog=PROGRAM, description=DESCRIPTION, allow_abbrev=False)
    known_options, commands = _options(), parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, measure in _COMMANDS.items():
        text = (measure.__doc__ or "").partition("\n")[0]
        own = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        for option in (*_SETTINGS.get(name, _OF_A_LAYER), *_options_of(measure)):
            # the one thing that devices cannot be measured without comes without dashes
            flag = option if option == "mesh" else f"--{option.replace('_', '-')}"
            own.add_argument(flag, **known_options[option])
        own.add_argument("--json", type=Path, metavar="FILE", help="write all results")
        own.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the results as PNG files")
    draw = commands.add_parser("draw", help="figures of results that were recorded before", allow_abbrev=False)
    draw.add_argument("files", type=Path, nargs="+", metavar="FILE", help="results")
    draw.add_argument("--plot", type=Path, metavar="FOLDER", required=True, help="where PNG files go")
    return parser.parse_args(argv)


def _options_of(measure: Callable) -> list[str]:
    return [p.name for p in signature(measure).parameters.values() if p.kind is p.KEYWORD_ONLY and p.name != "say"]


def _measure(arguments: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """The content of a results file with a record for each case."""
    command, values = arguments.command, vars(arguments)
    absent, family = command in _ABSENT, values.get("family")
    if absent and (reason := missing_compiler()):
        raise NotImplementedError(f"{command} cannot run: {reason}")
    about = run_apart(environment) if command == "mesh" else environment()  # its cases have the devices to themselves
    on_gpu = about["platform"] == "gpu" or absent
    about["device"] += ", compiled for h200" if absent else f", kernels for {family.capitalize()}" if family else ""
    file = ResultsFile(arguments.json, about, command_line("blaze_jax.benchmark", argv))
    print(describe(about))
    if not on_gpu:
        print(f"no GPU here but {about['platform']}: wall time, and small sizes unless --config or --preset says so")
    dtype = jnp.dtype(values.get("dtype") or ("bfloat16" if on_gpu else "float32"))
    measure = partial(_COMMANDS[command], **{name: values[name] for name in _options_of(_COMMANDS[command])})
    with demanded_family(family):
        for case, say in counted(_cases(arguments, on_gpu)):
            say(str(case))
            file.add(measure(case, dtype, say=say) if command == "layers" else measure(case, dtype))
            write(f"{case}, {dtype.name}\n{terminal(file.content['records'][-1])}")
    if command == "scaling":
        print(flatness_text(file.content["records"]))
    return file.content


def _cases(arguments: argparse.Namespace, on_gpu: bool) -> Sequence[Any]:
    """The command line's cases, or the default ones."""
    values = vars(arguments)
    presets = (known.preset(name, arguments.tokens) for name in values.get("preset", ()))
    cases = [*values.get("config", ()), *presets] or (known.GPU_CASES if on_gpu else known.CPU_CASES)[arguments.command]
    if arguments.command != "mesh":
        return cases
    return [Case(sizes, arguments.mesh, variant) for sizes in cases for variant in arguments.variant or [{}]]


def _draw(results: Sequence[dict[str, Any]], folder: Path) -> None:
    try:
        from blaze_jax.benchmark.plots import draw
    except ImportError as error:
        raise NotImplementedError("--plot needs matplotlib: pip install 'blaze_jax[benchmark]'") from error
    for file in draw(results, folder):
        print(f"drew {file}")


if __name__ == "__main__":
    sys.exit(main())
