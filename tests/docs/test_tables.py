"""What the tables of results say of the odd results: peers that fail half-way, runs cut off."""

import pytest

from blaze_jax.benchmark.inputs import BOTH, FORWARD
from blaze_jax.benchmark.sizes import GPU_SIZES, Sizes
from blaze_jax.benchmark.tables import reason
from docs.write_benchmarks import render

TIMED = {"us": 2000.0, "spread": 0.02, "tflops": 123.4, "share_of_dense": 0.5, "ratio_to_ours": 1.0}
OURS = {"layer": "blaze_jax", "backend": "xla", "status": "ok", "saved_mib": 7.0, FORWARD: TIMED, BOTH: TIMED}


def result(sizes, *layers):
    environment = {"platform": "cpu", "device": "a CPU", "jax": "0", "date": "2026-11-21"}
    records = [{"kind": "compare", "sizes": s._asdict(), "layers": layers} for s in sizes]
    return {"environment": environment, "command": "made up for a test", "records": records}


def table(sizes, *layers):
    return render("compare", [result(sizes, *layers)])


def test_a_peer_that_fails_in_the_backward_pass_keeps_its_forward_time():
    peer = {"layer": "a peer", "backend": "XLA", "status": f"out of memory: {BOTH} needs 130 GiB", "saved_mib": 1730.0}
    text = table(GPU_SIZES, OURS, peer | {FORWARD: TIMED})
    assert "| a peer (XLA) | 2.00 / out of memory |  |  |  | 1,730 / – |  |" in text
    assert "| a peer (XLA) | out of memory |  |  |  | 1,730 / – |  |" in table(GPU_SIZES, OURS, peer)


def test_sizes_that_no_run_came_to_are_named():
    *measured, last = GPU_SIZES
    assert f"Default sizes not compared: {', '.join(map(str, last))}." in table(measured, OURS)
    assert "not compared" not in table(GPU_SIZES, OURS)
    assert "not compared" not in table([Sizes(8, 8, 8, 2, 1)], OURS)
    assert "not compared" not in render("compare", [result(measured, OURS), result([last], OURS)])


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("out of memory (forward): JaxRuntimeError: RESOURCE_EXHAUSTED", "out of memory"),
        ("not run: its arithmetic alone takes about 30 s a call (forward)", "not run: too slow"),
        ("tokamax is not installed (pip install 'blaze_jax[benchmark]')", "tokamax is not installed"),
    ],
)
def test_a_reason_is_short(status, said):
    assert reason(status) == said
