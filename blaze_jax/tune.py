"""`python -m blaze_jax.tune`: finds the fastest parameters of the kernels on this GPU and writes them to a file.

Trials are whole layers: one program tries a candidate of every kernel at once. The profiler tells the kernels' times
apart, and each is launched on the data and beside the neighbours that it has in training. Results are compared bit by
bit with the rules'.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from blaze_jax.benchmark.results import describe, environment
from blaze_jax.benchmark.sizes import Sizes, abstract_inputs, expert_inputs, forward_and_backward
from blaze_jax.benchmark.timing import Timing, time_calls
from blaze_jax.experts import expert_ffn
from blaze_jax.implementation import FAMILIES, demanded_family
from blaze_jax.progress import counted, write
from blaze_jax.schedule import block_width
from pallas_kernels.tuning import USER_FILE_VARIABLE, add_tunings, tried, user_file
from pallas_kernels.tuning.parameters import (
    KINDS,
    MMA,
    ColumnBlock,
    MmaTuning,
    Tiles,
    TileTuning,
    Tuning,
    block_kib,
    heuristic,
    nvidia_gpu,
)

PROGRAM = "python -m blaze_jax.tune"

NAMES = tuple(dict.fromkeys(name.removeprefix(MMA) for name in KINDS))


WORTH = 0.01
"""A share of the rule's time. Candidates that save less do not replace it: two runs may differ by as much."""

_ORDERS = ((0, 4), (0, 8), (1, 8), (0, 16), (1, 4), (1, 16), (1, 1))
"""`minor_dim` and `tile_width`, the more likely ones first. Rings are left full: fewer slots only wait more."""

_MMA_RINGS = (
    (256, 64, 3),
    (256, 64, 4),
    (256, 32, 6),
    (256, 32, 4),
    (128, 64, 3),
    (128, 64, 6),
    (128, 32, 6),
    (256, 64, 2),
)
"""`columns`, `k_step` and `stages`, the more likely ones first."""

_SWEEPS = (2, 4)
_ABREAST = (1, 4, 8, 16)
_IN_COLUMN_BLOCKS = ("moe_down_projection", "moe_up_backward", "moe_combine")


class Found(NamedTuple):
    """The outcome of tuning a kernel.

    Attributes:
      shape: its place in a table.
      tuning: the fastest parameters.
      us: their time, microseconds of the device.
      heuristic_us: the rule's.
      tried: how many candidates were timed.
    """

    shape: str
    tuning: Tuning
    us: float
    heuristic_us: float
    tried: int


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


def line(kernel: str, found: Found) -> str:
    """A kernel's outcome in a line."""
    change = found.us / found.heuristic_us - 1
    values = ", ".join(f"{name}={value}" for name, value in asdict(found.tuning).items())
    times = f"{found.heuristic_us:9.1f} us -> {found.us:9.1f} us {change:+6.1%}"
    return f"  {kernel:22s} {times}, best of {found.tried}: {values}"


type Trial = Mapping[str, Tuning]
"""Parameters of every kernel that is tuned; the first trial has the rules', whatever a table says."""


def tune_layer(
    sizes: Sizes,
    dtype,
    names: Sequence[str],
    *,
    seconds: float,
    repeats: int = 10,
    say: Callable[[str], object] = lambda what: None,
) -> tuple[dict[str, Found], list[str]]:
    """Finds the fastest parameters of a layer's kernels.

    Args:
      sizes: the layer's.
      dtype: the tokens' and weights'.
      names: kernels to tune, without the family's prefix.
      seconds: after which no more trials are begun to compile; the rules' and one more are in any case.
      repeats: timed runs of each.
      say: is told what is being done.

    Returns:
      The kernels with something to choose, and what went wrong, a line each.

    Raises:
      RuntimeError: the rules' parameters do not compile or run.
      NotImplementedError: the kernels cannot do these sizes.
    """
    inputs = abstract_inputs(sizes, dtype)
    with tried({}) as looked_up:
        jax.eval_shape(_layer(), *inputs, inputs[0])
    shapes = {k: looked_up.shapes[k] for k in KINDS if k in looked_up.shapes and k.removeprefix(MMA) in names}
    choices = {kernel: candidates(kernel, shape) for kernel, shape in shapes.items()}
    choices = {kernel: some for kernel, some in choices.items() if len(some) > 1}
    inputs = expert_inputs(sizes, dtype)
    arguments = (*inputs, inputs[0])
    programs, notes = compile_trials(_layer, arguments, trials(choices), seconds, say)
    return compare(programs, arguments, choices, shapes, repeats, say, notes), notes


def _layer() -> Callable:
    """Forward and backward of the experts, a function that jax has not traced."""
    layer = forward_and_backward(partial(expert_ffn, implementation="mosaic_gpu"))
    return lambda *arguments: layer(*arguments)


def candidates(kernel: str, shape: str) -> tuple[Tuning, ...]:
    """Different ways to run a kernel at a `shape_key`, the rule's first."""
    default = heuristic(kernel, shape)
    tiles = Tiles.of(kernel.removeprefix(MMA), shape)
    if isinstance(default, ColumnBlock):
        return _distinct((default, ColumnBlock(256)), lambda t: block_width(tiles.depth, t.columns))
    if isinstance(default, MmaTuning):
        return mma_candidates(default, shape.rpartition(",")[2])
    return orders(default, tiles.rows * tiles.matrices, tiles.columns)


def orders(default: TileTuning, row_tiles: int, column_tiles: int) -> tuple[TileTuning, ...]:
    """The default, and other orders that differ from it and each other on so many tiles."""
    shape = (row_tiles, column_tiles)
    if min(shape) == 1:
        return (default,)
    others = [replace(default, minor_dim=dim, tile_width=width) for dim, width in _ORDERS]
    return _distinct((default, *others), lambda t: (t.minor_dim, min(t.tile_width, shape[t.minor_dim])))


def mma_candidates(default: MmaTuning, dtype: str) -> tuple[MmaTuning, ...]:
    """The default, and other rings and orders that a block of this GPU can have."""
    rings = [ring for ring in _MMA_RINGS if jnp.dtype(dtype).itemsize == 2 or ring[1] == 64]
    others = [MmaTuning(*ring, default.abreast, sweep) for ring in rings[:3] for sweep in _SWEEPS]
    others += [MmaTuning(*ring, default.abreast) for ring in rings]
    others += [replace(default, abreast=rows) for rows in _ABREAST]
    return _distinct((default, *(t for t in others if t.shared_bytes <= block_kib() * 1024)), lambda t: t)


def _distinct[K](candidates: Iterable[K], effect: Callable[[K], object]) -> tuple[K, ...]:
    """The first candidate of each effect."""
    first: dict[object, K] = {}
    for candidate in candidates:
        first.setdefault(effect(candidate), candidate)
    return tuple(first.values())


def trials(choices: Mapping[str, Sequence[Tuning]]) -> list[Trial]:
    """The rules', then another candidate of each kernel at a time; column blocks, which others feel, by themselves."""
    rules = {kernel: some[0] for kernel, some in choices.items()}
    together = {kernel: some for kernel, some in choices.items() if KINDS[kernel] is not ColumnBlock}
    others = [
        {kernel: some[i] for kernel, some in together.items() if i < len(some)}
        for i in range(1, max(map(len, together.values()), default=1))
    ]
    others += [{kernel: one} for kernel, some in choices.items() if kernel not in together for one in some[1:]]
    return [rules, *(rules | other for other in others)]


def compile_trials(
    layer: Callable[[], Callable], arguments: tuple, wanted: Sequence[Trial], seconds: float, say: Callable
) -> tuple[list[tuple[Trial, Callable]], list[str]]:
    """A program for each trial that compiles, and notes on the others; several are compiled at a time."""
    began, started, notes = time.monotonic(), [], []
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1)) as pool:
        for number, trial in enumerate(wanted):
            if number > 1 and time.monotonic() - began > seconds:
                notes.append(f"{number} of {len(wanted)} trials made; a larger --seconds allows more")
                break
            say(f"compiling {number + 1} of {len(wanted)}")
            try:
                with tried(trial):
                    started.append((trial, pool.submit(jax.jit(layer()).lower(*arguments).compile)))
            except Exception as error:  # whatever stops Pallas stops only this trial
                failed = Future()
                failed.set_exception(error)
                started.append((trial, failed))
    programs = []
    for trial, future in started:
        if (error := future.exception()) is None:
            programs.append((trial, future.result()))
            continue
        reason = f"does not compile: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if trial is wanted[0]:
            raise RuntimeError(f"the layer {reason}") from error
        notes.append(f"{_changes(wanted[0], trial)} {reason}")
    return programs, notes


def compare(
    programs: Sequence[tuple[Trial, Callable]],
    arguments: tuple,
    choices: Mapping[str, Sequence[Tuning]],
    shapes: Mapping[str, str],
    repeats: int,
    say: Callable,
    notes: list[str],
) -> dict[str, Found]:
    """The fastest parameters of each kernel among the trials with the rules' bits; adds to the notes."""
    say(f"comparing {len(programs)} programs")
    (rules, first), *others = programs
    expected, kept = first(*arguments), [programs[0]]
    for trial, program in others:
        if _same_bits(expected, program(*arguments)):
            kept.append((trial, program))
        else:
            notes.append(f"{_changes(rules, trial)} gives other bits than the rules: a bug, please report it")
    del expected
    say(f"timing {len(kept)} programs")
    timings = time_calls({str(i): partial(p, *arguments) for i, (_, p) in enumerate(kept)}, repeats=repeats)
    notes += dict.fromkeys(t.note for t in timings.values() if t.note)
    found = {}
    for kernel, (default, *_) in choices.items():
        us = {default: kernel_us(timings["0"], kernel)}
        for i, (trial, _) in enumerate(kept):
            if trial[kernel] != default:
                us[trial[kernel]] = kernel_us(timings[str(i)], kernel)
        best = choose(us, default)
        found[kernel] = Found(shapes[kernel], best, us[best], us[default], len(us))
    return found


def choose[K](us: dict[K, float], default: K) -> K:
    """The fastest, or the default where that saves next to nothing."""
    best = min(us, key=lambda tuning: us[tuning])
    return best if us[best] < (1 - WORTH) * us[default] else default


def kernel_us(timing: Timing, kernel: str) -> float:
    """The kernel's own time where the profiler knows its name, else the time of all that ran."""
    words = _IN_COLUMN_BLOCKS if kernel == "column_block" else (f"moe_{kernel.removeprefix(MMA)}",)
    own = [total.us for name, total in timing.kernels.items() if any(word in name for word in words)]
    return sum(own) if own else timing.us


@jax.jit
def _same_bits(expected, results) -> jax.Array:
    def same(a, b):
        bits = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
        return (lax.bitcast_convert_type(a, bits) == lax.bitcast_convert_type(b, bits)).all()

    return jnp.stack(jax.tree.leaves(jax.tree.map(same, expected, results))).all()


def _changes(rules: Trial, trial: Trial) -> str:
    return ", ".join(f"{kernel}: {tuning}" for kernel, tuning in trial.items() if tuning != rules[kernel])


if __name__ == "__main__":
    sys.exit(main())
