"""Weight gradients: tiles of every shape."""

from dataclasses import replace
from functools import partial

import pytest

from pallas_kernels.tuning.parameters import MmaTuning, mma_heuristic
from tests.numerics import assert_same_bits
from tests.pallas_kernels.rows import D, N, Rows

SMALL = mma_heuristic("up_projection", "bfloat16", "8.6")
TILES = [
    (kind, mma_heuristic("up_projection", kind, gpu)) for kind in ("bfloat16", "float32") for gpu in ("8.0", "8.6")
]


@pytest.mark.parametrize(("dtype", "tile"), [*TILES, ("bfloat16", MmaTuning(128, 32, 2))], ids=str)
@pytest.mark.parametrize(("abreast", "sweep"), [(1, 1), (2, 1), (2, 2)])
def test_every_tile_and_order_gives_the_same_bits(kernels, dtype, tile, abreast, sweep):
    rows = Rows(kernels, "whole_tiles_and_a_tail")
    x = rows.normal(rows.num_tokens, 3 * D, dtype=dtype)  # several tiles each way
    d_pre = (rows.of_rows(2 * N, dtype=dtype),)
    run = partial(kernels.up_weight_gradients, x, d_pre, rows.groups, dtypes=(dtype,), bias_dtypes=())
    assert_same_bits(run(tuning=replace(tile, abreast=abreast, sweep=sweep)), run(tuning=MmaTuning(128, 64, 3)))


def test_slots_too_small_for_float32(kernels):
    rows = Rows(kernels, "single_token")
    x, d_pre = rows.normal(rows.num_tokens, D), (rows.of_rows(N),)
    with pytest.raises(ValueError, match="must have a k_step of 64 for float32"):
        kernels.up_weight_gradients(x, d_pre, rows.groups, dtypes=("float32",), bias_dtypes=(), tuning=SMALL)
