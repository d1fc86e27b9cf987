"""Tables of results in the documents, also of odd ones: peers that fail half-way, runs cut off."""

import pytest

from blaze_jax.benchmark.results import PUBLISHED, read_results
from blaze_jax.benchmark.sizes import BOTH, FORWARD, GPU_SIZES, Sizes
from blaze_jax.benchmark.tables import reason
from docs.write_benchmarks import END, RESULTS, START, render, written

TIMED = {"us": 2000.0, "spread": 0.02, "tflops": 123.4, "share_of_dense": 0.5, "ratio_to_ours": 1.0}
OURS = {"layer": "blaze_jax", "backend": "xla", "status": "ok", "saved_mib": 7.0, FORWARD: TIMED, BOTH: TIMED}


def result(kind, sizes, *layers):
    environment = {"platform": "gpu", "device": "A GPU", "driver": "1", "cuda": "13.0", "jax": "0", "date": "today"}
    records = [{"kind": kind, "sizes": s._asdict(), "layers": layers} for s in sizes]
    return {"environment": environment, "command": "made up for a test", "records": records}


def compared(sizes, *layers):
    return render("compare", [result("compare", sizes, *layers)])


def test_every_recorded_file_says_where_it_comes_from():
    files = sorted(RESULTS.glob("*.json"))
    assert files
    for file in (*files, PUBLISHED):
        content = read_results(file)
        assert content["records"], file
        assert content["environment"]["device"], file
        assert content["command"], file


def test_the_results_go_between_the_marks_of_a_document():
    start = START.format("memory")
    page = f"before\n{start}\n\nold\n\n{END}\nafter\n"
    memory = {"layer": "blaze_jax", "status": "ok", "saved_mib": 12.0, "temporaries_mib": 30.0, "peak_mib": 31.0}
    failed = {"layer": "a peer", "status": "does not compile: for a reason"}
    text = written(page, [result("memory", [Sizes(8, 512, 2048, 4, 1)], memory, failed)])
    assert text.startswith(f"before\n{start}\n\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "| 8, 512, 2048, 4, 1 | blaze_jax | 12 | 30 | 31 |" in text
    assert "a peer |  | does not compile |" in text
    assert "A GPU, driver 1, CUDA 13.0, jax 0, today: `made up for a test`" in text
    assert "old" not in text


def test_a_peer_that_fails_in_the_backward_pass_keeps_its_forward_time():
    peer = {"layer": "a peer", "backend": "XLA", "status": f"out of memory: {BOTH} needs 130 GiB", "saved_mib": 1730.0}
    text = compared(GPU_SIZES, OURS, peer | {FORWARD: TIMED})
    empty = "  |" * 9
    assert f"| a peer (XLA) | 2.00 / out of memory |{empty} 1,730 / – |" in text
    assert f"| a peer (XLA) | out of memory |{empty} 1,730 / – |" in compared(GPU_SIZES, OURS, peer)


def test_the_readme_shows_one_gpu():
    mine, other = (result("compare", GPU_SIZES, OURS) for _ in range(2))
    mine["environment"]["device"] = "An H200"
    other["records"][0]["layers"] = [OURS | {"layer": "another GPU's"}]
    shown = render("summary", [mine, other])
    assert "blaze_jax (xla)" in shown
    assert "another GPU's" not in shown
    assert "another GPU's" in render("compare", [mine, other])


def test_sizes_that_no_run_came_to_are_named():
    *measured, last = GPU_SIZES
    assert f"Default sizes not compared: {', '.join(map(str, last))}." in compared(measured, OURS)
    assert "not compared" not in compared([Sizes(8, 8, 8, 2, 1)], OURS)
    assert "not compared" not in render("compare", [result("compare", s, OURS) for s in (measured, [last])])


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
