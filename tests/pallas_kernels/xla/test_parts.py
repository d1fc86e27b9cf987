"""Rows computed part by part: the portable kernels take groups of some rows, and keep the others in `into`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import xla
from pallas_kernels.xla.loops import accelerator_turn, cpu_turn, turns_of
from tests.numerics import assert_close
from tests.pallas_kernels.rows import ACTIVATIONS

PARTS, TOKENS, EXPERTS, SLOTS, WIDTH = 2, 40, 3, 2, 24


@pytest.fixture
def problem():
    """Operands, and the pairs of all tokens grouped by expert and part; a part has no rows of one expert."""
    rng = np.random.default_rng(0)
    experts = np.stack([rng.permutation(EXPERTS)[:SLOTS] for _ in range(PARTS * TOKENS)])
    part = np.arange(PARTS * TOKENS)[:, None] // TOKENS
    empty = (rng.uniform(size=experts.shape) < 0.1) | ((part == 1) & (experts == 2))
    groups = xla.dispatch(jnp.asarray(np.where(empty, -1, experts * PARTS + part), jnp.int32), EXPERTS * PARTS)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    matrices = [normal(EXPERTS, WIDTH, WIDTH) for _ in range(3)]
    return groups, normal(PARTS * TOKENS, WIDTH), normal(PARTS * TOKENS, WIDTH), matrices, normal(groups.num_rows)


def forth_and_back(xs, dys, matrices, row_weights, pieces):
    """Results of the kernels that fill rows, piece by piece; `pieces` are pairs of the first expert and the groups."""
    *weights, w_down = matrices
    rows = jnp.full((len(row_weights), WIDTH), jnp.nan)
    up, down, back, into, d_row_weights = ((rows, rows), rows), rows, rows, rows, 0
    for x, (first, groups) in zip(xs, pieces, strict=True):
        own = tuple(w[first:] for w in weights)
        up = xla.up_projection(x, own, (), groups, activation=ACTIVATIONS[2], into=up)
    d_pre, hidden = up
    for dy, (first, groups) in zip(dys, pieces, strict=True):
        own = w_down[first:]
        down = xla.down_projection(hidden, own, None, groups, 0, WIDTH, into=down)
        options = {"activation": ACTIVATIONS[2], "into": into}
        d_pre, into, of_piece = xla.down_backward(dy, own, None, d_pre, row_weights, groups, **options)
        d_row_weights += of_piece
        back = xla.up_backward(up[0], tuple(w[first:] for w in weights), groups, 0, WIDTH, into=back)
    return up, down, d_pre, into, d_row_weights, back


def assert_same_rows(found, expected, used):
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(ours[:used], theirs[:used])
        if ours.ndim > 1:
            assert np.isnan(ours[used:]).all()


@pytest.mark.parametrize("turn", [(1, 5), (2, 16)])
def test_pieces_fill_the_same_rows(problem, turn):
    groups, x, dy, matrices, row_weights = problem
    everything, parts = xla.in_parts(groups, PARTS)
    used = int(everything.expert_token_offsets[-1])
    with turns_of(*turn):
        at_once = forth_and_back([x], [dy], matrices, row_weights, [(0, everything)])
        tokens = jnp.split(x, PARTS), jnp.split(dy, PARTS)
        assert_same_rows(forth_and_back(*tokens, matrices, row_weights, [(0, part) for part in parts]), at_once, used)
        blocks = [(e, xla.of_experts(everything, e, 1)) for e in range(EXPERTS)]
        halves = [(0, xla.of_experts(everything, 0, 1)), (0, xla.of_experts(everything, 1, 2, counted_from=0))]
        for pieces in (blocks, halves):
            tokens = [x] * len(pieces), [dy] * len(pieces)
            assert_same_rows(forth_and_back(*tokens, matrices, row_weights, pieces), at_once, used)


def test_turns_suit_an_experts_rows_in_a_piece(problem):
    everything, parts = xla.in_parts(problem[0], PARTS)
    block = xla.of_experts(everything, 1, 1)
    assert cpu_turn(block) == cpu_turn(everything)
    assert accelerator_turn(block, 1).rows == accelerator_turn(everything, 1).rows
    assert accelerator_turn(parts[0], 1).rows < accelerator_turn(everything, 1).rows


def test_gradients_of_blocks_of_experts_with_tokens_in_parts(problem):
    groups, x, dy, _, row_weights = problem
    everything, _ = xla.in_parts(groups, PARTS)
    rows = jnp.tile(row_weights[:, None], WIDTH)

    def gradients(x, dy, groups):
        up, up_bias = xla.up_weight_gradients(x, (rows,), groups, dtypes=("float32",), bias_dtypes=("float32",))
        down = xla.down_weight_gradients(rows, dy, row_weights, groups, dtype="float32", bias_dtype="float32")
        return *up, *up_bias, *down

    split = tuple(jnp.split(x, PARTS)), tuple(jnp.split(dy, PARTS))
    of_blocks = [gradients(*split, xla.of_experts(everything, e, 1)) for e in range(EXPERTS)]
    assert_close([jnp.concatenate(a) for a in zip(*of_blocks, strict=True)], list(gradients(x, dy, everything)))
