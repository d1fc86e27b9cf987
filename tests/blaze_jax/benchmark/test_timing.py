"""Times of calls: what a trace is taken apart into, and the wall clock."""

import jax
import jax.numpy as jnp
import pytest

from blaze_jax.benchmark import timing
from blaze_jax.benchmark.timing import Timing, sustain, time_calls
from blaze_jax.benchmark.trace import Kernel, TraceError

ON_CPU = jax.default_backend() == "cpu"


class Gpu:
    """Kernels that calls leave behind, on a made-up device clock."""

    def __init__(self, monkeypatch):
        self.kernels, self.now = [], 0.0
        monkeypatch.setattr(timing.jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(timing, "_flush", lambda: self.call(("wrapped_popcnt", 100)))
        monkeypatch.setattr(timing, "trace", self.trace)

    def call(self, *kernels):
        def run():
            for name, us in kernels:
                self.kernels.append(Kernel(name, "", self.now, us * 1e3))
                self.now += us * 1e3 + 500
            return jnp.zeros(())

        return run

    def trace(self, run):
        self.kernels.clear()
        run()
        return list(self.kernels)


def test_device_times_leave_out_the_flush_and_the_gaps(monkeypatch):
    gpu = Gpu(monkeypatch)
    calls = {"ours": gpu.call(("up", 3), ("down", 1), ("up", 3)), "theirs": gpu.call(("dot", 20))}
    times = time_calls(calls, repeats=4)
    assert times["ours"].clock == "device"
    assert times["ours"].samples_us == pytest.approx([7.0] * 4)
    assert times["ours"].kernels == {"up": (2, pytest.approx(6.0)), "down": (1, pytest.approx(1.0))}
    assert times["theirs"].us == pytest.approx(20)
    assert times["ours"].note == ""


def test_a_trace_per_run_when_the_flush_is_not_recognised(monkeypatch):
    gpu = Gpu(monkeypatch)
    monkeypatch.setattr(timing, "_flush", lambda: gpu.call(("unheard_of", 100)))
    times = time_calls({"a": gpu.call(("x", 2)), "b": gpu.call(("y", 5))}, repeats=3)
    assert (times["a"].us, times["b"].us) == (pytest.approx(2), pytest.approx(5))
    assert "one trace per run" in times["a"].note


def test_wall_time_and_the_reason_when_there_is_no_trace(monkeypatch):
    gpu = Gpu(monkeypatch)

    def fail(run):
        raise TraceError("the trace has no plane of a GPU, only: /host:CPU")

    monkeypatch.setattr(timing, "trace", fail)
    times = time_calls({"a": gpu.call(("x", 2))}, repeats=3)
    assert times["a"].clock == "wall"
    assert times["a"].note == "wall time, because the trace has no plane of a GPU, only: /host:CPU"


def test_sustained_counts_the_last_calls_alone(monkeypatch):
    gpu = Gpu(monkeypatch)
    result = sustain(gpu.call(("x", 2), ("y", 3)), seconds=0.002, warm_seconds=0.001)
    assert result.us == pytest.approx(5)
    assert result.note == ""
    assert result.calls >= 1


@pytest.mark.skipif(not ON_CPU, reason="the wall clock is for platforms without a GPU")
def test_a_cpu_has_the_wall_clock():
    times = time_calls({"a": lambda: jnp.ones(16) + 1}, repeats=5)["a"]
    assert (times.clock, len(times.samples_us), times.kernels) == ("wall", 5, {})
    assert times.note == "cpu: wall time, there is no GPU"
    long_run = sustain(lambda: jnp.ones(16) + 1, seconds=0.01, warm_seconds=0.001)
    assert long_run.us == long_run.wall_us > 0
    assert long_run.note == "cpu: wall time only"


def test_median_and_spread():
    times = Timing("wall", [10.0, 12.0, 11.0])
    assert times.us == 11
    assert times.spread == pytest.approx(2 / 11)


@pytest.mark.gpu
def test_device_time_on_a_gpu_agrees_with_the_clock_of_a_long_run():
    factor = jnp.ones((4096, 4096), jnp.bfloat16)
    dot = jax.jit(jnp.dot)
    times = time_calls({"dot": lambda: dot(factor, factor)}, repeats=5)["dot"]
    long_run = sustain(lambda: dot(factor, factor), seconds=0.2)
    assert times.clock == "device"
    assert times.note == ""
    assert times.us == pytest.approx(long_run.wall_us, rel=0.5)
