"""Sizes from the command line and by name."""

import argparse

import pytest

from blaze_jax.benchmark.sizes import PRESET_NAMES, Sizes, preset


def test_counts_the_operations_of_three_products():
    assert Sizes.parse("4096,512,256,16,2").forward_flops == 3 * 2 * 4096 * 2 * 512 * 256


@pytest.mark.parametrize("text", ["1,2,3,4", "1,2,3,4,5,6", "a,2,3,4,1", "1,2,3,4,5", "0,2,3,4,1"])
def test_sizes_that_make_no_sense(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' must "):
        Sizes.parse(text)


def test_presets_have_as_many_expert_parameters_as_their_models():
    layers = {"mixtral": (32, 45.1e9), "qwen3-30b-a3b": (48, 29.0e9), "olmoe": (16, 6.4e9), "gpt-oss-20b": (24, 19.1e9)}
    assert set(PRESET_NAMES) == {*layers, "deepseek-v3"}
    for name, (number, parameters) in layers.items():
        assert number * preset(name, 1).weight_elements == pytest.approx(parameters, rel=0.01)
    assert 58 * preset("deepseek-v3", 1).weight_elements == pytest.approx(653.9e9, rel=0.01)
