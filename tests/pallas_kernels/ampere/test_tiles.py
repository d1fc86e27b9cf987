"""Tiles of every shape, all activations, and every GPU that the kernels are compiled for."""

import multiprocessing

import jax
import jax.numpy as jnp
import pytest

from blaze_jax.activations import ACTIVATION_NAMES, get_activation
from pallas_kernels import ampere
from pallas_kernels.ampere.panels import Panels
from pallas_kernels.ampere.tile import Tile
from pallas_kernels.ampere.tuning import LARGE, SMALL, default_tile
from pallas_kernels.compile_only import compile_for_gpu
from pallas_kernels.compile_only.gpus import GPUS
from tests.numerics import assert_close, assert_same_bits
from tests.pallas_kernels.ampere.capabilities import ONE_OF_EACH
from tests.pallas_kernels.rows import ACTIVATIONS, D, N, Rows, product

TILES = [LARGE, SMALL, *(Tile(columns, k_step, 2) for columns in (128, 256) for k_step in (32, 64))]


@pytest.mark.default_sets(len(TILES))
@pytest.mark.parametrize(
    ("dtype", "tile"), [("bfloat16", t) for t in TILES] + [("float32", t) for t in TILES if t.k_step == 64], ids=str
)
def test_every_tile_gives_the_same_bits(kernels, dtype, tile):
    rows = Rows(kernels, "whole_tiles_and_a_tail")
    x = rows.normal(rows.num_tokens, 3 * D, dtype=dtype)  # of more steps than the ring has slots
    weights = tuple(rows.normal(rows.num_experts, 3 * D, N, fan_in=3 * D) for _ in range(2))
    pre, hidden = (
        kernels.up_projection(x, weights, (), rows.groups, activation=ACTIVATIONS[2], tile=t) for t in (tile, TILES[-1])
    )
    owned = rows.owned
    assert_same_bits(*(jax.tree.map(lambda a: a[owned], out) for out in (pre, hidden)))


@pytest.mark.default_sets(len(TILES))
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_eight_rows_of_a_matrix_are_in_all_banks(tile):
    panels = Panels.of(tile, "bfloat16")
    for word, chunks in ((tile.lhs_word, tile.k_step // 8), (panels.word, 8)):
        for chunk in range(chunks):
            banks = {word(8 + row, chunk) % 32 for row in range(8)}
            assert banks == set(range(0, 32, 4))
        own = {word(row, chunk) for row in range(tile.k_step) for chunk in range(chunks)}
        assert len(own) == tile.k_step * chunks


def test_four_rows_of_eight_numbers_are_in_all_banks():
    panels = Panels.of(LARGE, "float32")
    for column in range(0, 32, 8):
        columns = [divmod(column + i, 4) for i in range(8)]
        assert len({(panels.word(4 + row, chunk) + i) % 32 for row in range(4) for chunk, i in columns}) == 32
    assert len({panels.word(row, chunk) for row in range(32) for chunk in range(8)}) == 256


@pytest.mark.default_sets(len(ACTIVATION_NAMES))
@pytest.mark.parametrize("name", ACTIVATION_NAMES)
def test_every_activation(kernels, name):
    rows = Rows(kernels, "single_token")
    activation = get_activation(name)
    x = rows.normal(rows.num_tokens, D, dtype="bfloat16")
    weights = tuple(rows.normal(rows.num_experts, D, 16, fan_in=D / 9) for _ in range(1 + activation.gated))
    _, hidden = kernels.up_projection(x, weights, (), rows.groups, activation=activation.function)
    pre = [product(rows.gather(x), rows.per_row(w.astype("bfloat16"))) for w in weights]
    expected = activation.function(*(jnp.asarray(p, jnp.float32) for p in pre))
    assert_close(hidden[rows.owned], expected[rows.owned], 5e-3)


def compiled(gpu: str, name: str, dtype: str):
    """Names of the kernels and what they spill."""

    def kernels(x, w_up, b_up, w_down, b_down, row_weights, experts):
        tile = default_tile(".".join(map(str, GPUS[gpu].capability)), kind=dtype)
        assert tile.shared_bytes <= GPUS[gpu].block_kib * 1024
        groups = ampere.dispatch(experts, 16)
        pre, hidden = ampere.up_projection(x, w_up, b_up, groups, activation=activation.function, tile=tile)
        out = ampere.down_projection(hidden, w_down, b_down, groups, 128, 256, tile=tile)
        function = activation.function
        d_pre, *others = ampere.down_backward(
            x, w_down, b_down, pre, row_weights, groups, activation=function, tile=tile
        )
        return out, others, ampere.up_backward(d_pre, w_up, groups, 128, 256, tile=tile)

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    activation = get_activation(name)
    projections = 1 + activation.gated
    up, up_bias = (array(16, 1024, 512),) * projections, (array(16, 512),) * projections
    down, down_bias = array(16, 512, 1024), array(16, 1024)
    row_weights, experts = array(33024, dtype="float32"), array(8192, 4, dtype="int32")
    arrays = (array(8192, 1024), up, up_bias, down, down_bias, row_weights, experts)
    program = compile_for_gpu(kernels, *arrays, gpu=gpu)
    return sorted(kernel.name for kernel in program.kernels), program.spill_bytes


EVERYWHERE = [("swiglu", "bfloat16"), ("clamped_swiglu", "bfloat16"), ("swiglu", "float32")]
"""The usual one, and the one that takes most registers; the others are compiled for a GPU in each type."""

OTHERS = [name for name in ACTIVATION_NAMES if (name, "bfloat16") not in EVERYWHERE]


@pytest.mark.compile_only
@pytest.mark.default_sets(2)
@pytest.mark.parametrize(
    ("gpu", "name", "dtype"),
    [(gpu, *kind) for kind in EVERYWHERE for gpu in ONE_OF_EACH]
    + [
        (ONE_OF_EACH[(2 * i + j) % len(ONE_OF_EACH)], name, dtype)
        for i, name in enumerate(OTHERS)
        for j, dtype in enumerate(("bfloat16", "float32"))
    ],
)
def test_compiles_for_every_gpu_without_spills(gpu, name, dtype):
    kernels = ["moe_dispatch_count", "moe_dispatch_place"]
    kernels += [f"moe_{which}_{what}" for which in ("down", "up") for what in ("backward", "projection")]
    with multiprocessing.get_context("spawn").Pool(1) as process:
        assert process.apply(compiled, (gpu, name, dtype)) == (kernels, {})
