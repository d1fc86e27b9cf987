"""The command line, on sizes too small to time anything."""

import json

import jax
import pytest

from blaze_jax.benchmark.__main__ import main


def run(monkeypatch, *options):
    monkeypatch.setattr("sys.argv", ["benchmark", *options])
    main()


def test_the_table_of_kernels_and_its_json(capsys, monkeypatch, tmp_path):
    file = tmp_path / "results.json"
    run(monkeypatch, "--kernels", "--config", "16,8,4,3,2", "--repeats", "2", "--json", str(file))
    out = capsys.readouterr().out
    assert f"jax {jax.__version__}" in out.splitlines()[0]
    assert "T=16, d=8, n=4, E=3, K=2, bfloat16" in out
    written = json.loads(file.read_text(encoding="utf-8"))
    (record,) = written["records"]
    assert record["sizes"]["num_experts"] == 3
    assert record["passes"].keys() == {"forward", "forward+backward"}
    for timed in record["passes"].values():
        assert len(timed["samples_us"]) == 2
        assert timed["tflops"] > 0
    if jax.default_backend() == "cpu":
        assert "wall time, there is no GPU" in out
        assert written["environment"]["device"] == "cpu"


def test_repeats_must_be_positive(capsys, monkeypatch):
    with pytest.raises(SystemExit):
        run(monkeypatch, "--repeats", "0")
    assert "--repeats 0 must be at least 1" in capsys.readouterr().err
