"""Limits on how many tokens an expert takes."""

import math

import jax
import numpy as np
import pytest

from blaze_jax import Router
from tests import routing_reference as reference
from tests.layers import route
from tests.numerics import assert_same_bits
from tests.routings import EMPTY

T, E, K = 40, 6, 2
LOGITS = np.random.default_rng(0).standard_normal((T, E)).astype(np.float32) + np.linspace(0, 2, E, dtype=np.float32)


@pytest.mark.parametrize("options", [{"expert_capacity": 1}, {"expert_capacity": 9}, {"capacity_factor": 0.7}])
@pytest.mark.parametrize("scoring", ["softmax", "softmax_selected", "sigmoid"])
def test_first_tokens_are_kept(scoring, options):
    plain = route(LOGITS, K, scoring=scoring)
    out = route(LOGITS, K, scoring=scoring, **options)
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


ROOMY = [{"expert_capacity": T}, {"expert_capacity": 2**40}, {"capacity_factor": float(E)}, {"capacity_factor": 1e30}]


@pytest.mark.parametrize("options", ROOMY)
def test_room_for_all_changes_nothing(options):
    assert_same_bits(route(LOGITS, K, **options), route(LOGITS, K))


def test_dropped_choice_has_no_gradient():
    def weights(logits):
        return route(logits, K, expert_capacity=3, scoring="sigmoid", normalize_weights=False).weights.sum()

    kept = np.asarray(route(LOGITS, K, expert_capacity=3).experts)
    used = (kept[:, :, None] == np.arange(E)).any(1)
    assert_same_bits(np.asarray(jax.jit(jax.grad(weights))(LOGITS)) != 0, used)


@pytest.mark.parametrize(("factor", "capacity"), [(1.0, 3), (1.2, 4), (0.001, 1), (3.0, 8), (9.0, 8)])
def test_capacity_factor_rounds_up(factor, capacity):
    assert Router(capacity_factor=factor).capacity(8, 6, 2) == capacity


@pytest.mark.parametrize("factor", [1.1, np.float32(1.1), np.float64(1.1)])
def test_capacity_factor_is_the_decimal_number_that_is_written(factor):
    assert Router(capacity_factor=factor).capacity(20, 4, 2) == 11
    assert Router(capacity_factor=factor).capacity(100, 10, 1) == 11


def test_ruled_out_experts_are_not_dropped():
    logits = np.where(np.arange(E) < 1, LOGITS, -np.inf).astype(np.float32)
    out = route(logits, K, expert_capacity=10)
    assert out.experts[:, 1].tolist() == [EMPTY] * T
    assert out.demand.tolist() == [T, 0, 0, 0, 0, 0]
    assert_same_bits(out.dropped_share, np.float32(30 / 40))
