"""Times of jitted calls: by the kernels that a profile shows where there is a GPU, by the wall clock elsewhere."""

import contextlib
import itertools
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.profiler import ProfileData

Clock = Literal["device", "wall"]
type Call = Callable[[], Any]

FLUSHED_BYTES = 256 * 2**20
"""Bytes read, and bytes written, before every timed call on a GPU: several times any L2 cache."""

_FLUSH_KERNEL = "popcnt"
_FLUSH_MODULE = "empty_l2_cache"

_DERIVED_LINES = ("XLA ", "Framework ", "TensorFlow ", "Steps", "Source", "Launch Stats", "Scope")
"""Lines that repeat the kernels of the streams in coarser pieces; trace viewers add them."""


class TraceError(RuntimeError):
    """A trace does not hold what it should; the message says what it holds instead."""


class Kernel(NamedTuple):
    """A kernel, memory copy or memory fill that ran on the device.

    Attributes:
      name: as the compiler named it.
      module: the compiled program it belongs to, empty where the profiler does not say.
      start_ns: when it started, in nanoseconds, on the device's clock.
      duration_ns: how long it ran, in nanoseconds.
      op: the instruction of that program it came from, empty where the profiler does not say.
    """

    name: str
    module: str
    start_ns: float
    duration_ns: float
    op: str = ""

    @property
    def end_ns(self) -> float:
        return self.start_ns + self.duration_ns


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
    try:
        return _device_times(calls, repeats)
    except TraceError as error:
        return wall_times(calls, repeats=repeats, note=f"wall time, because {error}")


def wall_times(calls: Mapping[str, Call], *, repeats: int = 20, note: str = "") -> dict[str, Timing]:
    """Times until the result is there, launch included, of calls that take turns, each on an emptied L2 cache."""
    flush = _flush() if jax.default_backend() == "gpu" else lambda: None
    for call in calls.values():
        jax.block_until_ready(call())
    seconds = in_turns(calls, repeats, before=flush)
    return {name: Timing("wall", [s * 1e6 for s in times], {}, note) for name, times in seconds.items()}


def in_turns(
    calls: Mapping[str, Call], turns: int, *, number: int = 1, before: Call = lambda: None
) -> dict[str, list[float]]:
    """Seconds of each call in each turn, as `seconds_of` takes them; `before` is done before each."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            jax.block_until_ready(before())
            seconds[name].append(seconds_of(call, number))
    return seconds


def seconds_of(call: Call, number: int = 1) -> float:
    """Seconds per call by the wall clock, of so many in a row, until the last one's result is there."""
    start, result = time.perf_counter(), None
    for _ in range(number):
        result = call()  # drops the last one: work is queued, and memory holds one or two results
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / number


def _device_times(calls: Mapping[str, Call], repeats: int) -> dict[str, Timing]:
    _need_gpu()
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
    kernels = {}
    for name in dict.fromkeys(kernel.name for run in runs for kernel in run):
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


def trace(run: Callable[[], object]) -> list[Kernel]:
    """The kernels of the first GPU while `run()` runs, in the order of their starts.

    `run` must wait for its results: what is still on its way when it returns may be missing.

    Raises:
      TraceError: there is no GPU, and nothing ran; or the profiler wrote no plane of one, or no kernel is in it.
    """
    _need_gpu()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    options.enable_hlo_proto = False
    with tempfile.TemporaryDirectory(prefix="blaze_jax_trace_") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        if not files:
            raise TraceError("the profiler wrote no .xplane.pb file")
        return [kernel for file in files for kernel in kernels_of(ProfileData.from_file(str(file)))]


def _need_gpu() -> None:
    if (platform := jax.default_backend()) != "gpu":
        raise TraceError(f"there is no GPU, only {platform}")


def kernels_of(profile) -> list[Kernel]:
    """The kernels in a `jax.profiler.ProfileData`, in the order of their starts; of several GPUs, those of the first.

    Raises:
      TraceError: there is no plane of a GPU, or no kernel in it.
    """
    # jaxlib makes types of its own as a profile is read and draws a warning; were it an error, jaxlib would abort
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        planes = {plane.name: plane for plane in profile.planes}
        # "/device:GPU:0", perhaps with the model after it; the host's own plane is called /host:CPU
        on_gpu = sorted(name for name in planes if name.startswith("/device:") and "GPU" in name)
        if not on_gpu:
            raise TraceError(f"the trace has no plane of a GPU, only: {', '.join(planes) or 'none'}")
        lines = list(planes[on_gpu[0]].lines)
        streams = [line for line in lines if line.name.startswith("Stream")]
        streams = streams or [line for line in lines if not line.name.startswith(_DERIVED_LINES)]
        kernels = sorted((_kernel(event) for line in streams for event in line.events), key=lambda k: k.start_ns)
        if not kernels:
            names = ", ".join(line.name for line in lines)
            raise TraceError(f"the plane {on_gpu[0]} has no kernel on its streams; its lines are: {names or 'none'}")
        return kernels


def _kernel(event) -> Kernel:
    stats = {}
    with contextlib.suppress(RuntimeError, ValueError, TypeError):  # statistics that this jaxlib cannot hand out
        for name, value in event.stats:
            stats.setdefault(name, str(value))
    module, op = stats.get("hlo_module", ""), stats.get("hlo_op", "")
    return Kernel(event.name, module, float(event.start_ns), float(event.duration_ns), op)


def busy_ns(kernels: Iterable[Kernel]) -> float:
    """Nanoseconds in which at least one of the kernels ran: gaps do not count, an overlap counts once."""
    total, end = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda k: k.start_ns):
        total += max(0.0, kernel.end_ns - max(end, kernel.start_ns))
        end = max(end, kernel.end_ns)
    return total


def split(kernels: Sequence[Kernel], is_mark: Callable[[Kernel], bool]) -> list[list[Kernel]]:
    """The kernels after each mark, up to the next. Adjacent marks count as one; those before the first are left out."""
    marks = [i for i, kernel in enumerate(kernels) if is_mark(kernel)]
    ends = itertools.pairwise([*marks, len(kernels)])
    return [list(kernels[i + 1 : end]) for i, end in ends if end > i + 1 or end == len(kernels)]
