"""Choice and weights of experts against numpy references."""

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
from tests import routing_reference as reference
from tests.layers import route
from tests.numerics import assert_close, assert_same_bits

T, E, K = 50, 12, 4
SCORINGS = ("softmax", "softmax_selected", "sigmoid")
GROUPS = [(1, 1, False), (1, 1, True), (4, 2, True), (6, 6, False), (3, 2, True)]
over_groups = pytest.mark.parametrize(("num_groups", "groups_per_token", "biased"), GROUPS)


def normalized(scoring, biased):
    """Half of the cases of each scoring, and of those with a bias and without."""
    return biased != (scoring == "sigmoid")


def random_logits(*shape, seed=0, scale=2.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape or (T, E))).astype(np.float32)


@over_groups
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.default_cases("softmax_selected-4-2-True", "sigmoid-1-1-False", "sigmoid-3-2-True")
def test_matches_reference(scoring, num_groups, groups_per_token, biased):
    logits = random_logits()
    bias = random_logits(E, seed=1, scale=0.2) if biased else None
    scores = reference.scores_of(logits, scoring)
    experts = reference.choose(scores, K, 0 if bias is None else bias, num_groups, groups_per_token)
    normalize = normalized(scoring, biased)
    scale = 1.0 if normalize else 2.5
    router = Router(
        scoring=scoring,
        normalize_weights=normalize,
        weight_scale=scale,
        num_groups=num_groups,
        groups_per_token=groups_per_token,
    )
    out = route(logits, K, router=router, selection_bias=bias)
    assert_same_bits(out.experts, experts)
    assert_close(out.weights, reference.weights_of(logits, experts, scoring, normalize, scale))
    assert_same_bits(out.tokens_per_expert, reference.counts(experts, E).astype(np.int32))
    assert_same_bits(out.demand, out.tokens_per_expert)
    assert out.dropped_share == 0


@hypothesis.given(hnp.arrays(np.int8, (20, 8), elements=st.integers(-2, 2)))
def test_ties_go_to_the_lower_id(levels):
    logits = levels.astype(np.float32)
    scores = np.asarray(jax.nn.sigmoid(logits))  # in float32, where sums of groups tie as they do in the library
    for num_groups, groups_per_token in ((1, 1), (4, 2)):
        out = route(logits, 3, scoring="sigmoid", num_groups=num_groups, groups_per_token=groups_per_token)
        assert_same_bits(out.experts, reference.choose(scores, 3, 0, num_groups, groups_per_token))


def test_negative_zero_ties_with_zero():
    out = route(jnp.array([[-0.0, 0.0, -0.0, 0.0]]), 3)
    assert out.experts.tolist() == [[0, 1, 2]]
    biased = route(jnp.array([[-0.0, 0.0, -0.0, 0.0]]), 3, selection_bias=jnp.array([-0.5, -0.5, -0.5, -0.5]))
    assert biased.experts.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("scoring", SCORINGS)
def test_saturated_scores_rank_as_their_logits(scoring):
    out = route(jnp.array([[-300.0, 40.0, 200.0, 30.0, -200.0]]), 5, scoring=scoring)
    assert out.experts.tolist() == [[2, 1, 3, 4, 0]]


@over_groups
@pytest.mark.parametrize("scoring", SCORINGS)
def test_minus_infinity_rules_an_expert_out(scoring, num_groups, groups_per_token, biased):
    rng = np.random.default_rng(3)
    possible = rng.random((T, E)) < rng.random((T, 1))
    possible[:2] = [[False], [True]]
    logits = np.where(possible, random_logits(), -np.inf).astype(np.float32)
    bias = random_logits(E, seed=1, scale=9) if biased else None
    options = {"num_groups": num_groups, "groups_per_token": groups_per_token}
    scores = reference.scores_of(logits, scoring)
    experts = reference.choose(scores, K, 0 if bias is None else bias, **options, possible=possible)
    normalize = normalized(scoring, biased)
    options |= {"scoring": scoring, "normalize_weights": normalize, "selection_bias": bias}
    out = route(logits, K, **options)
    assert_same_bits(out.experts, experts)
    assert_close(out.weights, reference.weights_of(logits, experts, scoring, normalize, 1.0))
    assert_same_bits(out.demand, reference.counts(experts, E).astype(np.int32))
    assert out.dropped_share == 0
    chex.assert_tree_all_finite(out)
    gradient = jax.jit(jax.grad(partial(total, **options)))(logits)
    chex.assert_tree_all_finite(gradient)
    assert not gradient[~possible].any()


def total(logits, slots=K, **options):
    """Something that depends on all that is differentiable."""
    out = route(logits, slots, **options)
    factors = jnp.sin(1 + jnp.arange(out.weights.size, dtype=jnp.float32)).reshape(out.weights.shape)
    return (factors * out.weights).sum() + out.load_balancing_loss + out.z_loss + out.entropy


def test_a_token_without_experts_is_as_if_it_were_not_there():
    logits = random_logits()
    blank = logits.copy()
    blank[10:] = -np.inf
    out, ref = route(blank, K), route(logits[:10], K)
    assert (out.experts[10:] == -1).all()
    assert_same_bits((out.experts[:10], out.weights[:10], out.demand), (ref.experts, ref.weights, ref.demand))
    losses = [(r.load_balancing_loss, r.z_loss, r.entropy) for r in (out, ref)]
    assert_close(*losses)
    gradient, expected = (jax.grad(partial(total, slots=K))(jnp.asarray(l)) for l in (blank, logits[:10]))
    assert_close(gradient[:10], expected)
    assert not gradient[10:].any()


def test_padding_of_nan_with_logits_of_minus_infinity_does_not_count():
    logits = random_logits()
    x = jnp.asarray(logits).at[10:].set(jnp.nan)

    def masked(x):
        return total(jnp.where(jnp.arange(T)[:, None] < 10, x, -jnp.inf))

    out, gradient = jax.value_and_grad(masked)(x)
    assert_close((out, gradient[:10]), jax.value_and_grad(total)(jnp.asarray(logits[:10])))
    assert not gradient[10:].any()


def test_a_batch_of_nothing_but_padding_has_no_losses():
    out = route(np.full((T, E), -np.inf, np.float32), K)
    assert [float(loss) for loss in (out.load_balancing_loss, out.z_loss, out.entropy)] == [0, 0, 0]


@pytest.mark.parametrize("level", [-1e4, -300.0, -60.0, -45.0, 0.0, 60.0, 1e4])
@pytest.mark.parametrize("normalize", [True, False])
def test_sigmoid_and_its_gradient_at_any_level(level, normalize):
    logits = np.float32(level) + random_logits()
    options = {"scoring": "sigmoid", "normalize_weights": normalize}
    out = route(logits, K, **options)
    experts = np.asarray(out.experts)
    expected = reference.weights_of(logits, experts, "sigmoid", normalize, 1.0)
    assert_close(np.append(out.weights, 1), np.append(expected, 1), 1e-5)  # with a 1, for weights of 0
    gradient = jax.jit(jax.grad(lambda l: route(l, K, **options).weights[:, 0].sum()))(logits)
    # The derivative of a log score is the sigmoid of the negative logit.
    slopes = reference.scores_of(-np.take_along_axis(logits, experts, 1), "sigmoid")
    first = expected[:, :1] * ((np.arange(K) == 0) - (expected if normalize else 0)) * slopes
    wanted = np.zeros((T, E))
    np.put_along_axis(wanted, experts, first, 1)
    assert_close(np.append(gradient, 1), np.append(wanted, 1), 1e-5)
    chex.assert_tree_all_finite(jax.jit(jax.grad(partial(total, **options)))(logits))


def test_weights_of_one_expert_per_token_are_not_normalised():
    logits = random_logits()
    out = route(logits, 1)
    assert_close(out.weights[:, 0], reference.softmax(logits).max(1))
    gradient = jax.jit(jax.grad(lambda l: jnp.sin(route(l, 1).weights).sum()))(logits)
    assert (np.abs(gradient).max(1) > 1e-6).all()
    for options in ({"normalize_weights": True}, {"scoring": "softmax_selected"}):
        with pytest.raises(ValueError, match="where experts_per_token=1: every weight would be a constant 1"):
            route(logits, 1, **options)
    assert route(logits, 1, scoring="sigmoid").weights.shape == (T, 1)


@over_groups
@pytest.mark.parametrize("scoring", SCORINGS)
def test_nan_stays_in_its_row(scoring, num_groups, groups_per_token, biased):
    logits = random_logits()
    poisoned = logits.copy()
    poisoned[3, 5], poisoned[7] = np.nan, np.nan
    bias = jnp.zeros(E) if biased else None
    options = {"scoring": scoring, "num_groups": num_groups, "groups_per_token": groups_per_token}
    out, ref = (route(l, K, selection_bias=bias, **options) for l in (poisoned, logits))
    others = np.isin(np.arange(T), [3, 7], invert=True)
    assert_same_bits((out.experts[others], out.weights[others]), (ref.experts[others], ref.weights[others]))
    for row in np.asarray(out.experts):
        assert len(set(row)) == K
        assert set(row) <= set(range(E))
    assert np.isnan(out.weights[7]).all()


def test_nan_logit_makes_the_rows_weights_nan():
    logits = jnp.array([[3.0, jnp.nan, 2.0, 1.0]])
    for scoring in SCORINGS:
        assert np.isnan(route(logits, 2, scoring=scoring).weights).all(), scoring


def test_selection_bias_changes_the_choice_only():
    logits = random_logits()
    bias = jnp.where(jnp.arange(E) < K, 10.0, 0.0)
    out = route(logits, K, selection_bias=bias, normalize_weights=False)
    assert_same_bits(np.sort(out.experts), np.tile(np.arange(K, dtype=np.int32), (T, 1)))
    assert_close(out.weights, np.take_along_axis(reference.softmax(logits), np.asarray(out.experts), axis=1))


def test_selection_bias_has_no_gradient():
    weights = jax.jit(lambda b: route(random_logits(), K, selection_bias=b).weights[:, 0].sum())
    gradient = jax.grad(weights)(jnp.zeros(E))
    assert_same_bits(gradient, np.zeros(E, np.float32))


@pytest.mark.parametrize("scoring", SCORINGS)
def test_narrow_logits_are_routed_in_float32(scoring):
    logits = jnp.asarray(random_logits(), jnp.bfloat16)
    out = route(logits, K, scoring=scoring)
    assert_same_bits(out, route(logits.astype(jnp.float32), K, scoring=scoring))
    assert out.weights.dtype == jnp.float32


def test_float64_logits_stay():
    with jax.enable_x64(True):
        logits = jnp.asarray(random_logits(), jnp.float64)
        out = route(logits, K)
        assert_close(out.weights, reference.weights_of(logits, np.asarray(out.experts), "softmax", True, 1.0), 1e-12)
        assert out.experts.dtype == jnp.int32


@pytest.mark.parametrize(
    "options", [{}, {"num_groups": 4, "groups_per_token": 2}, {"capacity_factor": 1.0}, {"token_rounding": "down"}]
)
def test_no_tokens(options):
    out = route(jnp.zeros((0, E)), K, **options)
    assert out.experts.shape == out.weights.shape == (0, K)
    assert [float(v) for v in (out.dropped_share, out.load_balancing_loss, out.z_loss, out.entropy)] == [0, 0, 0, 0]


def test_bias_update_balances_the_load():
    logits = random_logits(256, 8, seed=2, scale=0.5) + np.linspace(0, 2, 8, dtype=np.float32)
    bias, spread = jnp.zeros(8), []
    for _ in range(100):
        demand = route(logits, 2, scoring="sigmoid", selection_bias=bias).demand
        spread.append(int(demand.max() - demand.min()))
        bias = update_selection_bias(bias, demand, 0.01)
    assert spread[0] > 100
    assert max(spread[-10:]) < spread[0] / 4


def test_bias_update_by_hand():
    out = update_selection_bias(jnp.array([0.5, 0.5, 0.5]), jnp.array([1, 3, 2]), 0.25)
    assert out.tolist() == [0.75, 0.25, 0.5]


@pytest.mark.parametrize(
    ("logits", "experts_per_token", "options", "message"),
    [
        (jnp.zeros((2, 3, 4)), 1, {}, r"logits must be a floating array \(T, E\), got float32 of shape \(2, 3, 4\)"),
        (jnp.zeros((2, 3), jnp.int32), 1, {}, "logits must be a floating array .* got int32"),
        (jnp.zeros((2, 3)), 4, {}, "experts_per_token=4 must be from 1 to num_experts=3"),
        (jnp.zeros((2, 0)), 1, {}, "num_experts=0 must be at least 1"),
        (jnp.zeros((2, 3)), 1, {"scoring": "relu"}, "scoring='relu' must be one of"),
        (
            jnp.zeros((2, 3)),
            1,
            {"selection_bias": jnp.zeros(2)},
            r"selection_bias has shape \(2,\), must be \(3,\)",
        ),
        (jnp.zeros((2, 3)), 1, {"selection_bias": [0, 0, 0]}, "selection_bias has dtype int32, must be floating"),
        (jnp.zeros((2, 3)), 2.0, {}, "experts_per_token=2.0 must be an integer"),
        ("logits", 1, {}, "logits='logits' must be an array"),
        (jnp.zeros((2, 3)), 1, {"selection_bias": "bias"}, "selection_bias='bias' must be an array"),
        (jnp.zeros((2, 3)), 1, {"router": "sigmoid"}, "router='sigmoid' must be a Router"),
    ],
)
def test_misuse_is_named(logits, experts_per_token, options, message):
    with pytest.raises(ValueError, match=message):
        blaze_jax.route(logits, experts_per_token, **options)


def test_router_or_its_fields_but_not_both():
    with pytest.raises(TypeError, match="give a router or its fields, not both: scoring"):
        blaze_jax.route(jnp.zeros((2, 3)), 1, router=Router(), scoring="sigmoid")
