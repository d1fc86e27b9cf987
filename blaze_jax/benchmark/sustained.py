"""Our layer and its peers back to back, in turns, at the clock and the power of a long run, as in training."""

import ctypes
import math
import os
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from blaze_jax.benchmark.layers import candidates_for
from blaze_jax.benchmark.rates import DENSE
from blaze_jax.benchmark.results import OURS, Record, head
from blaze_jax.benchmark.sizes import PASSES, Sizes
from blaze_jax.benchmark.timing import Call, seconds_of

_SAMPLE_SECONDS = 0.02
_SM_CLOCK = 1

type Gauge = Callable[[], tuple[float, float] | None]
"""Reads the clock of the multiprocessors, in MHz, and the power, in watts; None where the driver does not tell."""


def measure_sustained(
    sizes: Sizes,
    dtype,
    *,
    peers: Sequence[str],
    turns: int,
    turn_seconds: float,
    implementation=None,
    limit_seconds: float = 20.0,
    say: Callable[[str], object] = lambda message: None,
) -> Record:
    """Times our layer and its peers back to back, in turns, forward and forward+backward, with the clock and the power.

    Times are wall times per call: what the host takes to launch counts where it is longer than the kernels. The dense
    product of the ceilings takes turns with the layers.

    Args:
      sizes: the layer's.
      dtype: the tokens' and expert weights'.
      peers: which to compare with ours, SonicMoE among them if it is named; of each, its fastest backend by one run.
      turns: of each call; the medians over them are recorded.
      turn_seconds: how long a turn lasts at least, after a third of it that is not counted.
      implementation: our layer's.
      limit_seconds: a call estimated, or seen, to take longer is reported and not timed.
      say: is told what comes next.
    """
    layers, ceiling_calls = candidates_for(
        sizes, dtype, peers=peers, implementation=implementation, limit_seconds=limit_seconds, say=say
    )
    say("back to back")
    calls = {(layer.name, name): call for layer in layers for name, call in layer.calls.items()}
    times = take_turns(calls | {(DENSE, DENSE): ceiling_calls.calls[DENSE]}, turns=turns, seconds=turn_seconds)
    rows = []
    for layer in layers:
        row = layer.record()
        for name in layer.calls:
            timed = times[layer.name, name]
            row[name] = timed | {"tflops": PASSES[name] * sizes.forward_flops / timed["us"] / 1e6}
            if (OURS, name) in times:
                row[name]["ratio_to_ours"] = timed["us"] / times[OURS, name]["us"]
        rows.append(row)
    dense = ceiling_calls.dense_tflops(times[DENSE, DENSE]["us"])
    record = head("sustained", sizes, dtype) | {"turns": turns, "turn_seconds": turn_seconds}
    return record | {"sustained_tflops": dense, "layers": rows}


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
