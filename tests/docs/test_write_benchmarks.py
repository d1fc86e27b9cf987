"""Tables of results."""

from blaze_jax.benchmark.results import PUBLISHED, read_results
from docs.write_benchmarks import END, RESULTS, START, written
from tests.blaze_jax.benchmark.test_results import result, scaling_record


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
    sizes = scaling_record(8, 1.0)["sizes"]
    records = [{"kind": "memory", "sizes": sizes, "layers": [memory, failed]}]
    text = written(page, [result(*records)])
    assert text.startswith(f"before\n{start}\n\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "| 8, 512, 2048, 4, 1 | blaze_jax | 12 | 30 | 31 |" in text
    assert "a peer |  | does not compile |" in text
    assert "A GPU, driver 1, CUDA 13.0, jax 0, 2026-11-20: `made up for a test`" in text
    assert "old" not in text
