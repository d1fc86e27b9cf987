"""Rows computed part of the tokens by part of the tokens have the bits that all at once have."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hopper
from tests.numerics import assert_same_bits
from tests.pallas_kernels.rows import ACTIVATIONS, needs_interpreter

PARTS, TOKENS, EXPERTS, SLOTS = 2, 40, 3, 2
D, N = 64, 64


def grouped(rng):
    """The pairs of all parts' tokens by expert and part; some slots are empty."""
    experts = np.stack([rng.permutation(EXPERTS)[:SLOTS] for _ in range(PARTS * TOKENS)])
    part = np.arange(PARTS * TOKENS)[:, None] // TOKENS
    keys = np.where(rng.uniform(size=experts.shape) < 0.1, -1, experts * PARTS + part)
    keys = np.where((part == 1) & (experts == 2), -1, keys)  # a part without rows of one expert
    return hopper.dispatch(jnp.asarray(keys, jnp.int32), EXPERTS * PARTS)


@needs_interpreter
@pytest.mark.slow
def test_parts_fill_the_same_rows():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    tokens, gradients = normal(PARTS * TOKENS, D), normal(PARTS * TOKENS, D)
    weights, w_down, b_down = (normal(EXPERTS, D, N), normal(EXPERTS, D, N)), normal(EXPERTS, N, D), normal(EXPERTS, D)
    # No watching for races: down_backward reads whole tiles, of which a neighbour's rows may be written meanwhile.
    with hopper.interpreted(detect_races=False):
        groups = grouped(rng)
        row_weights = jnp.asarray(rng.uniform(size=groups.num_rows), jnp.float32)
        everything, parts = hopper.in_parts(groups, PARTS)

        def forth_and_back(xs, dys, parts):
            up = None
            for x, part in zip(xs, parts, strict=True):
                up = hopper.up_projection(x, weights, (), part, activation=ACTIVATIONS[2], into=up)
            pre, weighted_hidden, d_row_weights = up[0], None, []
            for dy, part in zip(dys, parts, strict=True):
                pre, weighted_hidden, d_row_weight = hopper.down_backward(
                    dy, w_down, b_down, pre, row_weights, part, activation=ACTIVATIONS[2], into=weighted_hidden
                )
                d_row_weights.append(d_row_weight)
            return *up[0], up[1], *pre, weighted_hidden, sum(d_row_weights)

        at_once = jax.jit(forth_and_back)((tokens,), (gradients,), (everything,))
        in_parts = jax.jit(forth_and_back)(jnp.split(tokens, PARTS), jnp.split(gradients, PARTS), parts)
    used = int(everything.expert_token_offsets[-1])
    assert used > PARTS * TOKENS
    for whole, split in zip(at_once, in_parts, strict=True):
        assert_same_bits(whole[:used], split[:used])
    for part, index_map in zip(parts, np.split(np.asarray(everything.token_index_map), PARTS), strict=True):
        np.testing.assert_array_equal(part.token_index_map, index_map)
        assert part.tiles.used == np.sum(part.tiles.valid_rows > 0)


@needs_interpreter
@pytest.mark.slow
def test_blocks_of_experts_fill_the_same_rows_and_gradients():
    """The kernels that in_parts does not meet, and tokens in several arrays."""
    rng, blocks = np.random.default_rng(1), 3
    experts = np.where(rng.uniform(size=(PARTS * TOKENS, SLOTS)) < 0.1, -1, rng.integers(0, EXPERTS, (1, SLOTS)))
    experts = np.stack([rng.permutation(EXPERTS)[:SLOTS] for _ in range(PARTS * TOKENS)]) * (experts >= 0) - (
        experts < 0
    )

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    tokens, weights, w_down = normal(PARTS * TOKENS, D), (normal(EXPERTS, D, N),), normal(EXPERTS, N, D)
    with hopper.interpreted(detect_races=False):
        groups = hopper.dispatch(jnp.asarray(experts, jnp.int32), EXPERTS)
        row_weights = jnp.asarray(rng.uniform(size=groups.num_rows), jnp.float32)
        of_block = EXPERTS // blocks

        def run(pieces, x):
            up: Any = None
            down: Any = None
            back: Any = None
            gradients = []
            for (_, counted_from), piece in pieces.items():
                ups = tuple(w[counted_from:] for w in weights)
                up = hopper.up_projection(tokens, ups, (), piece, activation=ACTIVATIONS[1], into=up)
            for (first, counted_from), piece in pieces.items():
                own = slice(counted_from, EXPERTS)
                ups = tuple(w[own] for w in weights)
                down = hopper.down_projection(up[1], w_down[own], None, piece, 0, D, into=down)
                back = hopper.up_backward(up[0], ups, piece, 0, D, into=back)
                if first == counted_from:
                    narrow = jnp.bfloat16
                    d_down, _ = hopper.down_weight_gradients(
                        up[1], x, row_weights, piece, dtype=narrow, bias_dtype=None
                    )
                    (d_up,), _ = hopper.up_weight_gradients(x, up[0], piece, dtypes=(narrow,), bias_dtypes=())
                    gradients.append((d_down, d_up))
            return up[1], down, back, *(jnp.concatenate(g) for g in zip(*gradients, strict=True))

        at_once = jax.jit(lambda x: run({(0, 0): groups}, x))(tokens)
        pieces = {(b, b): hopper.of_experts(groups, b, of_block) for b in range(0, EXPERTS, of_block)}
        in_blocks = jax.jit(lambda x: run(pieces, x))(tuple(jnp.split(tokens, PARTS)))
        halves = {(0, 0): hopper.of_experts(groups, 0, 1), (1, 0): hopper.of_experts(groups, 1, 2, counted_from=0)}
        in_halves = jax.jit(lambda x: run(halves, x)[:3])(tokens)
    for piece in (*pieces.values(), *halves.values()):
        assert piece.tiles.used == np.sum(piece.tiles.valid_rows > 0)
    used = int(groups.expert_token_offsets[-1])
    assert used > PARTS * TOKENS
    for whole, split in zip(at_once[:3], in_blocks[:3], strict=True):
        assert_same_bits(whole[:used], split[:used])
    for whole, split in zip(at_once[3:], in_blocks[3:], strict=True):
        assert_same_bits(whole, split)
    for whole, split in zip(at_once[:3], in_halves, strict=True):
        assert_same_bits(whole[:used], split[:used])
