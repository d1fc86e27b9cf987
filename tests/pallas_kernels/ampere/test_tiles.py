"""Tiles of every shape."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.ampere.operands import PIECE_ROWS, Pieces, Tile
from pallas_kernels.tuning.parameters import MmaTuning, mma_heuristic
from tests.numerics import assert_close, assert_same_bits
from tests.pallas_kernels.rows import ACTIVATIONS, D, N, Rows, product

LARGE, SMALL = (mma_heuristic("up_projection", "bfloat16", capability) for capability in ("8.0", "8.6"))
TILES = [
    LARGE,
    SMALL,
    MmaTuning(128, 64, 3, abreast=2),
    MmaTuning(128, 64, 3, sweep=2),
    *(MmaTuning(columns, k_step, 2) for columns in (128, 256) for k_step in (32, 64)),
]


@pytest.mark.default_cases("ampere-bfloat16-MmaTuning(columns=128, *, abreast=2, *)")
@pytest.mark.ci_cases(
    "ampere-bfloat16-MmaTuning(columns=128, k_step=32, stages=2, *)",
    "ampere-float32-MmaTuning(columns=128, *, sweep=2)",
)
@pytest.mark.parametrize(
    ("dtype", "tile"), [("bfloat16", t) for t in TILES] + [("float32", t) for t in TILES if t.k_step == 64], ids=str
)
def test_every_tile_gives_the_same_bits(kernels, dtype, tile):
    rows = Rows(kernels, "whole_tiles_and_a_tail")
    x = rows.normal(rows.num_tokens, 3 * D, dtype=dtype)  # of more steps than the ring has slots
    weights = tuple(rows.normal(rows.num_experts, 3 * D, N, fan_in=3 * D) for _ in range(2))
    pre, hidden = (
        kernels.up_projection(x, weights, (), rows.groups, activation=ACTIVATIONS[2], tuning=t)
        for t in (tile, TILES[-1])
    )
    owned = rows.owned
    assert_same_bits(*(jax.tree.map(lambda a: a[owned], out) for out in (pre, hidden)))


@pytest.mark.parametrize("sweep", [2, 4])
def test_sweeps_give_the_same_bits(kernels, sweep):
    """In each row kernel, over three column tiles, so that a sweep ends before its tiles do."""
    rows, n = Rows(kernels, "single_token"), 2 * 128 + 8
    x, row_weights = rows.normal(rows.num_tokens, n, dtype="bfloat16"), rows.of_rows()
    pre = tuple(rows.of_rows(n, dtype="bfloat16") for _ in range(2))
    w_up = tuple(rows.normal(rows.num_experts, n, n, dtype="bfloat16", fan_in=n) for _ in range(2))

    def run(tile):
        down = kernels.down_projection(pre[0], w_up[0], None, rows.groups, 0, n, tuning=tile)
        options = {"activation": ACTIVATIONS[2], "tuning": tile}
        back = kernels.down_backward(x, w_up[1], None, pre, row_weights, rows.groups, **options)
        return down, back, kernels.up_backward(pre, w_up, rows.groups, 0, n, tuning=tile)

    found, expected = (jax.tree.map(lambda a: a[rows.owned], run(MmaTuning(128, 64, 3, sweep=s))) for s in (sweep, 1))
    assert_same_bits(found, expected)


SHORT, LONG = (Tile(MmaTuning(256, k_step, 3), "bfloat16") for k_step in (32, 64))
NARROW, WIDE = Pieces(LONG, 1, 64), Pieces(Tile(LARGE, "float32"), 1, 64)
LOADED = {
    "rows of few columns": (SHORT.lhs_word, SHORT.depth, SHORT.chunks, 1),
    "rows of many columns": (LONG.lhs_word, LONG.depth, LONG.chunks, 1),
    "few rows of panels": (SHORT.panel_word, SHORT.depth, 8, 1),
    "many rows of panels": (LONG.panel_word, LONG.depth, 8, 1),
    "panels of float32": (WIDE.tile.panel_word, WIDE.tile.depth, 8, 2),
    "pieces": (NARROW.word, PIECE_ROWS, NARROW.chunks, 1),
    "pieces of float32": (WIDE.word, PIECE_ROWS, WIDE.chunks, 2),
}
"""Where 16 bytes are, for how many rows and chunks, and how many neighbouring chunks are loaded together."""


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("name", LOADED)
def test_what_is_loaded_at_once_is_in_all_banks(name):
    word, rows, chunks, together = LOADED[name]
    for first in range(0, chunks, together):
        words = [word(8 + row, first + chunk) for row in range(8 // together) for chunk in range(together)]
        assert {word % 32 for word in words} == set(range(0, 32, 4))
    assert len({word(row, chunk) for row in range(rows) for chunk in range(chunks)}) == rows * chunks


def test_biases_are_added_before_the_activation(kernels):
    rows = Rows(kernels, "single_token")
    x = rows.normal(rows.num_tokens, D, dtype="bfloat16")
    weights, biases = rows.normal(rows.num_experts, D, 16, fan_in=D / 9), rows.normal(rows.num_experts, 16)
    _, hidden = kernels.up_projection(x, (weights,), (biases,), rows.groups, activation=ACTIVATIONS[1])
    pre = product(rows.gather(x), rows.per_row(weights.astype("bfloat16"))) + rows.per_row(biases)
    assert_close(hidden[rows.owned], ACTIVATIONS[1](jnp.asarray(pre, jnp.float32))[rows.owned], 5e-3)
