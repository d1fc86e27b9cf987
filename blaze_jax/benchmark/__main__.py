"""`python -m blaze_jax.benchmark [COMMAND]`: one path for every study, from cases to records, a file, tables, figures.

`STUDIES` says what there is: for each command the function that measures a case, and the cases.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from blaze_jax.benchmark.atomic import measure_atomic
from blaze_jax.benchmark.layers import compare, measure_memory
from blaze_jax.benchmark.mesh import Case, expected_efficiency, measure_mesh, parse_mesh, parse_variant
from blaze_jax.benchmark.own_process import ProcessError, run_apart
from blaze_jax.benchmark.peers import PEERS, SONICMOE
from blaze_jax.benchmark.precision import measure_precision
from blaze_jax.benchmark.rates import measure_kernels
from blaze_jax.benchmark.results import ResultsFile, command_line, describe, environment, read_results, succeeded
from blaze_jax.benchmark.routers import measure_routers
from blaze_jax.benchmark.sizes import GPU_SIZES, PRESETS, Sizes
from blaze_jax.benchmark.studies import (
    Routed,
    measure_bases,
    measure_compile_time,
    measure_few_tokens,
    measure_reading,
    measure_rounding,
    measure_routing,
    measure_scaling,
)
from blaze_jax.benchmark.tables import flatness, terminal
from blaze_jax.implementation import FAMILIES, demanded_family
from blaze_jax.progress import counted, write
from pallas_kernels.compile_only import missing_compiler

PROGRAM = "python -m blaze_jax.benchmark"
DESCRIPTION = """Times the experts, forward and forward+backward, and what a JAX user would otherwise run; other
commands measure other things. Times on a GPU are device time, by the profiler: kernels without the gaps between them,
each run on an emptied L2 cache. On other platforms they are wall times, and the default sizes are small."""
RECORDING = """Results are printed, and kept only where --json says so. The documents show what is in docs/results:
record with --json docs/results/NAME.json, then write tables and figures with `python -m docs.write_benchmarks`."""

_SETTINGS = ("config", "preset", "tokens", "dtype", "family")
_SMALL = (Sizes(4096, 512, 512, 16, 2), Sizes(2048, 256, 128, 32, 4))
_ROUTED = ((24576, 128, 8), (32768, 128, 8), (65536, 16, 4), (262144, 256, 8), (1048576, 64, 4), (2097152, 4, 1))


class Study(NamedTuple):
    """What a command measures.

    Attributes:
      measure: `(case, dtype, **options) -> record`. Its keyword arguments are the command's options, and the first line
        of its docstring is the command's help.
      cases: the default ones on a GPU.
      on_cpu: those elsewhere, where two cores take seconds; None for the same.
      settings: further options, which say what the cases are and how numbers are stored.
      absent: whether it compiles for a GPU that need not be here.
    """

    measure: Callable[..., dict[str, Any]]
    cases: Sequence[Any]
    on_cpu: Sequence[Any] | None = None
    settings: Sequence[str] = _SETTINGS
    absent: bool = False


STUDIES = {
    "layers": Study(compare, GPU_SIZES, _SMALL),
    "kernels": Study(measure_kernels, GPU_SIZES, _SMALL),
    "routing": Study(
        measure_routing, [Routed(*sizes) for sizes in _ROUTED], [Routed(2048, 32, 4), Routed(4096, 8, 2)], ["family"]
    ),
    "scaling": Study(  # on a GPU up to 2M tokens at MoEBlaze's smallest layer
        measure_scaling,
        [Sizes(8192 << i, 512, 2048, 4, 1) for i in range(9)],
        [Sizes(512 << i, 64, 128, 4, 1) for i in range(5)],
    ),
    "few-tokens": Study(  # as a model generates
        measure_few_tokens,
        [*(Sizes(t, 2048, 768, 128, 8) for t in (1, 8, 64, 256, 512)), Sizes(256, 1536, 256, 128, 8)],
        [Sizes(8, 64, 32, 16, 4)],
    ),
    "bases": Study(  # few tokens, which read the base, and many, for which it is decoded many times
        measure_bases, [Sizes(t, 2048, 768, 128, 8) for t in (8, 256, 4096)], [Sizes(16, 64, 128, 8, 2)]
    ),
    # few tokens for each of many experts: their last tiles count
    "rounding": Study(measure_rounding, [Sizes(16384, 1536, 256, 512, 8)], [Sizes(2048, 128, 64, 32, 4)]),
    "atomic": Study(  # experts of one neuron: on both sides of where the layer chooses another form
        measure_atomic,
        [
            Sizes(4096, 1024, 1, e, k)
            for e, k in ((1024, 16), (4096, 16), (16384, 16), (65536, 16), (65536, 256), (2**20, 256))
        ],
        [Sizes(256, 64, 1, 1024, 16)],
        ("config", "dtype", "family"),
    ),
    "routers": Study(  # the largest BlockFFN, of which a token takes a fifth
        measure_routers,
        [Sizes(24576, 1792, 128, 56, 11), Sizes(32768, 4096, 1024, 128, 8)],
        [Sizes(1024, 64, 32, 16, 3)],
    ),
    "precision": Study(  # three sizes where 8 bits shall pay, and two where they should not
        measure_precision,
        [
            *(Sizes(*s) for s in ((65536, 1024, 4096, 16, 4), (32768, 2048, 8192, 16, 4), (32768, 4096, 1024, 128, 8))),
            *(Sizes(*s) for s in ((24576, 1536, 256, 128, 8), (4096, 4096, 1024, 128, 8))),
        ],
        [Sizes(512, 256, 128, 16, 4)],
    ),
    "memory": Study(measure_memory, GPU_SIZES, absent=True),
    "compile-time": Study(measure_compile_time, GPU_SIZES[:1], absent=True),
    "mesh": Study(  # sizes of a device; in the finer one communication takes longest
        measure_mesh,
        [Sizes(32768, 4096, 1024, 128, 8), GPU_SIZES[0]],
        [Sizes(512, 256, 128, 16, 4)],
        ("mesh", "variant", "config", "preset", "tokens", "dtype"),
    ),
    "reading": Study(measure_reading, [Sizes(1, 4096, 1536, 128, 8)], settings=["config"]),  # 4.8 GB in bfloat16
    "expected": Study(expected_efficiency, tuple(PRESETS), settings=()),
}

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
        "config": {"type": Sizes.parse, "metavar": "T,d,n,E,K", "help": "sizes; repeatable"} | several,
        "preset": {"choices": tuple(PRESETS), "help": "a layer of a public model; repeatable"} | several,
        "tokens": _number(16384, "T", "tokens of the presets"),
        "dtype": {"choices": ("float32", "bfloat16", "float16"), "help": "(bfloat16 on a GPU, float32 elsewhere)"},
        "family": {"choices": tuple(FAMILIES), "help": "our kernels for GPUs (those of the GPU)"},
        "implementation": {"choices": ("mosaic_gpu", "xla"), "help": "our kernels (the best that can run)"},
        "repeats": _number(20, "N", "timed runs, taking turns"),
        "peers": {
            "nargs": "*",
            "choices": (*PEERS, SONICMOE),
            "default": list(PEERS),
            "metavar": "PEER",
            "help": _PEERS_HELP,
        },
        "turns": _number(5, "N", "turns of each pass back to back"),
        "turn_seconds": _number(0.5, "S", "of a turn at least, after a third of it that is not counted"),
        "limit_seconds": _number(20.0, "S", "a peer's call that takes longer is not timed"),
        "same_experts": {"action": "store_true", "help": "route all tokens to the same K experts"},
        "float32_weights": {"action": "store_true", "help": "time our layer with float32 weights, too"},
        "saves": {"action": "store_true", "help": "time our layer with every other save, too"},
        "mesh": {"type": parse_mesh, "metavar": "ROLE=N,...", "help": "devices by role, such as fsdp=2,expert=4"},
        "variant": {"type": parse_variant, "metavar": "NAME=VALUE,...", "help": _VARIANT_HELP} | several,
        "layers": _number(1, "N", "layers, one after the other"),
        "case_seconds": _number(240.0, "S", "a case that takes longer is ended"),
        "folder": {"help": "where the file is written, and removed from again (a temporary one)"},
    }


_PEERS_HELP = f"{', '.join(PEERS)} (all); {SONICMOE} if it is named"
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
    parser = argparse.ArgumentParser(prog=PROGRAM, description=DESCRIPTION, epilog=RECORDING, allow_abbrev=False)
    known_options, commands = _options(), parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, study in STUDIES.items():
        text = (study.measure.__doc__ or "").partition("\n")[0]
        own = commands.add_parser(name, help=text, description=text, epilog=RECORDING, allow_abbrev=False)
        for option in (*study.settings, *_options_of(study)):
            # the one thing that devices cannot be measured without comes without dashes
            flag = option if option == "mesh" else f"--{option.replace('_', '-')}"
            own.add_argument(flag, **known_options[option])
        own.add_argument("--json", type=Path, metavar="FILE", help="keep the results there (nothing is kept)")
        own.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the results as PNG files")
    draw = commands.add_parser("draw", help="figures of results that were recorded before", allow_abbrev=False)
    draw.add_argument("files", type=Path, nargs="+", metavar="FILE", help="results")
    draw.add_argument("--plot", type=Path, metavar="FOLDER", required=True, help="where PNG files go")
    return parser.parse_args(argv)


def _options_of(study: Study) -> list[str]:
    parameters = signature(study.measure).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "say"]


def _measure(arguments: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """The content of a results file with a record for each case."""
    command, study, values = arguments.command, STUDIES[arguments.command], vars(arguments)
    family = values.get("family")
    if study.absent and (missing := missing_compiler()):
        raise NotImplementedError(f"{command} cannot run: {missing}")
    if SONICMOE in values.get("peers", ()):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory, too
    about = run_apart(environment) if command == "mesh" else environment()  # its cases have the devices to themselves
    on_gpu = about["platform"] == "gpu" or study.absent
    about["device"] += (
        ", compiled for h200" if study.absent else f", kernels for {family.capitalize()}" if family else ""
    )
    file = ResultsFile(arguments.json, about, command_line("blaze_jax.benchmark", argv))
    records = file.content["records"]
    print(describe(about))
    if not on_gpu:
        print(f"no GPU here but {about['platform']}: wall time, and small sizes unless --config or --preset says so")
    dtype = jnp.dtype(values.get("dtype") or ("bfloat16" if on_gpu else "float32"))
    measure = partial(study.measure, **{name: values[name] for name in _options_of(study)})
    with demanded_family(family):
        for case, say in counted(_cases(arguments, study, on_gpu)):
            say(str(case))
            file.add(measure(case, dtype, say=say) if command == "layers" else measure(case, dtype))
            write(f"{case}, {dtype.name}\n{terminal(records[-1])}")
    if command == "scaling" and (text := flatness(records)):
        print(f"  {text}")
    print(f"wrote {file.path}" if file.path else "nothing is kept; --json FILE keeps the results")
    return file.content


def _cases(arguments: argparse.Namespace, study: Study, on_gpu: bool) -> Sequence[Any]:
    """The command line's cases, or the default ones."""
    values = vars(arguments)
    presets = (Sizes(arguments.tokens, *PRESETS[name]) for name in values.get("preset", ()))
    cases = [*values.get("config", ()), *presets] or (study.cases if on_gpu or not study.on_cpu else study.on_cpu)
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
