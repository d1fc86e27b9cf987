"""`expert_ffn` and all its gradients against the dense oracle."""

from functools import partial

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from blaze_jax import ACTIVATION_NAMES, expert_ffn
from blaze_jax.oracle import dense_expert_ffn
from tests.expert_problems import apply, make_problem, results
from tests.numerics import TOLERANCE, assert_close, assert_same_bits
from tests.routings import ROUTINGS, experts_of_shape, random_experts, routings

DTYPES = ("float32", "bfloat16", "float16")
SAVES = ("pre_activations", "inputs")


def assert_matches_oracle(problem, tolerance, kernels=partial(results, expert_ffn), **options):
    truth = results(dense_expert_ffn, problem.cast(jnp.float32), **options)
    assert_close(kernels(problem, **options), truth, tolerance)


@pytest.mark.parametrize(
    ("routing", "dtype"),
    [
        *((routing, "float32") for routing in ROUTINGS),
        *((routing, "bfloat16") for routing in ("random", "empty_slots", "all_slots_empty", "many_tiles")),
        ("empty_slots", "float16"),
        ("many_tiles", "float16"),
    ],
)
def test_matches_oracle_for_any_routing(kernels, routing, dtype):
    assert_matches_oracle(make_problem(*ROUTINGS[routing], dtype=dtype), TOLERANCE[dtype], kernels)


@pytest.mark.parametrize(
    ("activation", "biases"), [*((name, True) for name in ACTIVATION_NAMES), ("swiglu", False), ("gelu", False)]
)
@pytest.mark.default_cases("geglu_tanh-True", "clamped_swiglu-True")
def test_matches_oracle_for_any_activation(activation, biases):
    problem = make_problem(*ROUTINGS["empty_slots"], activation=activation, biases=biases)
    assert_matches_oracle(problem, TOLERANCE["float32"], activation=activation)


@pytest.mark.parametrize(("d", "n"), [(1, 1), (3, 1), (1, 3), (65, 7), (513, 2)])
@pytest.mark.default_cases("1-3", "513-2")
def test_matches_oracle_for_any_width(d, n):
    # Blocks of the combine overlap where they do not divide d.
    assert_matches_oracle(make_problem(*ROUTINGS["empty_slots"], d=d, n=n), TOLERANCE["float32"])


@hypothesis.given(experts_of_shape((19, 3), 5))
def test_matches_oracle_for_generated_routings(experts):
    assert_matches_oracle(make_problem(experts, 5), TOLERANCE["float32"])


@pytest.mark.slow
@hypothesis.settings(max_examples=6)
@hypothesis.given(routings(), st.integers(1, 24), st.integers(1, 24), st.sampled_from(DTYPES))
def test_matches_oracle_for_generated_shapes(case, d, n, dtype):
    assert_matches_oracle(make_problem(*case, d=d, n=n, dtype=dtype), TOLERANCE[dtype])


def test_matches_oracle_in_float64():
    with jax.enable_x64(True):
        problem = make_problem(*ROUTINGS["random"], dtype="float64")
        out = results(expert_ffn, problem)
        assert_close(out, results(dense_expert_ffn, problem), TOLERANCE["float64"])
        chex.assert_type(list(out.values()), jnp.float64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float32_parameters_serve_narrow_tokens(kernels, dtype):
    problem = make_problem(*ROUTINGS["random"], dtype=dtype, param_dtype="float32")
    out = kernels(problem)
    assert_matches_oracle(problem, TOLERANCE[dtype], kernels)
    narrow = {name for name, value in out.items() if value.dtype == dtype}
    assert narrow == {"y", "x"}
    chex.assert_type([value for name, value in out.items() if name not in narrow], jnp.float32)


@pytest.mark.parametrize(
    ("routing", "activation", "dtype"),
    [
        ("empty_slots", "swiglu", "float32"),
        ("many_tiles", "swiglu", "bfloat16"),
        ("empty_slots", "swiglu", "float16"),
        ("many_tiles", "relu2", "float32"),
    ],
)
def test_both_saves_give_the_same_bits(kernels, routing, activation, dtype):
    problem = make_problem(*ROUTINGS[routing], dtype=dtype, activation=activation)
    kept, recomputed = (kernels(problem, activation=activation, save=save) for save in SAVES)
    assert_same_bits(recomputed, kept)


@pytest.mark.parametrize("routing", ["random", "many_tiles"])
def test_two_runs_give_the_same_bits(kernels, routing):
    problem = make_problem(*ROUTINGS[routing], dtype="bfloat16")
    assert_same_bits(kernels(problem), kernels(problem))


def test_gradients_of_unused_experts_are_zero(kernels):
    out = kernels(make_problem(*ROUTINGS["two_experts_of_six"]))
    for name in ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"):
        used = np.asarray(out[name]).reshape(6, -1).any(1)
        assert np.flatnonzero(used).tolist() == [1, 4]


def test_no_tokens():
    problem = make_problem(np.zeros((0, 2), np.int32), 4)
    out = results(expert_ffn, problem)
    chex.assert_shape(out["y"], (0, 20))
    chex.assert_trees_all_equal(out, jax.tree.map(jnp.zeros_like, out))


@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu", "gelu"])
@pytest.mark.slow
def test_gradients_are_those_of_finite_differences(activation):
    with jax.enable_x64(True):
        experts = random_experts(5, 2, range(3))
        x, params, weights, experts, _ = make_problem(experts, 3, d=4, n=3, activation=activation, dtype="float64")
        params = {name: value for name, value in params.items() if value is not None}

        @jax.jit
        def ffn(x, params, weights):
            return apply(expert_ffn, x, params, weights, experts, activation=activation)

        jax.test_util.check_grads(ffn, (x, params, weights), order=1, modes=("rev",))
