"""`python -m blaze_jax.tune`."""

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from blaze_jax.benchmark.inputs import expert_inputs
from blaze_jax.benchmark.results import describe, environment
from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.implementation import FAMILIES, kernels_of
from blaze_jax.progress import counted, write
from blaze_jax.tune.cases import Case, Operands, make_operands, tuning_cases
from blaze_jax.tune.measure import Found, tune
from pallas_kernels.tuning.files import USER_FILE_VARIABLE, add_tunings, user_file
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
    add = parser.add_argument
    add(
        "--config",
        type=Sizes.parse,
        action="append",
        required=True,
        metavar="T,d,n,E,K",
        help="tokens, width, expert width, experts, experts per token; repeatable",
    )
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="(bfloat16)")
    add("--family", choices=tuple(FAMILIES), help="of kernels (those that the GPU and the dtype get)")
    add(
        "--kernel",
        choices=NAMES,
        action="append",
        metavar="NAME",
        help=f"of {', '.join(NAMES)}; repeatable (all)",
    )
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
    for sizes in arguments.config:
        print(f"{sizes}, {arguments.dtype}")
        for case, found in _tune_layer(sizes, jnp.dtype(arguments.dtype), arguments.kernel or NAMES, arguments):
            write(line(case.kernel, found))
            measured = {"us": round(found.us, 2), "heuristic_us": round(found.heuristic_us, 2), "on": machine}
            entry = {"tuning": asdict(found.tuning), "measured": measured}
            add_tunings(path, {(gpu, case.kernel, case.shape): entry})
    print(f"wrote {path}")


def _tune_layer(sizes: Sizes, dtype, names: Sequence[str], arguments: argparse.Namespace):
    """Yields each case with what was found."""
    began = time.monotonic()
    kernels: Any = FAMILIES[arguments.family] if arguments.family else kernels_of("mosaic_gpu", dtype=dtype)
    inputs = expert_inputs(sizes, dtype)
    if reason := kernels.unsupported(inputs[0], inputs[1:4], ()):
        raise ValueError(f"--config {','.join(map(str, sizes))} cannot run on the kernels: {reason}")
    operands: Operands = jax.block_until_ready(jax.jit(partial(make_operands, kernels=kernels))(*inputs))
    cases: list[Case] = [case for case in tuning_cases(operands, kernels) if case.kernel.removeprefix(MMA) in names]
    for number, (case, say) in enumerate(counted(cases, unit="kernel")):
        left = arguments.seconds - (time.monotonic() - began)
        yield case, tune(case, operands, seconds=left / (len(cases) - number), say=say)


def line(kernel: str, found: Found) -> str:
    """What was found, for people; notes in lines of their own."""
    change = found.us / found.heuristic_us - 1
    values = ", ".join(f"{name}={value}" for name, value in asdict(found.tuning).items())
    times = f"{found.heuristic_us:9.1f} us -> {found.us:9.1f} us {change:+6.1%}"
    text = f"  {kernel:22s} {times}, best of {found.tried}: {values}"
    return "\n".join([text, *(f"    note: {note}" for note in found.notes)])


if __name__ == "__main__":
    sys.exit(main())
