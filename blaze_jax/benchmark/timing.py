"""Times of jitted calls, on the device where there is a GPU and by wall clock elsewhere."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from blaze_jax.benchmark.trace import Kernel, TraceError, busy_ns, split, trace

Clock = Literal["device", "wall"]
type Call = Callable[[], Any]

FLUSHED_BYTES = 256 * 2**20
"""Bytes read, and bytes written, before every timed call on a GPU: several times any L2 cache."""

_FLUSH_KERNEL = "popcnt"
_FLUSH_MODULE = "empty_l2_cache"


class KernelTotal(NamedTuple):
    """A kernel's part of a call, all its launches together.

    Attributes:
      launches: per call.
      us: microseconds per call, the median over the calls.
    """

    launches: float
    us: float


@dataclass(frozen=True)
class Timing:
    """Times of one call, run several times, each on an emptied L2 cache.

    Attributes:
      clock: "device": time in which a kernel ran, gaps between kernels left out. "wall": time until the result is
        there.
      samples_us: microseconds of each run.
      kernels: by kernel name, in the order of their first launch; empty for the wall clock.
      note: why it is not the device's clock, or how the samples were taken apart; empty if there is nothing to say.
    """

    clock: Clock
    samples_us: list[float]
    kernels: dict[str, KernelTotal] = field(default_factory=dict)
    note: str = ""

    @property
    def us(self) -> float:
        """The median, in microseconds."""
        return statistics.median(self.samples_us)

    @property
    def spread(self) -> float:
        """Largest minus smallest sample, as a share of the median."""
        return (max(self.samples_us) - min(self.samples_us)) / self.us if self.us else 0.0

    def record(self) -> dict[str, Any]:
        """The values for a results file, without the samples."""
        return {name: getattr(self, name) for name in ("clock", "us", "spread", "note")}


class Sustained(NamedTuple):
    """Times of a call repeated without a pause, in the clocks and temperatures of a long run.

    Attributes:
      us: microseconds per call in which a kernel ran; wall time where the device's clock is not to be had.
      wall_us: wall time per call, in microseconds.
      calls: how many were measured.
      note: as in `Timing`.
    """

    us: float
    wall_us: float
    calls: int
    note: str = ""


def time_calls(calls: Mapping[str, Call], *, repeats: int = 20) -> dict[str, Timing]:
    """Times calls that take turns, A B A B, so that a drift of the machine touches all alike.

    On a GPU each timed run follows a pass over `FLUSHED_BYTES` that empties the L2 cache (that pass is not counted),
    and starts on an idle device. On other platforms the wall clock is read, with no such pass.

    Args:
      calls: functions without arguments that start the work and return its arrays. They are called once before, so that
        what has to be compiled is.
      repeats: timed runs of each.

    Returns:
      The times by the names of `calls`.
    """
    if jax.default_backend() != "gpu":
        return wall_times(calls, repeats=repeats, note=f"{jax.default_backend()}: wall time, there is no GPU")
    try:
        return _device_times(calls, repeats)
    except TraceError as error:
        return wall_times(calls, repeats=repeats, note=f"wall time, because {error}")


def wall_times(calls: Mapping[str, Call], *, repeats: int = 20, note: str = "") -> dict[str, Timing]:
    """Times until the result is there, launch included, of calls that take turns, each on an emptied L2 cache."""
    flush = _flush() if jax.default_backend() == "gpu" else None
    for call in calls.values():
        jax.block_until_ready(call())
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            if flush is not None:
                jax.block_until_ready(flush())
            start = time.perf_counter()
            jax.block_until_ready(call())
            samples[name].append((time.perf_counter() - start) * 1e6)
    return {name: Timing("wall", times, {}, note) for name, times in samples.items()}


def sustain(call: Call, *, seconds: float = 1.0, warm_seconds: float = 0.3) -> Sustained:
    """Times a call repeated back to back, with no flush or pause, for about `seconds` after `warm_seconds` of it."""
    jax.block_until_ready(call())
    one = max(_seconds(call, 2), 1e-6)
    warm, measured = (max(1, round(s / one)) for s in (warm_seconds, seconds))
    wall_us = 0.0

    def both() -> None:
        nonlocal wall_us
        _seconds(call, warm)
        wall_us = _seconds(call, measured) * 1e6

    if jax.default_backend() != "gpu":
        both()
        return Sustained(wall_us, wall_us, measured, f"{jax.default_backend()}: wall time only")
    try:
        kernels = trace(both)
    except TraceError as error:
        return Sustained(wall_us, wall_us, measured, f"wall time only, because {error}")
    each, rest = divmod(len(kernels), warm + measured)
    if rest:
        note = f"{len(kernels)} kernels of {warm + measured} calls: the warm-up is in the device time"
        return Sustained(busy_ns(kernels) / (warm + measured) / 1e3, wall_us, measured, note)
    return Sustained(busy_ns(kernels[-each * measured :]) / measured / 1e3, wall_us, measured)


def _seconds(call: Call, number: int) -> float:
    """Seconds per call, so many in a row."""
    start, result = time.perf_counter(), None
    for _ in range(number):
        result = call()  # drops the last one: work is queued, and memory holds one or two results
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / number


def _device_times(calls: Mapping[str, Call], repeats: int) -> dict[str, Timing]:
    flush = _flush()
    runs = list(calls.values()) * repeats
    for call in (flush, *calls.values()):
        jax.block_until_ready(call())

    def all_in_turn() -> None:
        for call in runs:
            jax.block_until_ready(flush())
            jax.block_until_ready(call())

    pieces, note = split(trace(all_in_turn), _is_flush), ""
    if len(pieces) != len(runs) or not all(pieces):
        note = f"one trace per run, for one trace of all came apart into {len(pieces)} instead of {len(runs)}"
        pieces = []
        for call in runs:
            jax.block_until_ready(flush())
            pieces.append(trace(lambda call=call: jax.block_until_ready(call())))
    return {name: _timing(pieces[i :: len(calls)], note) for i, name in enumerate(calls)}


def _timing(runs: list[list[Kernel]], note: str) -> Timing:
    names = dict.fromkeys(kernel.name for run in runs for kernel in run)
    kernels = {}
    for name in names:
        own = [[k.duration_ns for k in run if k.name == name] for run in runs]
        us = statistics.median(sum(durations) for durations in own) / 1e3
        kernels[name] = KernelTotal(sum(map(len, own)) / len(runs), us)
    return Timing("device", [busy_ns(run) / 1e3 for run in runs], kernels, note)


def _flush() -> Call:
    """A pass whose kernel is known by its name: nothing that we time counts bits."""

    def empty_l2_cache(buffer):
        return jax.lax.population_count(buffer)

    buffer = jax.block_until_ready(jnp.zeros(FLUSHED_BYTES // 4, jnp.uint32))
    return partial(jax.jit(empty_l2_cache), buffer)


def _is_flush(kernel: Kernel) -> bool:
    return _FLUSH_MODULE in kernel.module or _FLUSH_KERNEL in kernel.name
