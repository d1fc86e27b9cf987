"""Choice and weights of experts, losses and statistics, against numpy references."""

import math
from functools import partial

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import blaze_jax
from blaze_jax import Router, update_selection_bias
from tests import layers
from tests import routing_reference as reference
from tests.numerics import assert_close, assert_same_bits
from tests.routing_reference import LOSSES, SCORINGS, random_logits

T, E, K = 50, 12, 4
LOGITS = random_logits(T, E)
COLLAPSED = np.tile(np.where(np.arange(E) == 3, np.float32(1000), np.float32(0)), (T, 1))
over_scorings = pytest.mark.parametrize("scoring", SCORINGS)
over_groups = pytest.mark.parametrize(
    ("num_groups", "groups_per_token", "biased"),
    [(1, 1, False), (1, 1, True), (4, 2, True), (6, 6, False), (3, 2, True)],
)


def route(logits, slots=K, **options):
    return layers.route(logits, slots, **options)


def total(logits, **options):
    return reference.total(route, logits, **options)


def losses_of(out):
    return [getattr(out, name) for name in LOSSES]


@over_groups
@over_scorings
@pytest.mark.parametrize("ruled_out", [False, True])
@pytest.mark.default_cases(
    "False-softmax_selected-4-2-True", "False-sigmoid-1-1-False", "False-sigmoid-3-2-True", "True-softmax-1-1-False"
)
def test_matches_reference(ruled_out, scoring, num_groups, groups_per_token, biased):
    """Also where logits of -inf rule experts out."""
    rng = np.random.default_rng(3)
    possible = (rng.random((T, E)) < rng.random((T, 1))) | (not ruled_out)
    possible[:2] = [[not ruled_out], [True]]
    logits = np.where(possible, LOGITS, np.float32(-np.inf))
    bias = random_logits(E, seed=1, scale=9 if ruled_out else 0.2) if biased else None
    summed = 1 if scoring == "softmax" else 2
    normalize = biased != (scoring == "sigmoid")  # in half of the cases of each scoring, and of those with a bias
    groups = {"num_groups": num_groups, "groups_per_token": groups_per_token}
    scale = 1.0 if normalize else 2.5
    options = {"normalize_weights": normalize, "weight_scale": scale, "scores_per_group": summed}
    router = Router(scoring=scoring, **options, **groups)
    scores = reference.scores_of(logits, scoring)
    experts = reference.choose(scores, K, bias, **groups, possible=possible, summed=summed)

    out = route(logits, router=router, selection_bias=bias)
    assert_same_bits(out.experts, experts)
    assert_close(out.weights, reference.weights_of(logits, experts, scoring, normalize, scale))
    assert_same_bits(out.demand, reference.counts(experts, E).astype(np.int32))
    assert_same_bits(out.tokens_per_expert, out.demand)
    assert out.dropped_share == 0
    gradient = jax.jit(jax.grad(partial(total, router=router, selection_bias=bias)))(logits)
    chex.assert_tree_all_finite((out, gradient))
    assert not gradient[~possible].any()


@hypothesis.given(hnp.arrays(np.int8, (20, 8), elements=st.integers(-2, 2)))
def test_ties_go_to_the_lower_id(levels):
    logits = levels.astype(np.float32)
    scores = np.asarray(jax.nn.sigmoid(logits))  # in float32, where sums of groups tie as they do in the library
    for num_groups, groups_per_token in ((1, 1), (4, 2)):
        out = route(logits, 3, scoring="sigmoid", num_groups=num_groups, groups_per_token=groups_per_token)
        assert_same_bits(out.experts, reference.choose(scores, 3, None, num_groups, groups_per_token))


@over_scorings
def test_negative_zero_ties_with_zero_and_saturated_scores_rank_as_their_logits(scoring):
    for bias in (None, jnp.full(4, -0.5)):
        out = route(jnp.array([[-0.0, 0.0, -0.0, 0.0]]), 3, scoring=scoring, selection_bias=bias)
        assert out.experts.tolist() == [[0, 1, 2]]
    out = route(jnp.array([[-300.0, 40.0, 200.0, 30.0, -200.0]]), 5, scoring=scoring)
    assert out.experts.tolist() == [[2, 1, 3, 4, 0]]


def test_a_token_without_experts_is_as_if_it_were_not_there():
    blank = LOGITS.copy()
    blank[10:] = -np.inf
    out, ref = route(blank), route(LOGITS[:10])
    assert (out.experts[10:] == -1).all()
    assert_same_bits((out.experts[:10], out.weights[:10], out.demand), (ref.experts, ref.weights, ref.demand))
    assert_close(losses_of(out), losses_of(ref))


def test_padding_of_nan_with_logits_of_minus_infinity_does_not_count():
    def masked(x):
        return total(jnp.where(jnp.arange(T)[:, None] < 10, x, -jnp.inf))

    out, gradient = jax.value_and_grad(masked)(jnp.asarray(LOGITS).at[10:].set(jnp.nan))
    assert_close((out, gradient[:10]), jax.value_and_grad(total)(jnp.asarray(LOGITS[:10])))
    assert not gradient[10:].any()


@pytest.mark.parametrize("level", [-1e4, -300.0, -60.0, -45.0, 0.0, 60.0, 1e4])
@pytest.mark.parametrize("normalize", [True, False])
def test_sigmoid_and_its_gradient_at_any_level(level, normalize):
    logits = np.float32(level) + LOGITS
    options = {"scoring": "sigmoid", "normalize_weights": normalize}
    out = route(logits, **options)
    experts = np.asarray(out.experts)
    expected = reference.weights_of(logits, experts, "sigmoid", normalize, 1.0)
    assert_close(np.append(out.weights, 1), np.append(expected, 1), 1e-5)  # with a 1, for weights of 0
    gradient = jax.jit(jax.grad(lambda l: route(l, **options).weights[:, 0].sum()))(logits)
    # The derivative of a log score is the sigmoid of the negative logit.
    slopes = reference.scores_of(-np.take_along_axis(logits, experts, 1), "sigmoid")
    first = expected[:, :1] * ((np.arange(K) == 0) - (expected if normalize else 0)) * slopes
    wanted = np.zeros((T, E))
    np.put_along_axis(wanted, experts, first, 1)
    assert_close(np.append(gradient, 1), np.append(wanted, 1), 1e-5)
    chex.assert_tree_all_finite(jax.jit(jax.grad(partial(total, **options)))(logits))


def test_weights_of_one_expert_per_token_are_not_normalised():
    assert_close(route(LOGITS, 1).weights[:, 0], reference.softmax(LOGITS).max(1))
    gradient = jax.jit(jax.grad(lambda l: jnp.sin(route(l, 1).weights).sum()))(LOGITS)
    assert (np.abs(gradient).max(1) > 1e-6).all()
    assert route(LOGITS, 1, scoring="sigmoid").weights.shape == (T, 1)


@over_groups
@over_scorings
@pytest.mark.default_cases("*-1-1-False")
def test_nan_stays_in_its_row(scoring, num_groups, groups_per_token, biased):
    poisoned = LOGITS.copy()
    poisoned[3, 5], poisoned[7] = np.nan, np.nan
    options = {"scoring": scoring, "num_groups": num_groups, "groups_per_token": groups_per_token}
    options["selection_bias"] = jnp.zeros(E) if biased else None
    out, ref = (route(l, **options) for l in (poisoned, LOGITS))
    others = np.isin(np.arange(T), [3, 7], invert=True)
    assert_same_bits((out.experts[others], out.weights[others]), (ref.experts[others], ref.weights[others]))
    for row in np.asarray(out.experts):
        assert len(set(row)) == K
        assert set(row) <= set(range(E))
    assert np.isnan(np.asarray(out.weights)[[7] if num_groups > 1 else [3, 7]]).all()


def test_selection_bias_has_no_gradient_and_moves_by_hand():
    weights = jax.jit(lambda b: route(LOGITS, selection_bias=b).weights[:, 0].sum())
    assert not jax.grad(weights)(jnp.zeros(E)).any()
    out = update_selection_bias(jnp.array([0.5, 0.5, 0.5]), jnp.array([1, 3, 2]), 0.25)
    assert out.tolist() == [0.75, 0.25, 0.5]


@over_scorings
def test_narrow_logits_are_routed_in_float32(scoring):
    logits = jnp.asarray(LOGITS, jnp.bfloat16)
    out = route(logits, scoring=scoring)
    assert_same_bits(out, route(logits.astype(jnp.float32), scoring=scoring))
    assert out.weights.dtype == jnp.float32


def test_float64_logits_stay():
    with jax.enable_x64(True):
        logits = jnp.asarray(LOGITS, jnp.float64)
        out = route(logits)
        assert_close(out.weights, reference.weights_of(logits, np.asarray(out.experts), "softmax", True, 1.0), 1e-12)
        assert out.experts.dtype == jnp.int32


@pytest.mark.parametrize("p", [1, 2, 3.5, 100, math.inf])
@over_scorings
@pytest.mark.default_cases("sigmoid-100")
@pytest.mark.ci_cases("softmax-2", "softmax-inf")
def test_weights_are_divided_by_their_p_norm(scoring, p):
    with jax.enable_x64(True):
        logits = jnp.asarray(LOGITS, jnp.float64).at[:, 6:].set(-jnp.inf).at[0].set(-jnp.inf)  # fewer than K, and none
        logits = logits.at[1:9, 1:6].set(-jnp.inf)

        def definition(logits, experts):
            scores = jax.nn.sigmoid(logits) if scoring == "sigmoid" else jax.nn.softmax(logits[1:])
            scores = scores[1:] if scoring == "sigmoid" else scores
            taken = jnp.where(experts < 0, 0, jnp.take_along_axis(scores, jnp.maximum(experts, 0), 1))
            largest = taken.max(1, keepdims=True)
            return 2.5 * taken / (jnp.power(taken / largest, p).sum(1, keepdims=True) ** (1 / p) * largest)

        def total(weights):
            return (jnp.sin(1 + jnp.arange(weights.size)).reshape(weights.shape) * weights).sum(), weights

        options = {"scoring": scoring, "weight_norm": p, "weight_scale": 2.5}
        experts = route(logits, **options).experts[1:]
        run = jax.jit(jax.value_and_grad(lambda l: total(blaze_jax.route(l, K, **options).weights[1:]), has_aux=True))
        norm = jax.value_and_grad(lambda l: total(definition(l, experts)), has_aux=True)
        out, ref = run(logits), norm(logits) if p < math.inf else None
        weights = out[0][1]
        np.testing.assert_allclose(np.linalg.norm(weights, p, axis=1), 2.5, rtol=1e-12)
        assert not route(logits, **options).weights[0].any()
        assert np.isfinite(out[1]).all()
        if ref is not None:
            assert_close(out[0], ref[0])
            assert_close(out[1][1:], jnp.nan_to_num(ref[1][1:]))
        if p == 1:
            assert_close(weights, route(logits, scoring=scoring, weight_scale=2.5).weights[1:])


@pytest.mark.parametrize("limit", [{"expert_capacity": 4}, {"token_rounding": "up", "rounding_tile": 4}], ids=str)
@pytest.mark.slow
def test_a_p_norm_is_that_of_the_choice_before_it_is_limited_or_rounded(limit):
    plain, limited = route(LOGITS, weight_norm=2), route(LOGITS, weight_norm=2, **limit)
    raw = route(LOGITS, normalize_weights=False).weights
    factor = (plain.weights / raw)[:, :1]
    taken = jnp.take_along_axis(jax.nn.softmax(LOGITS), jnp.maximum(limited.experts, 0), 1)
    assert_close(limited.weights, jnp.where(limited.experts < 0, 0, taken * factor))


@pytest.mark.filterwarnings("ignore:token_rounding=")  # of so few tokens, once in a process
@pytest.mark.parametrize("tokens", [0, T])
@pytest.mark.parametrize(
    "options", [{}, {"num_groups": 4, "groups_per_token": 2}, {"capacity_factor": 1.0}, {"token_rounding": "down"}]
)
@pytest.mark.default_cases("options0-*")
def test_no_tokens_or_nothing_but_padding_have_no_losses(tokens, options):
    out = route(np.full((tokens, E), -np.inf, np.float32), **options)
    assert out.experts.shape == out.weights.shape == (tokens, K)
    assert [float(value) for value in (out.dropped_share, *losses_of(out))] == [0, 0, 0, 0]


@over_scorings
@pytest.mark.parametrize("logits", [LOGITS, np.zeros_like(LOGITS), COLLAPSED], ids=["random", "equal", "collapsed"])
@pytest.mark.default_cases("random-softmax", "collapsed-softmax")
def test_losses_by_their_formulas(logits, scoring):
    out = route(logits, scoring=scoring)
    scores = reference.scores_of(logits, scoring)
    p = scores / scores.sum(-1, keepdims=True)
    demand = reference.counts(np.asarray(out.experts), E)
    assert_close(out.load_balancing_loss, E * np.dot(demand / (T * K), p.mean(0)))
    assert_close(out.z_loss, np.mean(reference.log_sum(logits.astype(np.float64)) ** 2))
    assert_close(out.entropy, -np.mean((p * np.log(np.where(p == 0, 1, p))).sum(-1)))


def test_load_balancing_loss_is_one_in_balance_and_the_number_of_experts_when_one_takes_all():
    balanced = np.roll(np.eye(E), 1, axis=1).astype(np.float32)  # each expert is one token's favourite
    assert_close([route(logits, 1).load_balancing_loss for logits in (balanced, COLLAPSED)], [1.0, float(E)])


@pytest.mark.parametrize("normalize", [True, False])
@over_scorings
def test_gradients_are_those_of_finite_differences(scoring, normalize):
    with jax.enable_x64(True):

        @jax.jit
        def weights_and_losses(logits):
            out = route(logits, scoring=scoring, normalize_weights=normalize, weight_scale=1.5)
            return out.weights, losses_of(out)

        logits = jnp.asarray(LOGITS[:6], jnp.float64)
        jax.test_util.check_grads(weights_and_losses, (logits,), order=1, modes=("rev",))


@pytest.mark.parametrize("lowest", [-200.0, -np.inf])
@over_scorings
def test_gradients_stay_finite_where_probabilities_vanish(scoring, lowest):
    logits = np.where(LOGITS < 0, np.float32(lowest), LOGITS)
    logits[:, :2] = [200.0, 1.0]  # no row without a finite choice
    chex.assert_tree_all_finite(jax.jit(jax.value_and_grad(partial(total, scoring=scoring)))(logits))


FEW = jnp.zeros((2, 3))


@pytest.mark.parametrize(
    ("logits", "experts_per_token", "options", "message"),
    [
        (jnp.zeros((2, 3, 4)), 1, {}, r"logits must be a floating array \(T, E\), got float32 of shape \(2, 3, 4\)"),
        (jnp.zeros((2, 3), jnp.int32), 1, {}, "logits must be a floating array .* got int32"),
        (FEW, 4, {}, "experts_per_token=4 must be from 1 to num_experts=3"),
        (jnp.zeros((2, 0)), 1, {}, "num_experts=0 must be at least 1"),
        (FEW, 1, {"scoring": "tanh"}, "scoring='tanh' must be one of"),
        (FEW, 1, {"selection_bias": jnp.zeros(2)}, r"selection_bias has shape \(2,\), must be \(3,\)"),
        (FEW, 1, {"selection_bias": [0, 0, 0]}, "selection_bias has dtype int32, must be floating"),
        (FEW, 2.0, {}, "experts_per_token=2.0 must be an integer"),
        ("logits", 1, {}, "logits='logits' must be an array"),
        (FEW, 1, {"selection_bias": "bias"}, "selection_bias='bias' must be an array"),
        (FEW, 1, {"router": "sigmoid"}, "router='sigmoid' must be a Router"),
        (FEW, 1, {"normalize_weights": True}, "where experts_per_token=1: every weight would be a constant 1"),
        (FEW, 1, {"scoring": "softmax_selected"}, "where experts_per_token=1: every weight would be a constant 1"),
        (FEW, 1, {"router": Router(), "scoring": "sigmoid"}, "give a router or its fields, not both: scoring"),
    ],
)
@pytest.mark.default_cases("*")
def test_misuse_is_named(logits, experts_per_token, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        blaze_jax.route(logits, experts_per_token, **options)
