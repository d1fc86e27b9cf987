"""The command, where there is a GPU to tune and where there is none."""

import json

import pytest

from blaze_jax.tune import trials
from blaze_jax.tune.__main__ import FAMILIES, NAMES, line, main
from blaze_jax.tune.trials import Found
from pallas_kernels.mosaic.device import compute_capability
from pallas_kernels.mosaic.interpreter import interpreted
from pallas_kernels.tuning import read_tunings
from pallas_kernels.tuning.parameters import KINDS, MMA, MmaTuning, TileTuning, nvidia_gpu

CONFIG = ["--config", "512,1024,512,8,4"]


@pytest.mark.skipif(nvidia_gpu() is not None, reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_a_line(capsys, tmp_path):
    file = tmp_path / "tuning.json"
    assert main([*CONFIG, "--output", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "there is no NVIDIA GPU since Ampere here" in err
    assert not file.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the following arguments are required: --config"),
        ([*CONFIG, "--kernel", "sideways"], "invalid choice: 'sideways'"),
        ([*CONFIG, "--seconds", "0"], "--seconds 0.0 must be positive"),
        ([*CONFIG, "--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_options_that_do_not_fit(options, message, capsys):
    with pytest.raises(SystemExit):
        main(options)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "variable", "message"),
    [
        ([], "", "BLAZE_JAX_TUNING is empty, which means no file: say --output FILE"),
        (["--output", "{tmp}/bad.json"], "", "bad.json is no file of tuned parameters"),
        (["--output", "{tmp}/bad.json/below.json"], "", "cannot be written"),
    ],
)
def test_a_file_that_cannot_be_written_is_told_before_measuring(
    options, variable, message, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr("blaze_jax.tune.__main__.nvidia_gpu", lambda: "NVIDIA H200")
    monkeypatch.setattr("blaze_jax.tune.__main__.tune_layer", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.setenv("BLAZE_JAX_TUNING", variable)
    (tmp_path / "bad.json").write_text("{}")
    assert main([*CONFIG, *(o.format(tmp=tmp_path) for o in options)]) == 2
    assert message in capsys.readouterr().err


def test_what_is_found_is_printed_and_written(capsys, monkeypatch, tmp_path):
    found = Found("rows=2^11,d=8", TileTuning(tile_width=8), 90.0, 100.0, 5)
    monkeypatch.setattr("blaze_jax.tune.__main__.nvidia_gpu", lambda: "NVIDIA H200")
    monkeypatch.setattr("blaze_jax.tune.__main__.tune_layer", lambda *_, **__: ({"up_projection": found}, ["a note"]))
    for options in ([], ["--output", str(tmp_path / "own.json")]):
        monkeypatch.setenv("BLAZE_JAX_TUNING", str(tmp_path / "user.json"))
        assert main([*CONFIG, *options]) == 0
        out = capsys.readouterr().out
        assert line("up_projection", found) in out
        assert "note: a note" in out
    assert "100.0 us ->      90.0 us -10.0%, best of 5: stages=4, minor_dim=0, tile_width=8" in line("x", found)
    for name in ("user.json", "own.json"):
        tunings, problems = read_tunings(tmp_path / name)
        assert tunings == {("NVIDIA H200", "up_projection", "rows=2^11,d=8"): TileTuning(tile_width=8)}
        assert problems == []


@pytest.mark.slow
@pytest.mark.skipif(nvidia_gpu() is not None, reason="in the interpreter")
def test_the_whole_command_in_the_interpreter(capsys, monkeypatch, tmp_path):
    rule, other = MmaTuning(128, 32, 2), MmaTuning(128, 32, 3)
    monkeypatch.setattr(trials, "candidates", lambda kernel, shape: (rule, other))
    monkeypatch.setattr("blaze_jax.tune.__main__.nvidia_gpu", lambda: "NVIDIA H200")
    monkeypatch.setenv("BLAZE_JAX_TUNING", "")
    file = tmp_path / "tuning.json"
    with interpreted():
        assert main(["--config", "8,8,8,2,1", "--family", "ampere", "--seconds", "600", "--output", str(file)]) == 0
    out = capsys.readouterr().out
    assert "does not compile" not in out
    assert "other bits" not in out
    tunings, problems = read_tunings(file)
    assert problems == []
    assert {kernel for _, kernel, _ in tunings} == {name for name in KINDS if name.startswith(MMA)}
    assert set(tunings.values()) <= {rule, other}


@pytest.mark.gpu
@pytest.mark.skipif(nvidia_gpu() is None, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_tuning_on_the_gpu(capsys, monkeypatch, tmp_path, family):
    if family == "hopper" and compute_capability() != "9.0":
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setenv("BLAZE_JAX_TUNING", "")
    file = tmp_path / "tuning.json"
    assert main([*CONFIG, "--family", family, "--seconds", "30", "--output", str(file)]) == 0
    out = capsys.readouterr().out
    assert "other bits" not in out
    assert "does not compile" not in out
    tunings, problems = read_tunings(file)
    assert problems == []
    mma = {name for name in KINDS if name.startswith(MMA)}
    assert {kernel for _, kernel, _ in tunings} == (mma if family == "ampere" else set(NAMES))
    (entries,) = json.loads(file.read_text())["tunings"].values()
    assert all(e["measured"]["us"] > 0 for shapes in entries.values() for e in shapes.values())
