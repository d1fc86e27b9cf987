"""Results files and the figures drawn of them."""

import pytest

from blaze_jax.benchmark.plots import draw
from blaze_jax.benchmark.results import PUBLISHED, ResultsFile, command_line, environment, read_results
from blaze_jax.benchmark.sizes import GPU_SIZES
from blaze_jax.benchmark.tables import flatness, flatness_text


def test_what_was_measured_is_in_the_file_after_each_record(tmp_path):
    path = tmp_path / "results.json"
    file = ResultsFile(path, environment(), "a command")
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


def test_published_figures_are_at_the_sizes_that_are_measured():
    records = read_results(PUBLISHED)["records"]
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


@pytest.mark.parametrize(
    ("times", "verdict"), [((44.0, 40.0), "flat"), ((60.0, 40.0, 45.0), "falls"), ((60.0, 40.0, 50.0), "grows")]
)
def test_what_falls_is_not_told_as_if_it_grew(times, verdict):
    text = flatness_text([scaling_record(65536 << i, ns) for i, ns in enumerate(times)])
    assert f"on: {verdict} (" in text.splitlines()[0]


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(ValueError, match="there is no figure of these results: routing"):
        draw([result({"kind": "routing"})], tmp_path)


def test_the_command_to_type_again_is_without_where_its_results_went():
    arguments = ["kernels", "--json", "a/b.json", "--config", "1,2,3,4,1", "--plot=c", "--peers", "sort + tokamax"]
    assert command_line("m", arguments) == "python -m m kernels --config 1,2,3,4,1 --peers 'sort + tokamax'"
