"""Token rounding: counts are multiples of a tile, at the expense of the lowest scores."""

from functools import partial

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from blaze_jax import route
from blaze_jax.token_rounding import round_token_counts
from tests import routing_reference as reference
from tests.numerics import assert_close, assert_same_bits
from tests.routings import EMPTY, random_experts

T, E, K = 45, 6, 2
MODES = ("up", "down", "nearest")


def problem(seed=0, levels=None):
    """Scores, tied if there are only a few `levels`, and a choice that need not be the best one."""
    scores = np.random.default_rng(seed).random((T, E)).astype(np.float32)
    if levels:
        scores = np.floor(scores * levels) / levels
    return scores.astype(np.float32), random_experts(T, K, range(E), seed)


def demand(selected):
    return jnp.asarray(reference.counts(selected, E), jnp.int32)


@partial(jax.jit, static_argnums=3, static_argnames=("tile", "extra_slots"))
def round_jitted(*arguments, **options):
    return round_token_counts(*arguments, **options)


def rounded(scores, selected, *arguments, **options):
    """The experts, whose tokens must be as many as is said."""
    experts, counts = round_jitted(scores, selected, demand(selected), *arguments, **options)
    assert_same_bits(counts, reference.counts(np.asarray(experts), E).astype(np.int32))
    return np.asarray(experts)


def members(experts):
    return (np.asarray(experts)[:, :, None] == np.arange(E)).sum(1)


@pytest.mark.parametrize("levels", [None, 1, 3])
@pytest.mark.parametrize("tile", [1, 2, 5, 8, 64])
@pytest.mark.parametrize("mode", MODES)
def test_matches_reference(mode, tile, levels):
    scores, selected = problem(levels=levels)
    out = rounded(scores, selected, mode, tile=tile, extra_slots=E)
    assert out.shape == (T, K if mode == "down" else E)
    assert_same_bits(members(out), reference.rounded_members(scores, selected, mode, tile).astype(int))
    own = out[:, :K]
    assert_same_bits(own, np.where(own == EMPTY, EMPTY, selected).astype(np.int32))


@hypothesis.given(
    seed=st.integers(0, 2**20),
    levels=st.sampled_from([None, 1, 4]),
    slots=st.integers(0, 2),
    mode=st.sampled_from(MODES),
)
def test_rounding_within_few_slots(seed, levels, slots, mode):
    scores, selected = problem(seed, levels)
    out = rounded(scores, selected, mode, tile=8, extra_slots=slots)
    mask, own = members(out), members(selected)
    counts, wanted = mask.sum(0), reference.target_counts(own.sum(0), T, mode, 8)
    ideal = reference.rounded_members(scores, selected, mode, 8)

    assert mask.max() <= 1
    assert (mask > own).sum(1).max(initial=0) <= slots
    assert (counts % 8 == 0).all()
    assert np.isin(counts - wanted, [0, -8]).all()
    reached = counts == wanted
    assert_same_bits(mask[:, reached], ideal[:, reached].astype(int))
    assert (mask <= own)[:, ~reached].all()  # an expert short of slots takes nobody in
    crowded = (ideal > own).sum(1) > slots
    assert ((ideal > own)[crowded].any(0) | reached).all()  # and some token that it wanted was crowded


def test_without_spare_slots_counts_go_down():
    scores, selected = problem()
    out = rounded(scores, selected, "up", tile=8, extra_slots=0)
    down = rounded(scores, selected, "down", tile=8, extra_slots=0)
    assert_same_bits(out, down)


def test_nan_token_is_nobodys_favourite():
    scores, selected = problem()
    poisoned = scores.copy()
    poisoned[4] = np.nan
    out = members(rounded(poisoned, selected, "up", tile=8, extra_slots=E))
    assert_same_bits(out[4], members(selected)[4])
    assert (out.sum(0) % 8 == 0).all()


@pytest.mark.parametrize("scoring", ["softmax", "softmax_selected", "sigmoid"])
@pytest.mark.parametrize("mode", MODES)
def test_route_weights_rounded_choices_like_chosen_ones(mode, scoring):
    logits = 2 * np.random.default_rng(0).standard_normal((T, E)).astype(np.float32)
    plain = route(logits, K, scoring=scoring)
    out = route(logits, K, scoring=scoring, token_rounding=mode, rounding_tile=8, rounding_slots=3)
    experts, kept = np.asarray(out.experts), np.asarray(out.experts) != EMPTY
    assert experts.shape == (T, K if mode == "down" else K + 3)

    odds = np.exp(logits) if scoring == "softmax_selected" else reference.scores_of(logits, scoring)
    own = np.take_along_axis(odds, np.asarray(plain.experts), axis=1).sum(-1, keepdims=True)
    expected = np.where(kept, np.take_along_axis(odds, experts * kept, axis=1) / own, 0)
    assert_close(out.weights, expected)
    assert_same_bits(out.weights != 0, kept)
    assert (out.tokens_per_expert % 8 == 0).all()
    assert_same_bits(out.tokens_per_expert, reference.counts(experts, E).astype(np.int32))
    assert_same_bits(out.demand, plain.demand)
    assert_close(out.dropped_share, 1 - kept[:, :K].mean())


def test_rounding_has_no_gradient_of_its_own():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((T, E)), jnp.float32)
    options = {"scoring": "sigmoid", "normalize_weights": False, "token_rounding": "up", "rounding_tile": 8}
    gradient = jax.grad(lambda l: route(l, K, **options).weights.sum())(logits)
    probability = reference.scores_of(logits, "sigmoid")
    used = members(route(logits, K, **options).experts)
    assert_close(gradient, used * probability * (1 - probability))
