"""Figures hold what they are for, and are small."""

import pytest

from blaze_jax.benchmark import plots
from blaze_jax.benchmark.plots import draw
from docs.write_benchmarks import RESULTS, recorded_results

SIZES = {"num_tokens": 8, "model_width": 16, "expert_width": 8, "num_experts": 2, "experts_per_token": 1}


@pytest.mark.slow
def test_every_recorded_figure_is_drawn_of_the_recorded_files_and_is_small(tmp_path):
    recorded = draw(recorded_results(), tmp_path)
    assert sorted(file.name for file in recorded) == sorted(path.name for path in RESULTS.glob("*.png"))
    assert {file.name: file.stat().st_size for file in recorded if file.stat().st_size > 200_000} == {}


def words(figure):
    return [text.get_text() for axes in figure.axes for text in (*axes.texts, *axes.get_yticklabels())]


def kernels(*rows):
    return {
        "kind": "kernels",
        "sizes": SIZES,
        "kernels": [{"name": name, "launches": 1, "us": us} for name, us in rows],
    }


def test_kernels_have_names_without_their_suffix_and_small_ones_share_a_bar():
    record = kernels(("moe_combine_mosaic_gpu_kernel", 990.0), ("loop_fusion", 3.0), ("MemcpyD2D", 2.0))
    assert words(plots._draw_kernels([record])) == ["990", "5", "moe_combine", "2 others"]


def test_of_two_measurements_of_the_same_sizes_the_later_is_drawn():
    first, second = kernels(("moe_combine", 20.0)), kernels(("moe_combine", 10.0))
    assert words(plots._draw_kernels([first, second])) == ["10", "moe_combine"]


def test_without_kernels_the_figure_says_so():
    assert "no kernels" in words(plots._draw_kernels([kernels()]))


def test_a_peer_out_of_memory_is_in_the_figure():
    layers = [
        {"layer": "blaze_jax", "status": "ok", "peak_mib": 12.0},
        {"layer": "a peer", "status": "out of memory: needs 136 GiB", "peak_mib": 139346.0},
    ]
    figure = plots._of_layers("", plots._planned)(
        [{"kind": "memory", "sizes": SIZES, "dtype": "bfloat16", "layers": layers}]
    )
    assert words(figure) == ["12", "out of memory", "blaze_jax", "a peer"]
