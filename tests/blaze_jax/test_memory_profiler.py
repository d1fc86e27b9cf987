"""The memory profiler on steps that run and steps that do not."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from blaze_jax import expert_ffn
from blaze_jax.benchmark.sizes import Sizes, abstract_inputs, expert_inputs, forward_and_backward
from blaze_jax.profiler import MemoryProfiler, _measured_peak

SIZES = Sizes(64, 32, 16, 4, 2)
ON_CPU = jax.default_backend() == "cpu"


def step_of(**options):
    return jax.jit(forward_and_backward(partial(expert_ffn, **options)))


@pytest.fixture(scope="module")
def inputs():
    inputs = expert_inputs(SIZES, jnp.float32)
    return *inputs, inputs[0]


@pytest.mark.slow
def test_a_step_that_runs_even_if_it_was_compiled_before(inputs, capsys):
    step = step_of()
    step(*inputs)
    profiler = MemoryProfiler()
    with profiler.profile():
        step(*inputs)
    (report,) = profiler.result.layers
    assert tuple(report.layer[:5]) == tuple(SIZES)
    assert report.traced == 1
    assert report.ours.kept == {
        "x": 4 * 64 * 32,
        "gate": 4 * 128 * 16,
        "up": 4 * 128 * 16,
        "routing weights": 4 * 64 * 2,
        "indices": report.ours.kept["indices"],
    }
    assert report.ours.transient is not None
    assert report.conventional is not None
    assert report.conventional.kept_bytes > 2 * report.ours.kept_bytes
    assert profiler.result.kept is None
    text = profiler.summary()
    assert capsys.readouterr().out == text + "\n"
    if ON_CPU:
        assert profiler.result.peak is None
        assert "peak: not known: cpu devices do not report it" in text


@pytest.mark.slow
def test_a_step_that_is_not_run(inputs, tmp_path):
    profiler = MemoryProfiler()
    shapes = abstract_inputs(SIZES, jnp.float32)
    profile = profiler.examine(step_of(), *shapes, shapes[0])
    assert not profile.ran
    assert [report.ours.recomputed_flops for report in profile.layers] == [0]
    assert profile.kept is not None
    assert profile.kept["moe_gate"] == 4 * 128 * 16
    assert profile.plan is not None
    assert profile.plan.arguments >= sum(a.size * a.dtype.itemsize for a in shapes[:4])
    assert profile.peak == profile.plan.total
    assert "compiled, not run" in profiler.summary()
    assert profiler.plot(tmp_path / "new" / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_saving_the_inputs_alone_costs_products(inputs):
    profiler = MemoryProfiler()
    (report,) = profiler.examine(step_of(save="inputs"), *inputs).layers
    assert "gate" not in report.ours.kept
    assert report.ours.recomputed_flops / report.total_flops == pytest.approx(4 / 18)
    assert "22% more arithmetic" in profiler.summary()


@pytest.mark.slow
def test_layers_without_a_gate_are_not_compared(inputs):
    x, _, *rest = inputs
    profiler = MemoryProfiler()
    (report,) = profiler.examine(step_of(activation="relu"), x, None, *rest).layers
    assert report.conventional is None
    assert "gate" not in report.ours.kept
    assert "conventional: not compared" in profiler.summary()


@pytest.mark.slow
def test_what_is_not_known_is_said(inputs):
    profiler = MemoryProfiler()
    with pytest.raises(ValueError, match="nothing was profiled yet"):
        profiler.summary()
    compiled = step_of().lower(*inputs).compile()
    with profiler.profile():
        compiled(*inputs)
    assert "compiled ahead of time does not show its layers" in profiler.summary()
    with pytest.raises(ValueError, match="no layer was seen"):
        profiler.plot("nowhere.png")
    profiler.examine(expert_ffn, *inputs[:-1])
    assert "moe_gate" not in (profiler.result.kept or {})


def test_a_peak_is_told_if_it_is_the_blocks_own():
    device = jax.devices()[0]
    assert _measured_peak(device, {}, {}) == (
        None,
        f"{device.platform} devices do not report it; `examine` has XLA's plan",
    )
    before = {"peak_bytes_in_use": 100, "bytes_in_use": 2**20}
    assert _measured_peak(device, before, {"peak_bytes_in_use": 150})[0] == 150
    peak, note = _measured_peak(device, before, {"peak_bytes_in_use": 100})
    assert peak is None
    assert "stayed below" in note


@pytest.mark.gpu
def test_a_gpu_reports_its_peak():
    inputs = expert_inputs(Sizes(16384, 1024, 512, 16, 4), jnp.bfloat16)
    profiler = MemoryProfiler()
    with profiler.profile():
        step_of()(*inputs, inputs[0])
    assert profiler.result.peak is None or profiler.result.peak > 4 * 16384 * 4 * 512
