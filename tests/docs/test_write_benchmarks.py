"""Tables of results."""

from blaze_jax.benchmark.inputs import BOTH
from blaze_jax.benchmark.results import PUBLISHED, read_results
from docs.write_benchmarks import END, RESULTS, START, render, written
from tests.blaze_jax.benchmark.records import result, scaling_record


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


def test_every_kind_of_results_has_its_table():
    timed = {"us": 2000.0, "spread": 0.02, "tflops": 123.4, "share_of_dense": 0.5, "ratio_to_ours": 1.0}
    ours = {"layer": "blaze_jax", "backend": "xla", "status": "ok", "saved_mib": 7.0, "peak_mib": 9.0}
    sizes = scaling_record(8, 1.0)["sizes"]
    failed = {"layer": "a peer", "backend": "", "status": "out of memory: it needs a lot"}
    compared = {"kind": "compare", "sizes": sizes, "layers": [ours | {"forward": timed, BOTH: timed}, failed]}
    routing = {"kind": "routing", "num_tokens": 5000, "num_experts": 8, "experts_per_token": 2, "speedup": 2.5}
    rounded = {"us": 3000.0, "pairs": 77, "rows_of_tiles": 128, "tflops": 9.0, "speedup": 1.25}
    rounded |= {"us_with_router": 4000.0, "speedup_with_router": 1.5}
    results = [
        result(compared, routing | {"calls": {"ours": {"us": 12.5}}}),
        result(routing | {"calls": {"ours": {"us": 1.0}, "XLA": {"us": 2.0}, "rounded down": {"us": 20.5}}}),
        result({"kind": "token_rounding", "sizes": sizes, "routings": {"top-k": rounded}}),
    ]
    text = "\n".join(render(kind, results) for kind in ("compare", "routing", "token_rounding"))
    assert "| blaze_jax (xla) | 2.00 / 2.00 | 2% | 123 | 50% | 7 / 9 | 1.00× |" in text
    assert "| a peer | out of memory |" in text
    assert "| 5,000, 8, 2 | 12.5 | 2.5× |" in text
    assert "| faster by | ours, rounded down, µs |" in text
    assert "| 5,000, 8, 2 | 1.0 | 2.0 | 2.5× | 20.5 |" in text
    assert "| top-k | 3.00 | 77 | 128 | 9 | 1.25× | 4.00 | 1.50× |" in text
    assert text.count("A GPU, driver 1") == 4
