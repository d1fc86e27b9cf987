"""Rows computed in parts of the tokens, blocks of experts or ranges of rows: others stay as they are."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hopper, xla
from pallas_kernels.mosaic.row_groups import SPARE_ROWS, TILE_ROWS
from tests.numerics import assert_close, assert_same_bits
from tests.pallas_kernels.rows import ACTIVATIONS, Rows, portable_dispatch
from tests.routings import ROUTINGS

PARTS, TOKENS, EXPERTS, SLOTS, WIDTH = 2, 40, 3, 2, 24
RANGE = 200


# `down_backward` reads whole tiles, of which a neighbour's rows may be written meanwhile: that is no race.
without_races = pytest.mark.parametrize("detect_races", [False])
over_families = pytest.mark.parametrize("kernels", ["xla", "xla_batched", "mosaic_gpu"], indirect=True)


@pytest.fixture
def problem(kernels):
    """Operands, and the pairs of all tokens grouped by expert and part; a part has no rows of one expert."""
    rng = np.random.default_rng(0)
    experts = np.stack([rng.permutation(EXPERTS)[:SLOTS] for _ in range(PARTS * TOKENS)])
    part = np.arange(PARTS * TOKENS)[:, None] // TOKENS
    empty = (rng.uniform(size=experts.shape) < 0.1) | ((part == 1) & (experts == 2))
    groups = kernels.dispatch(jnp.asarray(np.where(empty, -1, experts * PARTS + part), jnp.int32), EXPERTS * PARTS)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32 if kernels is xla else jnp.bfloat16)

    matrices = [normal(EXPERTS, WIDTH, WIDTH) for _ in range(3)]
    x, dy, b_down = normal(PARTS * TOKENS, WIDTH), normal(PARTS * TOKENS, WIDTH), normal(EXPERTS, WIDTH)
    return groups, x, dy, (*matrices, b_down), normal(groups.num_rows).astype(jnp.float32)


def forth_and_back(kernels, quantize, xs, dys, matrices, row_weights, firsts, pieces):
    """Results of the kernels that fill rows, piece by piece: the first expert of each, and its groups."""
    *weights, w_down, b_down = matrices
    rows = jnp.full((len(row_weights), WIDTH), jnp.nan, xs[0].dtype)
    up, down, back, into, d_row_weights = None if quantize else ((rows, rows), rows), rows, rows, rows, 0
    for x, first, groups in zip(xs, firsts, pieces, strict=True):
        own = tuple(w[first:] for w in weights)
        up = kernels.up_projection(x, own, (), groups, activation=ACTIVATIONS[2], into=up, quantize=quantize)
    d_pre, hidden = up
    if quantize:
        pre, d_pre, up = d_pre, (rows, rows), ((hidden, hidden), hidden)
    for dy, first, groups in zip(dys, firsts, pieces, strict=True):
        own = w_down[first:], b_down[first:]
        down = kernels.down_projection(hidden, *own, groups, 0, WIDTH, into=down)
        given, into = (pre, (d_pre, into)) if quantize else (d_pre, into)
        options = {"activation": ACTIVATIONS[2], "into": into}
        d_pre, into, of_piece = kernels.down_backward(dy, *own, given, row_weights, groups, **options)
        d_row_weights += of_piece
        back = kernels.up_backward(up[0], tuple(w[first:] for w in weights), groups, 0, WIDTH, into=back)
    return None if quantize else up, down, d_pre, into, d_row_weights, back


@over_families
@without_races
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.default_cases("True-False-xla")
@pytest.mark.ci_cases("False-False-xla*")
def test_pieces_fill_the_same_rows(kernels, problem, quantize):
    groups, x, dy, matrices, row_weights = problem
    everything, parts = kernels.in_parts(groups, PARTS)
    used = int(everything.expert_token_offsets[-1])
    assert used > PARTS * TOKENS

    def results(xs, dys, pieces):
        firsts, groups = zip(*pieces, strict=True)
        run = jax.jit(partial(forth_and_back, kernels, quantize, xs, dys, matrices, row_weights, firsts))
        return jax.tree.leaves(run(groups))

    at_once = results([x], [dy], [(0, everything)])
    blocks = [(e, kernels.of_experts(everything, e, 1)) for e in range(EXPERTS)]
    halves = [(0, kernels.of_experts(everything, 0, 1)), (0, kernels.of_experts(everything, 1, 2, counted_from=0))]
    cuts = [(jnp.split(x, PARTS), jnp.split(dy, PARTS), [(0, part) for part in parts])]
    cuts += [([x] * len(pieces), [dy] * len(pieces), pieces) for pieces in (blocks, halves)]
    for cut in cuts:
        for ours, theirs in zip(results(*cut), at_once, strict=True):
            (assert_close if kernels is xla else assert_same_bits)(ours[:used], theirs[:used])
            assert ours.ndim == 1 or np.isnan(np.asarray(ours[used:], np.float32)).all()
    for part, index_map in zip(parts, np.split(np.asarray(everything.token_index_map), PARTS), strict=True):
        assert_same_bits(part.token_index_map, index_map)
    if kernels is not xla:
        for piece in (*parts, *(own for _, own in (*blocks, *halves))):
            assert piece.tiles.used == np.sum(piece.tiles.valid_rows > 0)


@over_families
@without_races
@pytest.mark.default_cases("*xla")
def test_gradients_of_blocks_of_experts_with_tokens_in_parts(kernels, problem):
    groups, x, dy, _, row_weights = problem
    everything, _ = kernels.in_parts(groups, PARTS)
    rows = jnp.tile(row_weights[:, None], WIDTH).astype(x.dtype)

    @jax.jit
    def gradients(x, dy, groups):
        up, up_bias = kernels.up_weight_gradients(x, (rows,), groups, dtypes=("float32",), bias_dtypes=("float32",))
        down = kernels.down_weight_gradients(rows, dy, row_weights, groups, dtype="float32", bias_dtype="float32")
        return *up, *up_bias, *down

    split = tuple(jnp.split(x, PARTS)), tuple(jnp.split(dy, PARTS))
    of_blocks = [gradients(*split, kernels.of_experts(everything, e, 1)) for e in range(EXPERTS)]
    together = [jnp.concatenate(a) for a in zip(*of_blocks, strict=True)]
    (assert_close if kernels is xla else assert_same_bits)(together, list(gradients(x, dy, everything)))


@pytest.mark.parametrize("family", [xla, hopper])
@pytest.mark.parametrize("routing", ["random", "empty_slots", "many_tiles", "all_slots_empty"])
@pytest.mark.parametrize("first", [0, 64, 10_000])
@pytest.mark.default_cases(
    "0-empty_slots-*xla", "64-random-*hopper", "64-empty_slots-*hopper", "10000-random-*", "10000-empty_slots-*xla"
)
def test_indices_of_a_range(family, routing, first):
    experts, num_experts = ROUTINGS[routing]
    spare = SPARE_ROWS if family is hopper else 0
    groups = portable_dispatch(jnp.asarray(experts), num_experts, row_alignment=8, spare_rows=spare)
    out = jax.jit(family.row_range, static_argnums=2)(groups, first, RANGE)
    assert out.num_rows == RANGE + spare
    starts = np.clip(np.asarray(groups.expert_token_offsets) - first, 0, RANGE)
    assert_same_bits(out.expert_token_offsets, starts)
    tokens = np.full(RANGE + spare, len(experts), np.int32)
    mine = np.asarray(groups.expert_token_indices)[first : first + starts[-1]]
    tokens[: mine.size] = mine
    assert_same_bits(out.expert_token_indices, tokens)
    place = np.asarray(groups.token_index_map) - first
    assert_same_bits(out.token_index_map, np.where((place >= 0) & (place < starts[-1]), place, RANGE + spare))
    if family is hopper:
        tiles = [tile for tile in zip(*(np.asarray(a).tolist() for a in out.tiles.arrays), strict=True) if tile[2]]
        expected = [
            (expert, row, min(starts[expert + 1] - row, TILE_ROWS))
            for expert in range(num_experts)
            for row in range(starts[expert], starts[expert + 1], TILE_ROWS)
        ]
        assert tiles == expected
        assert out.tiles.used.tolist() == [len(expected)]


@pytest.mark.slow
def test_ranges_together_are_all_rows(kernels):
    rows = Rows(kernels, "whole_tiles_and_a_tail")
    dtype = "float32" if kernels is xla else "bfloat16"
    x = rows.normal(rows.num_tokens, 64, dtype=dtype)
    weights = (rows.normal(rows.num_experts, 64, 64, dtype=dtype, fan_in=64),)

    def compute(groups):
        (pre,), hidden = kernels.up_projection(x, weights, (), groups, activation=ACTIVATIONS[1])
        (gradient,), _ = kernels.up_weight_gradients(x, (pre,), groups, dtypes=(jnp.float32,), bias_dtypes=())
        owned = (groups.expert_token_indices < rows.num_tokens)[:, None]
        return jnp.where(owned, hidden, 0), gradient

    hidden, gradient = compute(rows.groups)
    parts = [compute(kernels.row_range(rows.groups, first, RANGE)) for first in (0, RANGE)]
    together = jnp.concatenate([part[:RANGE] for part, _ in parts])
    assert rows.num_rows <= together.shape[0] + SPARE_ROWS
    length = min(rows.num_rows, together.shape[0])
    assert_close(together[:length], hidden[:length])
    assert_close(sum(part for _, part in parts), gradient)
