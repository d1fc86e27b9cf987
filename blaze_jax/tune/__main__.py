"""`python -m blaze_jax.tune`: finds the fastest parameters of the kernels on this GPU and writes them to a file."""

import argparse
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from blaze_jax.benchmark.results import describe, environment
from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.implementation import FAMILIES, demanded_family, kernels_of
from blaze_jax.progress import counted, write
from blaze_jax.tune.trials import Found, tune_layer
from pallas_kernels.tuning import USER_FILE_VARIABLE, add_tunings, user_file
from pallas_kernels.tuning.parameters import KINDS, MMA, nvidia_gpu

PROGRAM = "python -m blaze_jax.tune"

NAMES = tuple(dict.fromkeys(name.removeprefix(MMA) for name in KINDS))


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    arguments = parse_arguments(argv)
    try:
        _tune_all(arguments)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    return 0


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line, `sys.argv` for None; errors end the program with a message."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Times every kernel of the experts with every candidate of its parameters on this machine's NVIDIA "
        "GPU, and writes the fastest to a file that later runs read. No parameter changes a result's bits.",
        epilog=f"The file is {USER_FILE_VARIABLE}, or blaze_jax/tuning.json in $XDG_CACHE_HOME or ~/.cache.",
        allow_abbrev=False,
    )
    add, sizes = parser.add_argument, "tokens, width, expert width, experts, experts per token; repeatable"
    add("--config", type=Sizes.parse, action="append", required=True, metavar="T,d,n,E,K", help=sizes)
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="(bfloat16)")
    add("--family", choices=tuple(FAMILIES), help="(the kernels that the GPU and the dtype get)")
    add("--kernel", choices=NAMES, action="append", metavar="NAME", help=f"{', '.join(NAMES)}; repeatable (all)")
    add("--seconds", type=float, default=90.0, metavar="N", help="per config, to compile and time in (90)")
    add("--output", type=Path, metavar="FILE", help="write there instead; entries of other shapes there are kept")
    arguments = parser.parse_args(argv)
    if not 0 < arguments.seconds < math.inf:
        parser.error(f"--seconds {arguments.seconds} must be positive")
    return arguments


def _tune_all(arguments: argparse.Namespace) -> None:
    gpu = nvidia_gpu()
    if gpu is None:
        device = jax.devices()[0].device_kind
        raise NotImplementedError(f"there is no NVIDIA GPU since Ampere here, only {device}: nothing to tune")
    path = arguments.output or user_file()
    if path is None:
        raise ValueError(f"{USER_FILE_VARIABLE} is empty, which means no file: say --output FILE")
    add_tunings(path, {})  # fails before anything is measured if it cannot be written
    os.environ[USER_FILE_VARIABLE] = ""  # earlier results must not change what is measured
    machine = describe(environment())
    print(machine)
    dtype = jnp.dtype(arguments.dtype)
    for sizes, say in counted(arguments.config):
        write(f"{sizes}, {dtype.name}")
        with demanded_family(arguments.family):
            check(sizes, dtype)
            names = arguments.kernel or NAMES
            found, notes = tune_layer(sizes, dtype, names, seconds=arguments.seconds, say=say)
        entries = {}
        for kernel, outcome in found.items():
            write(line(kernel, outcome))
            measured = {"us": round(outcome.us, 2), "heuristic_us": round(outcome.heuristic_us, 2), "on": machine}
            entries[gpu, kernel, outcome.shape] = {"tuning": asdict(outcome.tuning), "measured": measured}
        for note in notes:
            write(f"    note: {note}")
        add_tunings(path, entries)
    print(f"wrote {path}")


def check(sizes: Sizes, dtype) -> None:
    """Raises ValueError if the kernels cannot run such a layer."""
    tokens, d, n, num_experts, _ = sizes
    array: Any = jax.ShapeDtypeStruct
    up, down = array((num_experts, d, n), dtype), array((num_experts, n, d), dtype)
    kernels = kernels_of("mosaic_gpu", dtype=dtype)
    if reason := kernels.unsupported(array((tokens, d), dtype), (up, up, down), ()):
        raise ValueError(f"--config {','.join(map(str, sizes))} cannot run on the kernels: {reason}")


def line(kernel: str, found: Found) -> str:
    """A kernel's outcome in a line."""
    change = found.us / found.heuristic_us - 1
    values = ", ".join(f"{name}={value}" for name, value in asdict(found.tuning).items())
    times = f"{found.heuristic_us:9.1f} us -> {found.us:9.1f} us {change:+6.1%}"
    return f"  {kernel:22s} {times}, best of {found.tried}: {values}"


if __name__ == "__main__":
    sys.exit(main())
