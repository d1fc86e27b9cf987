"""Sizes from the command line, results files, and the figures drawn of them."""

import argparse

import pytest

from blaze_jax.benchmark import plots
from blaze_jax.benchmark.plots import draw
from blaze_jax.benchmark.results import PUBLISHED, ResultsFile, command_line, environment, read_results
from blaze_jax.benchmark.sizes import GPU_SIZES, PRESETS, Sizes
from blaze_jax.benchmark.tables import flatness
from docs.write_benchmarks import RESULTS, recorded_results

SIZES = Sizes(8, 16, 8, 2, 1)


@pytest.mark.parametrize("text", ["1,2,3,4", "1,2,3,4,5,6", "a,2,3,4,1", "1,2,3,4,5", "0,2,3,4,1"])
def test_sizes_that_make_no_sense(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' must "):
        Sizes.parse(text)


def test_presets_have_as_many_expert_parameters_as_their_models():
    layers = {"mixtral": (32, 45.1e9), "qwen3-30b-a3b": (48, 29.0e9), "olmoe": (16, 6.4e9), "gpt-oss-20b": (24, 19.1e9)}
    layers["deepseek-v3"] = 58, 653.9e9
    assert PRESETS.keys() == layers.keys()
    for name, (number, parameters) in layers.items():
        assert number * Sizes(1, *PRESETS[name]).weight_elements == pytest.approx(parameters, rel=0.01)


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


def test_the_command_to_type_again_is_without_where_its_results_went():
    arguments = ["kernels", "--json", "a/b.json", "--config", "1,2,3,4,1", "--plot=c", "--peers", "sort + tokamax"]
    assert command_line("m", arguments) == "python -m m kernels --config 1,2,3,4,1 --peers 'sort + tokamax'"


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    ("times", "said"),
    [((44.0, 40.0), "10.0% (flat)"), ((60.0, 40.0, 45.0), "50.0% (falls)"), ((60.0, 40.0, 50.0), "50.0% (grows)")],
)
def test_time_that_grows_from_many_tokens_on_is_told_from_what_falls(times, said):
    records = [
        {"sizes": SIZES._replace(num_tokens=65536 << i)._asdict(), "ns_per_token": t} for i, t in enumerate(times)
    ]
    few = {"sizes": SIZES._asdict(), "ns_per_token": 999.0}
    assert flatness([few, *records]).startswith(f"From 65,536 tokens on, time per token varies by {said}; up to 15%")
    assert flatness([few, records[0]]) == ""


@pytest.mark.slow
def test_every_recorded_figure_is_drawn_of_the_recorded_files_and_is_small(tmp_path):
    recorded = draw(recorded_results(), tmp_path)
    assert sorted(file.name for file in recorded) == sorted(path.name for path in RESULTS.glob("*.png"))
    assert {file.name: file.stat().st_size for file in recorded if file.stat().st_size > 200_000} == {}


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(ValueError, match="there is no figure of these results: routing"):
        draw([{"records": [{"kind": "routing"}]}], tmp_path)


def words(figure):
    return [text.get_text() for axes in figure.axes for text in (*axes.texts, *axes.get_yticklabels())]


def kernels(*rows):
    records = [{"name": name, "launches": 1, "us": us} for name, us in rows]
    return {"kind": "kernels", "sizes": SIZES._asdict(), "kernels": records}


def test_kernels_are_drawn_by_their_names_as_last_measured_and_small_ones_share_a_bar():
    first, none = kernels(("moe_combine", 20.0)), kernels()
    last = kernels(("moe_combine_mosaic_gpu_kernel", 990.0), ("loop_fusion", 3.0), ("MemcpyD2D", 2.0))
    assert words(plots._kernels([first, last])) == ["990", "5", "moe_combine", "2 others"]
    assert "no kernels" in words(plots._kernels([none]))


def test_a_peer_out_of_memory_is_in_the_figure():
    ours = {"layer": "blaze_jax", "status": "ok", "peak_mib": 12.0}
    peer = {"layer": "a peer", "status": "out of memory: needs 136 GiB", "peak_mib": 139346.0}
    record = {"kind": "memory", "sizes": SIZES._asdict(), "dtype": "bfloat16", "layers": [ours, peer]}
    assert words(plots._planned([record])) == ["12", "out of memory", "blaze_jax", "a peer"]
