"""Kernels that decode their weights: the numbers that they give with decoded ones, whatever the form and the tile."""

import pytest

from pallas_kernels import ampere
from pallas_kernels.tuning.parameters import MmaTuning
from tests.numerics import assert_close, assert_same_bits
from tests.pallas_kernels.hopper.test_decoding import (
    KERNELS,
    call,
    compressed_and_not,
    of_forms,
    of_sizes,
    on_a_gpu,
    operands,
)
from tests.pallas_kernels.rows import Rows, needs_interpreter

TILES = MmaTuning(128, 64, 3), MmaTuning(256, 32, 2), MmaTuning(128, 32, 3, sweep=2)


@needs_interpreter
@pytest.mark.parametrize("kernel", KERNELS)
@of_forms
@pytest.mark.parametrize("sizes", [(320, 192), (96, 224)], ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.default_cases(f"{TILES[0]}-(320, 192)-nf4-up_projection", f"{TILES[0]}-(96, 224)-float8-up_backward")
@pytest.mark.ci_cases(f"{TILES[1]}-(96, 224)-mxfp4-down_projection", f"{TILES[2]}-(320, 192)-mxfp4-down_backward")
def test_the_numbers_of_decoded_weights(kernel, form, sizes, tile):
    """With parts of tiles and of steps at the ends; numpy adds up in an order of its own, tensor cores in one."""
    if form == "nf4" and sizes[0] % 64:
        sizes = (128, 192)
    with ampere.interpreted():
        rows = Rows(ampere, "whole_tiles_and_a_tail")
        x, of_rows, weights = operands(rows.rng, rows.num_experts, rows.num_rows, rows.num_tokens, *sizes)
        found, expected = (
            call(kernel, rows.groups, x, of_rows, *both, (64, 32), family=ampere, tuning=tile)
            for both in compressed_and_not(weights, form)
        )
    assert_close(found, expected, 1e-6)


@pytest.mark.gpu
@of_forms
@of_sizes
def test_the_bits_of_decoded_weights_on_a_gpu(sizes, form):
    assert_same_bits(*on_a_gpu(ampere, sizes, form))
