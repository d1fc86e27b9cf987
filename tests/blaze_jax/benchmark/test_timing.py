"""Times of calls: profiles written by hand in place of a GPU's, what they are taken apart into, and the wall clock."""

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from blaze_jax.benchmark import timing
from blaze_jax.benchmark.back_to_back import take_turns
from blaze_jax.benchmark.timing import Kernel, Timing, TraceError, busy_ns, kernels_of, split, time_calls

ON_CPU = jax.default_backend() == "cpu"


def profile(events, *, plane="/device:GPU:0", line="Stream #13(Compute)", extra_planes=""):
    """A profile with `(name, start_us, duration_us, module)` on one line of one plane."""
    names = sorted({name for name, *_ in events})
    metadata = "".join(
        f'event_metadata {{ key: {i} value {{ id: {i} name: "{n}" }} }}\n' for i, n in enumerate(names, 1)
    )
    written = "".join(
        f"events {{ metadata_id: {names.index(name) + 1} offset_ps: {int(start * 1e6)} duration_ps: {int(us * 1e6)} "
        f'stats {{ metadata_id: 1 str_value: "{module}" }} }}\n'
        for name, start, us, module in events
    )
    return ProfileData.from_text_proto(
        f"""{extra_planes}
        planes {{
          name: "{plane}"
          lines {{ name: "{line}" timestamp_ns: 1000 {written} }}
          lines {{ name: "XLA Modules" timestamp_ns: 1000 {written} }}
          {metadata}
          stat_metadata {{ key: 1 value {{ id: 1 name: "hlo_module" }} }}
        }}"""
    )


OTHER_PLANES = 'planes { name: "/device:GPU:1" } planes { name: "/host:CPU" }'


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("given", [{}, {"line": "Compute #1"}, {"extra_planes": OTHER_PLANES}])
def test_the_kernels_of_the_first_gpus_streams_are_found_once_and_in_order(given):
    found = kernels_of(profile([("b", 30, 5, "jit_g"), ("a", 10, 2, "jit_f")], **given))
    assert [(k.name, k.module, k.duration_ns) for k in found] == [("a", "jit_f", 2000.0), ("b", "jit_g", 5000.0)]
    assert found[1].start_ns - found[0].start_ns == 20000.0


def test_a_profile_without_a_gpu_or_a_kernel_says_what_it_has():
    with pytest.raises(TraceError, match=r"no plane of a GPU, only: /host:CPU, /device:TPU:0"):
        kernels_of(profile([("a", 0, 1, "")], plane="/device:TPU:0", extra_planes='planes { name: "/host:CPU" }'))
    with pytest.raises(TraceError, match=r"/device:GPU:0 has no kernel on its streams; its lines are: Stream #13"):
        kernels_of(profile([]))


def test_gaps_do_not_count_and_overlaps_count_once():
    spans = {"a": (0, 10), "b": (5, 10), "c": (6, 2), "d": (20, 3)}
    assert busy_ns([Kernel(name, "", *span) for name, span in spans.items()]) == 18
    assert busy_ns([]) == 0


def test_pieces_between_marks():
    kernels = [Kernel(name, "", i, 1) for i, name in enumerate("xMabMMcM")]
    pieces = split(kernels, lambda k: k.name == "M")
    assert ["".join(k.name for k in piece) for piece in pieces] == ["ab", "c", ""]


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


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def test_device_times_leave_out_the_flush_and_the_gaps(gpu):
    calls = {"ours": gpu.call(("up", 3), ("down", 1), ("up", 3)), "theirs": gpu.call(("dot", 20))}
    times = time_calls(calls, repeats=4)
    assert times["ours"].clock == "device"
    assert times["ours"].samples_us == pytest.approx([7.0] * 4)
    assert times["ours"].kernels == {"up": (2, pytest.approx(6.0)), "down": (1, pytest.approx(1.0))}
    assert times["theirs"].us == pytest.approx(20)
    assert times["ours"].note == ""


def test_a_trace_per_run_when_the_flush_is_not_recognised(gpu, monkeypatch):
    monkeypatch.setattr(timing, "_flush", lambda: gpu.call(("unheard_of", 100)))
    times = time_calls({"a": gpu.call(("x", 2)), "b": gpu.call(("y", 5))}, repeats=3)
    assert (times["a"].us, times["b"].us) == (pytest.approx(2), pytest.approx(5))
    assert "one trace per run" in times["a"].note


def test_wall_time_and_the_reason_when_there_is_no_trace(gpu, monkeypatch):
    def fail(run):
        raise TraceError("the trace has no plane of a GPU, only: /host:CPU")

    monkeypatch.setattr(timing, "trace", fail)
    times = time_calls({"a": gpu.call(("x", 2))}, repeats=3)
    assert times["a"].clock == "wall"
    assert times["a"].note == "wall time, because the trace has no plane of a GPU, only: /host:CPU"


@pytest.mark.skipif(not ON_CPU, reason="the wall clock is for platforms without a GPU")
def test_a_cpu_has_the_wall_clock():
    times = time_calls({"a": lambda: jnp.ones(16) + 1}, repeats=5)["a"]
    assert (times.clock, len(times.samples_us), times.kernels) == ("wall", 5, {})
    assert times.note == "wall time, because there is no GPU, only cpu"


def test_median_and_spread():
    times = Timing("wall", [10.0, 12.0, 11.0])
    assert times.us == 11
    assert times.spread == pytest.approx(2 / 11)


@pytest.mark.gpu
def test_device_time_on_a_gpu_agrees_with_the_clock_of_a_long_run():
    factor = jnp.ones((4096, 4096), jnp.bfloat16)
    dot = jax.jit(jnp.dot)
    times = time_calls({"dot": lambda: dot(factor, factor)}, repeats=5)["dot"]
    long_run = take_turns({"dot": lambda: dot(factor, factor)}, turns=1, seconds=0.2)["dot"]
    assert 200 < long_run["mhz"] < 3000
    assert 20 < long_run["watts"] < 2000
    assert times.clock == "device"
    assert times.note == ""
    assert times.us == pytest.approx(long_run["us"], rel=0.5)
