"""The benchmark's command line, on sizes too small to time anything."""

import argparse

import pytest

from blaze_jax import benchmark
from blaze_jax.benchmark import Sizes


def test_counts_the_operations_of_three_products():
    assert Sizes.parse("4096,512,256,16,2").forward_flops == 3 * 2 * 4096 * 2 * 512 * 256


@pytest.mark.parametrize("text", ["1,2,3,4", "1,2,3,4,5,6", "a,2,3,4,1", "1,2,3,4,5", "0,2,3,4,1"])
def test_sizes_that_make_no_sense(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' must "):
        Sizes.parse(text)


def test_prints_a_line_for_each_and_their_ratio(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmark", "--config", "16,8,4,3,2", "--repeats", "2"])
    benchmark.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "T=16, d=8, n=4, E=3, K=2"
    for line, (phase, what) in zip(
        lines[2:],
        [(phase, what) for phase in ("forward ", "forward+backward ") for what in ("expert_ffn", "dense FFN", "ratio")],
        strict=True,
    ):
        assert line.strip().startswith(phase)
        assert what in line
