"""The same model with conventional experts."""

import importlib
from dataclasses import replace

import jax
import numpy as np
import pytest

from blaze_jax.benchmark.plots import draw
from blaze_jax.benchmark.results import read_results
from tests.train_example.small import FULL_MODEL
from train_example import compare_layers
from train_example.__main__ import main
from train_example.program.presets import PRESETS

CONFIG = replace(PRESETS["tiny"], model=FULL_MODEL, steps=8, batch_size=4, sequence_length=16, dtype="float32")


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Starting processes takes longer than the steps."""
    monkeypatch.setattr(compare_layers, "run_apart", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(compare_layers, "ProcessError", Exception)


@pytest.mark.slow
def test_loss_curves_lie_on_top_of_each_other_and_can_be_drawn(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", CONFIG)
    file = tmp_path / "new" / "training.json"
    options = f"--preset tiny --steps 8 --remat except-experts --experts-layer blaze_jax sort+ragged_dot --json {file}"
    assert compare_layers.main(options.split()) == 0
    out = capsys.readouterr().out
    assert "sort+ragged_dot: final loss differs from that of blaze_jax by" in out
    assert "sort+ragged_dot: first step took" in out
    content = read_results(file)
    assert list(content["records"][1]["phase_seconds"]) == ["initial state", "lowering", "compiling", "first step"]
    assert content["failed"] == []
    assert [path.name for path in draw([content], tmp_path)] == ["training.png"]
    ours, theirs = content["records"]
    assert [ours["layer"], theirs["layer"]] == ["blaze_jax", "sort+ragged_dot"]
    assert len(ours["loss"]) == 8
    np.testing.assert_allclose(ours["loss"][0], theirs["loss"][0], rtol=1e-6)  # parameters and outputs are the same
    np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-3)
    assert ours["loss"][-1] < ours["loss"][0]
    assert abs(theirs["final_loss_difference"]) < 1e-3
    assert min(ours["tokens_per_second"], theirs["tokens_per_second"]) > 0
    if jax.default_backend() == "cpu":
        assert ours["peak_gib"] is None
        assert ours["planned_gib"] > 0


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the devices here are virtual ones of the CPU")
@pytest.mark.parametrize("mesh", [[], ["--mesh", "fsdp=2,expert=2"]], ids=["one device", "a mesh"])
def test_a_dense_twin_trains_for_the_same_time(tmp_path, capsys, monkeypatch, mesh):
    monkeypatch.setitem(PRESETS, "tiny", replace(CONFIG, steps=6))
    monkeypatch.setattr(compare_layers, "_TIMED_STEPS", 3)
    file = tmp_path / "twin.json"
    assert compare_layers.main(["--dense-twin", *mesh, "--steps", "6", "--json", str(file)]) == 0
    assert "a step of blaze_jax takes" in capsys.readouterr().out
    ours, twin = read_results(file)["records"]
    assert [ours["layer"], twin["layer"]] == ["blaze_jax", "dense-twin"]
    assert twin["step_time_ratio"] == ours["step_seconds"] / twin["step_seconds"]
    assert len(twin["loss"]) == twin["steps"] >= 1
    model = CONFIG.model
    width = model.moe().dense_twin(model.width).width
    assert width == 2 * 16 + 8
    of_experts = 3 * model.width * (8 * 16 + 8) + model.width * 8
    assert ours["parameters"] - twin["parameters"] == 2 * (of_experts - 3 * model.width * width)


def test_a_dense_twin_has_no_experts_to_train(capsys):
    for options, named in (
        ("--trained experts", "--trained experts"),
        ("--implementation xla", "--implementation xla"),
    ):
        assert main(["--experts-layer", "dense-twin", *options.split()]) == 2
        assert named in capsys.readouterr().err


def test_a_layer_that_is_not_installed_is_reported(tmp_path, capsys, monkeypatch):
    import_module = importlib.import_module

    def missing(name):
        if name.startswith("tokamax"):
            raise ImportError(name, name="tokamax")
        return import_module(name)  # jax's own, which comes late

    monkeypatch.setattr("blaze_jax.benchmark.peers.importlib.import_module", missing)
    assert compare_layers.main(["--experts-layer", "sort+tokamax"]) == 1
    assert "--experts-layer sort+tokamax cannot run: tokamax is not installed" in capsys.readouterr().err
    assert main(["--experts-layer", "sort+tokamax", "--out", str(tmp_path / "out")]) == 2
    assert "tokamax is not installed" in capsys.readouterr().err


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the preset of a CPU")
def test_a_cpu_trains_the_preset_that_is_made_for_it(capsys, monkeypatch):
    monkeypatch.setattr(compare_layers, "train_briefly", lambda *_: 1 / 0)
    assert compare_layers.main(["--experts-layer", "sort+ragged_dot"]) == 1
    said = capsys.readouterr()
    assert said.out.endswith("; preset tiny\n")
    assert said.err == "sort+ragged_dot: division by zero\n"
