"""How many tokens an expert takes: a limit drops the last ones, and rounding to tiles those of the lowest scores."""

import math
from functools import partial

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from blaze_jax import Router
from blaze_jax.checks import warn_once
from blaze_jax.token_rounding import round_token_counts
from tests import routing_reference as reference
from tests.layers import route
from tests.numerics import assert_close, assert_same_bits
from tests.routing_reference import SCORINGS, random_logits
from tests.routings import EMPTY, random_experts

T, E, K = 45, 6, 2
LOGITS = random_logits(T, E)
SKEWED = random_logits(T, E, scale=1.0) + np.linspace(0, 2, E, dtype=np.float32)
MODES = ("up", "down", "nearest")


@pytest.mark.parametrize("options", [{"expert_capacity": 1}, {"expert_capacity": 9}, {"capacity_factor": 0.7}])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_first_tokens_are_kept(scoring, options):
    plain, out = route(SKEWED, K, scoring=scoring), route(SKEWED, K, scoring=scoring, **options)
    capacity = options.get("expert_capacity") or math.ceil(options["capacity_factor"] * T * K / E)
    experts = reference.drop_beyond_capacity(np.asarray(plain.experts), E, capacity)
    dropped = experts == EMPTY
    assert dropped.any()
    assert_same_bits(out.experts, experts)
    assert_same_bits(out.weights, np.where(dropped, np.float32(0), plain.weights))
    assert_same_bits(out.tokens_per_expert, np.minimum(plain.demand, capacity))
    assert_same_bits(out.demand, plain.demand)
    assert_same_bits(out.dropped_share, np.float32(dropped.mean()))
    assert_same_bits(out.load_balancing_loss, plain.load_balancing_loss)


@pytest.mark.parametrize(
    "options",
    [{"expert_capacity": T}, {"expert_capacity": 2**40}, {"capacity_factor": float(E)}, {"capacity_factor": 1e30}],
)
def test_room_for_all_changes_nothing(options):
    assert_same_bits(route(SKEWED, K, **options), route(SKEWED, K))


@pytest.mark.parametrize("options", [{"expert_capacity": 3}, {"token_rounding": "up", "rounding_tile": 8}])
@pytest.mark.default_cases("*")
def test_the_choice_of_tokens_has_no_gradient(options):
    options |= {"scoring": "sigmoid", "normalize_weights": False}
    gradient = jax.jit(jax.grad(lambda logits: route(logits, K, **options).weights.sum()))(SKEWED)
    used, probability = members(route(SKEWED, K, **options).experts), reference.scores_of(SKEWED, "sigmoid")
    assert_close(gradient, used * probability * (1 - probability))
    assert_same_bits(np.asarray(gradient) != 0, used != 0)


@pytest.mark.parametrize(
    ("factor", "sizes", "capacity"),
    [
        *((factor, (8, 6, 2), capacity) for factor, capacity in ((1.0, 3), (1.2, 4), (0.001, 1), (3.0, 8), (9.0, 8))),
        *(
            (number(1.1), sizes, 11)
            for number in (float, np.float32, np.float64)
            for sizes in ((20, 4, 2), (100, 10, 1))
        ),
    ],
)
@pytest.mark.default_cases("*")
def test_capacity_factor_is_the_decimal_number_that_is_written_and_rounds_up(factor, sizes, capacity):
    assert Router(capacity_factor=factor).capacity(*sizes) == capacity


def test_ruled_out_experts_are_not_dropped():
    logits = np.where(np.arange(E) < 1, SKEWED, np.float32(-np.inf))
    out = route(logits, K, expert_capacity=9)
    assert out.experts[:, 1].tolist() == [EMPTY] * T
    assert out.demand.tolist() == [T, 0, 0, 0, 0, 0]
    assert_same_bits(out.dropped_share, np.float32(36 / 45))


def problem(seed=0, levels=None):
    """Scores, tied if there are only a few `levels`, and a choice that need not be the best one."""
    scores = np.random.default_rng(seed).random((T, E)).astype(np.float32)
    if levels:
        scores = np.ceil(scores * levels) / levels
    return scores.astype(np.float32), random_experts(T, K, range(E), seed)


@partial(jax.jit, static_argnums=3, static_argnames=("tile", "extra_slots"))
def round_jitted(*arguments, **options):
    return round_token_counts(*arguments, **options)


def counts_of(experts):
    return reference.counts(np.asarray(experts), E).astype(np.int32)


def rounded(scores, selected, *arguments, **options):
    """The experts, whose tokens must be as many as is said."""
    selected = np.asarray(selected, np.int32)
    experts, counts = round_jitted(scores, selected, counts_of(selected), *arguments, **options)
    assert_same_bits(counts, counts_of(experts))
    return np.asarray(experts)


def members(experts):
    return (np.asarray(experts)[:, :, None] == np.arange(E)).sum(1)


@pytest.mark.parametrize("levels", [None, 1, 3])
@pytest.mark.parametrize("tile", [1, 2, 5, 8, 64])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.default_cases("down-1-3", "down-2-3", "nearest-8-None", "nearest-8-1", "nearest-8-3", "nearest-64-None")
def test_matches_reference(mode, tile, levels):
    scores, selected = problem(levels=levels)
    out = rounded(scores, selected, mode, tile=tile, extra_slots=E)
    assert out.shape == (T, K if mode == "down" else E)
    assert_same_bits(members(out), reference.rounded_members(scores, selected, mode, tile).astype(int))
    own = out[:, :K]
    assert_same_bits(own, np.where(own == EMPTY, EMPTY, selected).astype(np.int32))


@hypothesis.given(st.integers(0, 2**20), st.sampled_from([None, 1, 4]), st.integers(0, 2), st.sampled_from(MODES))
@pytest.mark.slow
def test_rounding_within_few_slots(seed, levels, slots, mode):
    scores, selected = problem(seed, levels)
    out = rounded(scores, selected, mode, tile=8, extra_slots=slots)
    mask, own = members(out), members(selected)
    counts, wanted = mask.sum(0), reference.target_counts(own.sum(0), T, mode, 8)
    ideal = reference.rounded_members(scores, selected, mode, 8)

    assert mask.max() <= 1
    assert (mask > own).sum(1).max(initial=0) <= slots
    otherwise = own.sum(0) if mode == "up" else own.sum(0) // 8 * 8
    assert ((counts == wanted) | (counts == otherwise)).all()
    reached = counts == wanted
    assert_same_bits(mask[:, reached], ideal[:, reached].astype(int))
    assert (mask <= own)[:, ~reached].all()  # an expert short of slots takes nobody in
    crowded = (ideal > own).sum(1) > slots
    assert ((ideal > own)[crowded].any(0) | reached).all()  # and some token that it wanted was crowded


def test_without_spare_slots_counts_stay_or_go_down():
    scores, selected = problem()
    up, nearest, down = (rounded(scores, selected, mode, tile=8, extra_slots=0) for mode in ("up", "nearest", "down"))
    assert_same_bits(up, selected)
    assert_same_bits(nearest, down)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 43, 44, 45])
@pytest.mark.default_cases("3-up", "5-down", "11-up", "15-down", "16-down", "43-up", "43-down", "44-nearest")
def test_counts_around_every_boundary(count, mode):
    """One expert has `count` of 45 tokens, and the others share what is left."""
    scores, _ = problem()
    selected = np.stack([np.where(np.arange(T) < count, 0, 1 + np.arange(T) % 2), 3 + np.arange(T) % 3], 1)
    out = rounded(scores, selected.astype(np.int32), mode, tile=8, extra_slots=E)
    assert members(out)[:, 0].sum() == reference.target_counts(np.array(count), T, mode, 8)
    if mode == "up":
        assert_same_bits(out[:, :K], selected.astype(np.int32))


@pytest.mark.parametrize("mode", MODES)
def test_an_expert_takes_nobody_for_whom_it_is_ruled_out(mode):
    scores, selected = problem()
    possible = np.random.default_rng(1).random((T, E)) < 0.6
    possible[:, 0] = np.arange(T) < 20  # its 20 tokens cannot fill a third tile
    selected = np.where(np.take_along_axis(possible, selected, 1), selected, EMPTY)
    selected[:, 0] = np.where(np.arange(T) < 20, 0, np.where(selected[:, 0] == 0, EMPTY, selected[:, 0]))
    selected[:, 1] = np.where(selected[:, 1] == selected[:, 0], EMPTY, selected[:, 1])
    out = rounded(np.where(possible, scores, 0), selected, mode, tile=8, extra_slots=E)
    mask = members(out)
    assert mask.max() == 1
    assert not mask[~possible].any()
    own = members(selected).sum(0)
    assert mask.sum(0)[0] == {"up": 20, "nearest": 16, "down": 16}[mode]
    if mode == "up":
        assert (mask >= members(selected)).all()
    counts = reference.target_counts(own, possible.sum(0), mode, 8)
    assert mask.sum(0).tolist() == counts.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_fewer_tokens_than_a_tile_to_an_expert_are_not_rounded(mode):
    logits = random_logits(64, E)
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match=f"token_rounding='{mode}' does not apply: 64 tokens with 2 of 6 experts"):
        out = route(logits, K, token_rounding=mode)
    assert_same_bits(out, route(logits, K))  # and there is one warning only
    assert_same_bits(out, route(logits, K, token_rounding=mode))
    share = 64 * K / E
    assert Router(token_rounding=mode, rounding_tile=int(share)).rounds(64, E, K)
    with pytest.warns(UserWarning, match="are fewer than rounding_tile=22 to an expert"):
        assert not Router(token_rounding=mode, rounding_tile=int(share) + 1).rounds(64, E, K)


def test_nan_token_is_nobodys_favourite():
    scores, selected = problem()
    poisoned = scores.copy()
    poisoned[4] = np.nan
    out = members(rounded(poisoned, selected, "up", tile=8, extra_slots=E))
    assert_same_bits(out[4], members(selected)[4])
    assert (out.sum(0) % 8 == 0).all()


@pytest.mark.parametrize(
    ("mode", "scoring"),
    [("up", "softmax"), ("up", "sigmoid"), ("nearest", "softmax_selected"), ("down", "softmax_selected")],
)
def test_route_weights_rounded_choices_like_chosen_ones(mode, scoring):
    plain = route(LOGITS, K, scoring=scoring)
    out = route(LOGITS, K, scoring=scoring, token_rounding=mode, rounding_tile=8, rounding_slots=3)
    experts, kept = np.asarray(out.experts), np.asarray(out.experts) != EMPTY
    assert experts.shape == (T, K if mode == "down" else K + 3)

    odds = np.exp(LOGITS) if scoring == "softmax_selected" else reference.scores_of(LOGITS, scoring)
    own = np.take_along_axis(odds, np.asarray(plain.experts), axis=1).sum(-1, keepdims=True)
    expected = np.where(kept, np.take_along_axis(odds, experts * kept, axis=1) / own, 0)
    assert_close(out.weights, expected)
    assert_same_bits(out.weights != 0, kept)
    assert (out.tokens_per_expert % 8 == 0).all()
    assert_same_bits(out.tokens_per_expert, counts_of(experts))
    assert_same_bits(out.demand, plain.demand)
    assert_close(out.dropped_share, 1 - kept[:, :K].mean())
