"""Calls back to back, in turns, at the clock and the power that a GPU has in a long run, as in training."""

import ctypes
import math
import os
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from blaze_jax.benchmark.timing import Call, seconds_of

_SAMPLE_SECONDS = 0.02
_SM_CLOCK = 1

type Gauge = Callable[[], tuple[float, float] | None]
"""Reads the clock of the multiprocessors, in MHz, and the power, in watts; None where the driver does not tell."""


def take_turns[K](
    calls: Mapping[K, Call], *, turns: int, seconds: float, gauge: Gauge | None = None
) -> dict[K, dict[str, Any]]:
    """Repeats each call for `seconds` without a pause, then the next, and all of that `turns` times.

    Returns:
      By the names of `calls`: "us", the median over the turns of the wall time per call in microseconds, "samples_us",
      that of each turn, and the medians of "mhz" and "watts", None where the driver does not tell.
    """
    gauge = gauge or gpu_gauge()
    for call in calls.values():
        seconds_of(call)  # compiles or allocates what is left to
    samples: dict[K, list[float]] = {name: [] for name in calls}
    gauged: dict[K, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            warm = max(1, math.ceil(seconds / 3 / seconds_of(call, 2)))
            number = math.ceil(1.02 * seconds / seconds_of(call, warm))
            with _sampled(gauge, gauged[name]):
                samples[name].append(seconds_of(call, number) * 1e6)
    rows = {}
    for name, us in samples.items():
        mhz, watts = map(statistics.median, zip(*gauged[name], strict=True)) if gauged[name] else (None, None)
        rows[name] = {"us": statistics.median(us), "samples_us": us, "mhz": mhz, "watts": watts}
    return rows


@contextmanager
def _sampled(gauge: Gauge | None, samples: list[tuple[float, float]]) -> Iterator[None]:
    """Reads the gauge again and again in a thread while the block runs."""
    done = threading.Event()

    def watch() -> None:
        while gauge is not None and not done.wait(_SAMPLE_SECONDS):
            if (read := gauge()) is not None:
                samples.append(read)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def gpu_gauge() -> Gauge | None:
    """The gauge of the first GPU, by NVIDIA's driver; None where there is none, or it does not tell."""
    if jax.default_backend() != "gpu":
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    device, clock, milliwatts = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()

    def read() -> tuple[float, float] | None:
        failed = nvml.nvmlDeviceGetClockInfo(device, _SM_CLOCK, ctypes.byref(clock))
        failed |= nvml.nvmlDeviceGetPowerUsage(device, ctypes.byref(milliwatts))
        return None if failed else (clock.value, milliwatts.value / 1e3)

    index = int(first) if first.isdecimal() else 0
    failed = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
    return None if failed else read
