"""Losses and statistics of the router, and the gradients through it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import routing_reference as reference
from tests.layers import route
from tests.numerics import assert_close

T, E, K = 50, 8, 2
SCORINGS = ("softmax", "softmax_selected", "sigmoid")
LOSSES = ("load_balancing_loss", "z_loss", "entropy")
COLLAPSED = np.tile(np.where(np.arange(E) == 3, np.float32(1000), np.float32(0)), (T, 1))
LOGITS = (2 * np.random.default_rng(0).standard_normal((T, E))).astype(np.float32)


def probabilities(logits, scoring):
    scores = reference.scores_of(logits, scoring)
    return scores / scores.sum(-1, keepdims=True)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_formulas(scoring):
    out = route(LOGITS, K, scoring=scoring)
    p = probabilities(LOGITS, scoring)
    demand = reference.counts(np.asarray(out.experts), E)
    assert_close(out.load_balancing_loss, E * np.dot(demand / (T * K), p.mean(0)))
    assert_close(out.z_loss, np.mean(np.log(np.exp(LOGITS.astype(np.float64)).sum(-1)) ** 2))
    assert_close(out.entropy, -np.mean((p * np.log(p)).sum(-1)))


def test_load_balancing_loss_is_one_in_balance():
    balanced = np.roll(np.eye(E), 1, axis=1).astype(np.float32)  # each expert is one token's favourite
    assert_close(route(balanced, 1).load_balancing_loss, 1.0)
    assert_close(route(np.zeros((T, E), np.float32), K).load_balancing_loss, 1.0)


def test_load_balancing_loss_is_the_number_of_experts_when_one_takes_all():
    assert_close(route(COLLAPSED, 1).load_balancing_loss, float(E))


def test_entropy_bounds():
    assert_close(route(np.zeros((T, E), np.float32), K).entropy, np.log(E))
    assert route(COLLAPSED, K).entropy == 0


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_gradients_are_those_of_finite_differences(scoring, normalize):
    with jax.enable_x64(True):
        logits = jnp.asarray(LOGITS[:6], jnp.float64)

        @jax.jit
        def weights_and_losses(logits):
            out = route(logits, K, scoring=scoring, normalize_weights=normalize, weight_scale=1.5)
            return out.weights, [getattr(out, name) for name in LOSSES]

        jax.test_util.check_grads(weights_and_losses, (logits,), order=1, modes=("rev",))


@pytest.mark.parametrize("lowest", [-200.0, -np.inf])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_gradients_stay_finite_where_probabilities_vanish(scoring, lowest):
    logits = np.where(LOGITS < 0, lowest, LOGITS)
    logits[:, :K] = [200.0, 1.0]  # no row without a finite choice

    def total(logits):
        out = route(logits, K, scoring=scoring)
        return out.weights.sum() + sum(getattr(out, name) for name in LOSSES)

    value, gradient = jax.jit(jax.value_and_grad(total))(jnp.asarray(logits, jnp.float32))
    chex.assert_tree_all_finite((value, gradient))
