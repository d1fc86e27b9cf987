"""The same model with conventional experts."""

import importlib
from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax.benchmark.own_process import ProcessError
from blaze_jax.benchmark.plots import draw
from blaze_jax.benchmark.results import read_results
from tests.train_example.small import FULL_MODEL, windows
from train_example import compare_layers
from train_example.__main__ import main
from train_example.config import UserError
from train_example.model import Decoder
from train_example.program.experts_layer import experts_function
from train_example.program.presets import PRESETS

CONFIG = replace(PRESETS["tiny"], model=FULL_MODEL, steps=8, batch_size=4, sequence_length=16, dtype="float32")


@pytest.mark.slow
def test_the_same_parameters_outputs_and_router_state():
    ours, theirs = (
        Decoder(FULL_MODEL, FULL_MODEL.moe(), jnp.float32, "none", experts_function(layer))
        for layer in ("blaze_jax", "sort+ragged_dot")
    )
    tokens = windows(2, 16)
    variables, their_variables = (nn.unbox(jax.jit(m.init)(jax.random.key(0), tokens)) for m in (ours, theirs))
    jax.tree.map(np.testing.assert_array_equal, variables, their_variables)
    train = {"train": True, "mutable": ["losses", "intermediates", "router_state"]}
    (y, state), (their_y, their_state) = (
        jax.jit(partial(model.apply, **train))(variables, tokens) for model in (ours, theirs)
    )
    np.testing.assert_allclose(y, their_y, rtol=1e-4, atol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), state, their_state)


@pytest.mark.slow
def test_loss_curves_lie_on_top_of_each_other_and_can_be_drawn(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare_layers, "run_apart", in_this_process)
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
    np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-3)
    assert ours["loss"][-1] < ours["loss"][0]
    assert abs(theirs["final_loss_difference"]) < 1e-3
    assert min(ours["tokens_per_second"], theirs["tokens_per_second"]) > 0
    if jax.default_backend() == "cpu":
        assert ours["peak_gib"] is None
        assert ours["planned_gib"] > 0


def in_this_process(function, *arguments):
    """Starting processes takes longer than the steps."""
    try:
        return function(*arguments)
    except Exception as error:
        raise ProcessError(f"{type(error).__name__}: {error}") from error


def test_a_layer_that_is_not_installed_is_reported(tmp_path, capsys, monkeypatch):
    import_module = importlib.import_module

    def missing(name):
        if name.startswith("tokamax"):
            raise ImportError(name, name="tokamax")
        return import_module(name)  # jax's own, which comes late

    monkeypatch.setattr("blaze_jax.benchmark.peers.importlib.import_module", missing)
    with pytest.raises(UserError, match="sort\\+tokamax cannot run: tokamax is not installed"):
        experts_function("sort+tokamax")
    monkeypatch.setattr(compare_layers, "run_apart", in_this_process)
    assert compare_layers.main(["--experts-layer", "sort+tokamax"]) == 1
    assert "tokamax is not installed" in capsys.readouterr().err
    assert main(["--experts-layer", "sort+tokamax", "--out", str(tmp_path / "out")]) == 2
    assert "tokamax is not installed" in capsys.readouterr().err


def test_an_implementation_of_our_kernels_means_nothing_to_another_layer(tmp_path, capsys):
    options = ["--experts-layer", "sort+ragged_dot", "--implementation", "xla", "--out", str(tmp_path / "out")]
    assert main(options) == 2
    assert "--implementation xla is of blaze_jax's kernels" in capsys.readouterr().err


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the preset of a CPU")
def test_a_cpu_trains_the_preset_that_is_made_for_it(capsys, monkeypatch):
    monkeypatch.setattr(compare_layers, "run_apart", in_this_process)
    monkeypatch.setattr(compare_layers, "train_briefly", lambda config: 1 / 0)
    assert compare_layers.main(["--experts-layer", "sort+ragged_dot"]) == 1
    said = capsys.readouterr()
    assert said.out.endswith("; preset tiny\n")
    assert said.err == "sort+ragged_dot: ZeroDivisionError: division by zero\n"


def test_counts_must_be_positive(capsys):
    with pytest.raises(SystemExit):
        compare_layers.main(["--steps", "0"])
    assert "argument --steps: 0 must be at least 1" in capsys.readouterr().err
