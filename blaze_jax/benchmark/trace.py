"""Kernels that ran on the GPU, by the profiler, each with its start and its length."""

import contextlib
import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from jax.profiler import ProfileData

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


def trace(run: Callable[[], object]) -> list[Kernel]:
    """The kernels of the first GPU while `run()` runs, in the order of their starts.

    `run` must wait for its results: what is still on its way when it returns may be missing.

    Raises:
      TraceError: the profiler wrote no plane of a GPU, or there is no kernel in it.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    options.enable_hlo_proto = False
    with tempfile.TemporaryDirectory(prefix="blaze_jax_trace_") as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            run()
        finally:
            jax.profiler.stop_trace()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        if not files:
            raise TraceError("the profiler wrote no .xplane.pb file")
        return [kernel for file in files for kernel in kernels_of(ProfileData.from_file(str(file)))]


def kernels_of(profile) -> list[Kernel]:
    """The kernels in a `jax.profiler.ProfileData`, in the order of their starts; of several GPUs, those of the first.

    Raises:
      TraceError: there is no plane of a GPU, or no kernel in it.
    """
    with warnings.catch_warnings():
        # jaxlib makes types of its own as a profile is read and draws a warning; were it an error, jaxlib would abort
        warnings.simplefilter("ignore", DeprecationWarning)
        return _kernels_of(profile)


def _kernels_of(profile) -> list[Kernel]:
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


def _kernel(event) -> Kernel:
    stats = {}
    with contextlib.suppress(RuntimeError, ValueError, TypeError):  # statistics that this jaxlib cannot hand out
        for name, value in event.stats:
            stats.setdefault(name, str(value))
    module, op = stats.get("hlo_module", ""), stats.get("hlo_op", "")
    return Kernel(event.name, module, float(event.start_ns), float(event.duration_ns), op)
