"""Weight gradients: tiles of every shape, and every GPU that they are compiled for."""

import multiprocessing
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.ampere import weight_gradients
from pallas_kernels.ampere.tile import Tile
from pallas_kernels.ampere.tuning import LARGE, SMALL, SMALL_FLOAT32, default_tile
from pallas_kernels.compile_only import compile_for_gpu
from pallas_kernels.compile_only.gpus import GPUS
from pallas_kernels.simt.dispatch import dispatch
from tests.numerics import assert_same_bits
from tests.pallas_kernels.ampere.capabilities import ONE_OF_EACH
from tests.pallas_kernels.rows import D, N, Rows

TILES = [("bfloat16", t) for t in (LARGE, SMALL, Tile(128, 32, 2))] + [("float32", t) for t in (LARGE, SMALL_FLOAT32)]


@pytest.mark.parametrize(("dtype", "tile"), TILES, ids=str)
@pytest.mark.parametrize("stripe", [1, 2])
def test_every_tile_and_order_gives_the_same_bits(kernels, dtype, tile, stripe):
    rows = Rows(kernels, "whole_tiles_and_a_tail")
    x = rows.normal(rows.num_tokens, 3 * D, dtype=dtype)  # several tiles each way
    d_pre = (rows.of_rows(2 * N, dtype=dtype),)
    run = partial(kernels.up_weight_gradients, x, d_pre, rows.groups, dtypes=(dtype,), bias_dtypes=())
    assert_same_bits(run(tile=tile, stripe=stripe), run(tile=Tile(128, 64, 3)))


def test_slots_too_small_for_float32(kernels):
    rows = Rows(kernels, "single_token")
    x, d_pre = rows.normal(rows.num_tokens, D), (rows.of_rows(N),)
    with pytest.raises(ValueError, match="must have a k_step of 64 for float32"):
        kernels.up_weight_gradients(x, d_pre, rows.groups, dtypes=("float32",), bias_dtypes=(), tile=SMALL)


def compiled(gpu: str, dtype: str):
    """Names of the kernels and what they spill."""

    def gradients(x, d_pre, hidden, dy, row_weights, experts):
        tile = default_tile(".".join(map(str, GPUS[gpu].capability)), kind=dtype)
        assert tile.shared_bytes <= GPUS[gpu].block_kib * 1024
        groups = dispatch(experts, 16)
        up, down = weight_gradients.up_weight_gradients, weight_gradients.down_weight_gradients
        return (
            up(x, d_pre, groups, dtypes=("float32", "bfloat16"), bias_dtypes=("float32", "bfloat16"), tile=tile),
            down(hidden, dy, row_weights, groups, dtype=dtype, bias_dtype=dtype, tile=tile),
        )

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    tokens, rows = array(8192, 1024), array(33024, 512)
    arrays = (tokens, (rows, rows), rows, tokens, array(33024, dtype="float32"), array(8192, 4, dtype="int32"))
    program = compile_for_gpu(gradients, *arrays, gpu=gpu)
    return sorted({kernel.name for kernel in program.kernels}), program.spill_bytes


@pytest.mark.compile_only
@pytest.mark.default_sets(2)
@pytest.mark.parametrize(
    ("gpu", "dtype"), [(gpu, dtype) for dtype in ("bfloat16", "float32") for gpu in ONE_OF_EACH] + [("h200", "float16")]
)
def test_compiles_for_every_gpu_without_spills(gpu, dtype):
    kernels = ["moe_dispatch_count", "moe_dispatch_place"]
    kernels += [f"moe_{which}_{what}_gradients" for which in ("down", "up") for what in ("bias", "weight")]
    with multiprocessing.get_context("spawn").Pool(1) as process:
        assert process.apply(compiled, (gpu, dtype)) == (kernels, {})
