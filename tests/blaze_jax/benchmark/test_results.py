"""Results files and the figures drawn of them."""

import pytest

from blaze_jax.benchmark.environment import environment
from blaze_jax.benchmark.inputs import BOTH
from blaze_jax.benchmark.plots import draw
from blaze_jax.benchmark.readme import END, START, render, update_readme
from blaze_jax.benchmark.results_file import RECORDED, ResultsFile, command_line, read_results
from blaze_jax.benchmark.scaling import flatness
from blaze_jax.benchmark.sizes import GPU_SIZES

PNG = b"\x89PNG"


def test_what_was_measured_is_in_the_file_after_each_record(tmp_path):
    path = tmp_path / "results.json"
    file = ResultsFile(path, environment())
    for number in (1, 2):
        file.add({"kind": "test", "number": number})
        assert [r["number"] for r in read_results(path)["records"]] == list(range(1, number + 1))
    assert {"device", "driver", "cuda", "jax", "jaxlib", "date"} <= read_results(path)["environment"].keys()


@pytest.mark.parametrize("content", ["", "[]", '{"records": []}'])
def test_a_file_that_holds_no_results(content, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"results\.json"):
        read_results(path)


def test_every_recorded_file_says_where_it_comes_from():
    files = sorted(RECORDED.glob("*.json"))
    assert files
    for file in files:
        content = read_results(file)
        assert content["records"], file
        assert content["environment"]["device"], file
        assert content["command"], file


def test_published_figures_are_at_the_sizes_that_are_measured():
    records = read_results(RECORDED / "published.json")["records"]
    sizes = {tuple(r["sizes"].values()) for r in records if r["kind"] == "published"}
    assert sizes == {tuple(s) for s in GPU_SIZES}


def result(*records):
    values = {"platform": "gpu", "device": "A GPU", "driver": "1", "cuda": "13.0", "jax": "0", "date": "2026-11-20"}
    return {"environment": values, "command": "made up for a test", "records": list(records)}


def scaling_record(tokens, ns):
    sizes = {"num_tokens": tokens, "model_width": 512, "expert_width": 2048, "num_experts": 4, "experts_per_token": 1}
    return {"kind": "scaling", "sizes": sizes, "ns_per_token": ns, "saved_bytes_per_token": 8200.0}


def test_flatness_looks_at_many_tokens_alone():
    records = [scaling_record(t, ns) for t, ns in ((8192, 99.0), (65536, 44.0), (131072, 40.0))]
    assert flatness(records, "ns_per_token") == pytest.approx(0.1)
    assert flatness(records[:2], "ns_per_token") is None
    assert flatness(records, "peak_bytes_per_token") is None


def test_figures_of_scaling_training_and_kernels(tmp_path):
    training = {"kind": "training", "title": "a model", "tokens_per_second": 1e4, "loss": [8.0, 4.0, 2.0]}
    kernel = {"name": "moe_combine", "launches": 2, "us": 3.0, "share_of_ceiling": 0.8}
    results = [
        result(scaling_record(65536, 44.0), scaling_record(131072, 40.0)),
        result(
            training | {"layer": "blaze_jax", "peak_gib": 3.0}, training | {"layer": "conventional", "peak_gib": None}
        ),
        result({"kind": "kernels", "sizes": scaling_record(8, 1.0)["sizes"], "kernels": [kernel]}),
    ]
    drawn = draw(results, tmp_path / "figures")
    assert [file.name for file in drawn] == ["scaling.png", "training.png", "kernels.png"]
    assert all(file.read_bytes().startswith(PNG) for file in drawn)


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(ValueError, match="there is no figure of these results: routing"):
        draw([result({"kind": "routing"})], tmp_path)


def test_the_command_to_type_again_is_without_where_its_results_went():
    arguments = ["--kernels", "--json", "a/b.json", "--config", "1,2,3,4,1", "--plot=c", "--peers", "sort + tokamax"]
    assert command_line("m", arguments) == "python -m m --kernels --config 1,2,3,4,1 --peers 'sort + tokamax'"


def test_the_results_go_between_the_marks_of_a_readme(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{START}\nold\n{END}\nafter\n")
    memory = {"layer": "blaze_jax", "status": "ok", "saved_mib": 12.0, "temporaries_mib": 30.0, "peak_mib": 31.0}
    failed = {"layer": "a peer", "status": "does not compile: for a reason"}
    sizes = scaling_record(8, 1.0)["sizes"]
    records = [{"kind": "memory", "sizes": sizes, "layers": [memory, failed]}]
    update_readme(readme, [result(*records)])
    text = readme.read_text()
    assert text.startswith(f"before\n{START}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "| 8, 512, 2048, 4, 1 | blaze_jax | 12 | 30 | 31 |" in text
    assert "a peer |  | does not compile |" in text
    assert "A GPU, driver 1, CUDA 13.0, jax 0, 2026-11-20: `made up for a test`" in text
    assert "old" not in text
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="must have the lines"):
        update_readme(readme, [])


def test_every_kind_of_results_has_its_table():
    timed = {"us": 2000.0, "spread": 0.02, "tflops": 123.4, "share_of_dense": 0.5, "ratio_to_ours": 1.0}
    ours = {"layer": "blaze_jax", "backend": "xla", "status": "ok", "saved_mib": 7.0, "peak_mib": 9.0}
    sizes = scaling_record(8, 1.0)["sizes"]
    failed = {"layer": "a peer", "backend": "", "status": "out of memory: it needs a lot"}
    compared = {"kind": "compare", "sizes": sizes, "layers": [ours | {"forward": timed, BOTH: timed}, failed]}
    routing = {"kind": "routing", "num_tokens": 5000, "num_experts": 8, "experts_per_token": 2, "speedup": 2.5}
    rounded = {"us": 3000.0, "pairs": 77, "rows_of_tiles": 128, "tflops": 9.0, "speedup": 1.25}
    rounded |= {"us_with_router": 4000.0, "speedup_with_router": 1.5}
    text = render(
        [
            result(compared, routing | {"calls": {"ours": {"us": 12.5}}}),
            result(routing | {"calls": {"ours": {"us": 1.0}, "XLA": {"us": 2.0}, "rounded down": {"us": 20.5}}}),
            result({"kind": "token_rounding", "sizes": sizes, "routings": {"top-k": rounded}}),
        ]
    )
    assert "| blaze_jax (xla) | 2.00 / 2.00 | 2% | 123 | 50% | 7 / 9 | 1.00× |" in text
    assert "| a peer | out of memory |" in text
    assert "| 5,000, 8, 2 | 12.5 | 2.5× |" in text
    assert "| faster by | ours, rounded down, µs |" in text
    assert "| 5,000, 8, 2 | 1.0 | 2.0 | 2.5× | 20.5 |" in text
    assert "| top-k | 3.00 | 77 | 128 | 9 | 1.25× | 4.00 | 1.50× |" in text
    assert text.count("A GPU, driver 1") == 4
