"""Times a kernel's candidates in turns, and compares their results bit by bit with the heuristic's."""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from blaze_jax.benchmark.timing import Timing, time_calls
from blaze_jax.tune.cases import Case, Operands
from pallas_kernels.tuning.parameters import MMA, Tuning

WORTH = 0.01
"""A share of the heuristic's time. Candidates that save less do not replace it: two runs may differ by as much."""


class Found(NamedTuple):
    """The outcome of tuning a kernel.

    Attributes:
      tuning: the fastest parameters.
      us: their time, microseconds of the device.
      heuristic_us: the heuristic's.
      tried: how many candidates were timed.
      notes: what went wrong, a line each.
    """

    tuning: Tuning
    us: float
    heuristic_us: float
    tried: int
    notes: tuple[str, ...]


def tune(
    case: Case,
    operands: Operands,
    *,
    seconds: float,
    repeats: int = 10,
    say: Callable[[str], object] = lambda what: None,
) -> Found:
    """Runs the candidates of a kernel and finds the fastest.

    Args:
      case: the kernel.
      operands: its arrays.
      seconds: after which no more candidates are begun to compile; the heuristic and one more are in any case.
      repeats: timed runs of each.
      say: is told what is being done.

    Raises:
      RuntimeError: the heuristic's parameters do not compile or run.
    """
    programs, notes = _compile(case, operands, seconds, say)
    say(f"{case.kernel}: comparing {len(programs)}")
    default, *others = programs
    used_rows = operands.dispatch.expert_token_offsets[-1]
    expected = programs[default](operands)
    same = jax.jit(partial(_same_bits, case.by_row))
    for tuning in others:
        if not same(expected, programs[tuning](operands), used_rows):
            notes.append(f"{tuning} gives other bits than {default}: a bug, please report it")
            del programs[tuning]
    del expected
    say(f"{case.kernel}: timing {len(programs)}")
    timings = time_calls({str(t): partial(p, operands) for t, p in programs.items()}, repeats=repeats)
    notes += dict.fromkeys(t.note for t in timings.values() if t.note)
    us = {tuning: kernel_us(timings[str(tuning)], case.kernel) for tuning in programs}
    best = choose(us, default)
    return Found(best, us[best], us[default], len(us), tuple(notes))


def choose[K](us: dict[K, float], default: K) -> K:
    """The fastest, or the default where that saves next to nothing."""
    best = min(us, key=lambda tuning: us[tuning])
    return best if us[best] < (1 - WORTH) * us[default] else default


def kernel_us(timing: Timing, kernel: str) -> float:
    """The kernel's own time where the profiler knows its name, else the time of all that ran."""
    own = [total.us for name, total in timing.kernels.items() if f"moe_{kernel.removeprefix(MMA)}" in name]
    return sum(own) if own else timing.us


def _compile(case: Case, operands: Operands, seconds: float, say) -> tuple[dict[Tuning, Any], list[str]]:
    """A program per candidate that compiles, and notes on the others; several are compiled at a time."""
    began, started, notes = time.monotonic(), {}, []

    def start(tuning: Tuning) -> Future:
        try:
            return pool.submit(jax.jit(partial(case.run, tuning)).lower(operands).compile)
        except Exception as error:  # whatever stops Pallas stops only this candidate
            failed = Future()
            failed.set_exception(error)
            return failed

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1)) as pool:
        for number, tuning in enumerate(case.candidates):
            if number > 1 and time.monotonic() - began > seconds:
                notes.append(f"{number} of {len(case.candidates)} candidates tried; a larger --seconds allows more")
                break
            say(f"{case.kernel}: compiling {number + 1} of {len(case.candidates)}")
            started[tuning] = start(tuning)
    programs = {}
    for tuning, future in started.items():
        error = future.exception()
        if error is None:
            programs[tuning] = future.result()
            continue
        reason = f"{tuning} does not compile: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if tuning == case.candidates[0]:
            raise RuntimeError(f"{case.kernel}: {reason}") from error
        notes.append(reason)
    return programs, notes


def _same_bits(by_row: bool, expected, results, used_rows) -> jax.Array:
    """Whether two results are the same, in rows below `used_rows` if they are rows."""

    def same(a, b):
        bits = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
        equal = lax.bitcast_convert_type(a, bits) == lax.bitcast_convert_type(b, bits)
        if by_row:
            row = lax.broadcasted_iota(jnp.int32, equal.shape, 0)
            equal |= row >= used_rows
        return equal.all()

    return jnp.stack(jax.tree.leaves(jax.tree.map(same, expected, results))).all()
