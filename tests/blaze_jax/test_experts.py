"""`expert_ffn` and all its gradients on every family of kernels: against the dense oracle, bit by bit, and poisoned."""

from functools import partial
from typing import get_args

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

from blaze_jax import ACTIVATION_NAMES, expert_ffn, schedule
from blaze_jax.oracle import dense_expert_ffn
from blaze_jax.plan import Save
from pallas_kernels.xla.loops import turns_of
from tests.expert_problems import FAMILIES, RAGGED, apply, each_on_gpus, make_problem, on, on_gpus, results
from tests.numerics import TOLERANCE, assert_close, assert_same_bits, scaled_error
from tests.pallas_kernels.rows import needs_interpreter
from tests.routings import EMPTY, ROUTINGS, experts_of_shape, random_experts, routings

SAVES = ("pre_activations", "inputs")
MATRICES, BIASES = ("w_gate", "w_up", "w_down"), ("b_gate", "b_up", "b_down")
PORTABLE = FAMILIES["xla"]
SMALL, WHOLE = (2, 8), (64, 512)  # experts and rows of a turn


def looped(problem, activation):
    """The output by a loop over tokens and slots."""
    x, params, weights, experts, _ = jax.tree.map(np.asarray, problem.cast(jnp.float32))
    y = np.zeros(x.shape)
    for (token, slot), expert in np.ndenumerate(experts):
        if expert >= 0:
            up = x[token] @ params["w_up"][expert] + params["b_up"][expert]
            if activation == "swiglu":
                gate = x[token] @ params["w_gate"][expert] + params["b_gate"][expert]
                hidden = gate / (1 + np.exp(-gate)) * up
            else:
                hidden = np.maximum(up, 0) ** 2
            y[token] += weights[token, slot] * (hidden @ params["w_down"][expert] + params["b_down"][expert])
    return y


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("routing", ["random", "empty_slots", "same_expert_twice", "every_expert"])
@pytest.mark.default_cases("random-swiglu-*")
def test_the_oracle_is_a_sum_over_slots_in_float32(routing, activation, dtype):
    problem = make_problem(*ROUTINGS[routing], activation=activation, dtype=dtype)
    out = apply(dense_expert_ffn, *problem[:4], activation=activation)
    assert out.dtype == np.float32
    assert_close(out, looped(problem, activation))


@pytest.mark.parametrize(
    ("routing", "dtype"),
    [
        *((routing, dtype) for dtype in ("float32", "bfloat16") for routing in ROUTINGS),
        ("empty_slots", "float16"),
        ("many_tiles", "float16"),
    ],
)
def test_matches_oracle_for_any_routing(kernels, routing, dtype):
    kernels.assert_matches_oracle(kernels.problem(routing, dtype=dtype))


@pytest.mark.parametrize(
    ("activation", "biases"), [*((name, True) for name in ACTIVATION_NAMES), ("swiglu", False), ("gelu", False)]
)
@pytest.mark.default_cases("xla-geglu_tanh-True", "xla-clamped_swiglu-True")
def test_matches_oracle_for_any_activation(kernels, activation, biases):
    problem = kernels.problem("empty_slots", activation=activation, biases=biases)
    kernels.assert_matches_oracle(problem, activation=activation)


@pytest.mark.slow
def test_few_rows_beside_the_weights_are_summed_at_once(monkeypatch, traced_anew):
    widths = []

    def summed(kernels, rows, block, *others):
        widths.append(block)
        return combine_columns(kernels, rows, block, *others)

    combine_columns = schedule.combine_columns
    monkeypatch.setattr(schedule, "combine_columns", summed)
    problem = make_problem(random_experts(4, 2, range(8)), 8, d=256, n=64)
    at_once = apply(expert_ffn, *problem[:4])
    monkeypatch.setattr(schedule, "FEW_ROWS", 1 << 20)
    jax.clear_caches()
    in_blocks = apply(expert_ffn, *problem[:4])
    assert widths == [None, 128]
    assert_close(at_once, in_blocks)  # some CPUs multiply other widths in another order


@pytest.mark.parametrize(("d", "n"), [(1, 1), (3, 1), (1, 3), (65, 7), (513, 2)])
@pytest.mark.default_cases("1-3", "513-2")
def test_matches_oracle_for_any_width(d, n):
    # Blocks of the combine overlap where they do not divide d.
    PORTABLE.assert_matches_oracle(PORTABLE.problem("empty_slots", d=d, n=n))


@on_gpus
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(
    ("tokens", "d", "n"), [(1000, 512, 768), (777, 264, 328), (300, 1088, 256), (130, 72, 40), (9, 8, 8)]
)
def test_matches_oracle_for_sizes_of_gpus(kernels, tokens, d, n, biases):
    experts = random_experts(tokens, 4, range(16))
    kernels.assert_matches_oracle(make_problem(experts, 16, d=d, n=n, biases=biases, dtype="bfloat16"))


def in_turns(turn, problem, **options):
    """The results of the portable kernels with so many experts and rows a turn."""
    with turns_of(*turn):
        return results(partial(expert_ffn, implementation="xla"), problem, **options)


@pytest.mark.parametrize("turn", [SMALL, WHOLE, (1, 5)], ids=str)
@pytest.mark.parametrize(("activation", "biases"), [("swiglu", True), ("gelu", False)])
def test_matches_oracle_for_any_turn(turn, activation, biases):
    problem = PORTABLE.problem("empty_slots", activation=activation, biases=biases)
    assert_close(
        in_turns(turn, problem, activation=activation), results(dense_expert_ffn, problem, activation=activation)
    )


@pytest.mark.slow
@pytest.mark.parametrize("turn", [RAGGED, WHOLE], ids=str)
@pytest.mark.parametrize("routing", ["empty_slots", "more_experts_than_rows", "whole_tiles_and_a_tail"])
def test_what_buffers_hold_at_first_does_not_matter(monkeypatch, traced_anew, routing, turn):
    problem = PORTABLE.problem(routing)
    expected = in_turns(turn, problem)
    monkeypatch.setattr(lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    assert_same_bits(in_turns(turn, problem), expected)


@hypothesis.given(experts_of_shape((19, 3), 5))
def test_matches_oracle_for_generated_routings(experts):
    PORTABLE.assert_matches_oracle(make_problem(experts, 5))


@pytest.mark.slow
@hypothesis.settings(max_examples=6)
@hypothesis.given(
    routings(), st.integers(1, 24), st.integers(1, 24), st.sampled_from(["float32", "bfloat16", "float16"])
)
def test_matches_oracle_for_generated_shapes(case, d, n, dtype):
    PORTABLE.assert_matches_oracle(make_problem(*case, d=d, n=n, dtype=dtype))


def test_matches_oracle_in_float64():
    with jax.enable_x64(True):
        problem = PORTABLE.problem("random", dtype="float64")
        out = PORTABLE.results(problem)
        assert_close(out, results(dense_expert_ffn, problem), TOLERANCE["float64"])
        chex.assert_type(list(out.values()), jnp.float64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float32_parameters_serve_narrow_tokens(kernels, dtype):
    out = kernels.assert_matches_oracle(kernels.problem("random", dtype=dtype, param_dtype="float32"))
    narrow = {name for name, value in out.items() if value.dtype == dtype}
    assert narrow == {"y", "x"}
    chex.assert_type([value for name, value in out.items() if name not in narrow], jnp.float32)


@on("ampere")
@pytest.mark.parametrize(
    ("save", "biases", "dtype"),
    [("pre_activations", True, "float32"), ("pre_activations", True, "bfloat16"), ("inputs", False, "float16")],
)
def test_interpreted_kernels_match_the_oracle_with_the_same_bits_twice(kernels, save, biases, dtype):
    problem = kernels.problem("empty_slots", dtype=dtype, biases=biases)
    out = kernels.assert_matches_oracle(problem, save=save)
    assert_same_bits(kernels.results(problem, save=save), out)


@pytest.mark.parametrize(
    ("kernels", "save"),
    [
        ("xla", "pre_activations"),
        ("xla_batched", "inputs"),
        ("ampere", "pre_activations"),
        pytest.param("hopper", "inputs", marks=needs_interpreter),
        *each_on_gpus(*((save,) for save in SAVES)),
    ],
    indirect=["kernels"],
)
@pytest.mark.default_cases("xla-*", "*_on_gpu-*")
def test_more_rows_than_expected_are_computed_in_turns(kernels, save):
    problem = kernels.problem("whole_tiles_and_a_tail", dtype="bfloat16")
    out = kernels.results(problem, save=save, mean_experts=1.2)
    assert_close(out, results(dense_expert_ffn, problem.cast(jnp.float32)), kernels.tolerance["bfloat16"])
    assert_same_bits(kernels.results(problem, save=save, mean_experts=1.2), out)
    with pytest.raises(ValueError, match="mean_experts=3 must be None, or above 0 and at most 2, the slots of a token"):
        kernels.results(problem, mean_experts=3)


@pytest.mark.parametrize(
    ("routing", "activation", "dtype"),
    [
        ("empty_slots", "swiglu", "float32"),
        ("many_tiles", "swiglu", "bfloat16"),
        ("empty_slots", "swiglu", "float16"),
        ("many_tiles", "relu2", "float32"),
    ],
)
def test_both_saves_and_a_second_run_give_the_same_bits(kernels, routing, activation, dtype):
    problem = kernels.problem(routing, dtype=dtype, activation=activation)
    kept, *others = (kernels.results(problem, activation=activation, save=save) for save in (SAVES[0], *SAVES))
    for other in others:
        assert_same_bits(other, kept)


def test_gradients_of_unused_experts_are_zero(kernels):
    out = kernels.results(kernels.problem("two_experts_of_six"))
    for name in MATRICES + BIASES:
        used = np.asarray(out[name]).reshape(6, -1).any(1)
        assert np.flatnonzero(used).tolist() == [1, 4]


def test_no_tokens():
    out = results(expert_ffn, make_problem(np.zeros((0, 2), np.int32), 4))
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


over_poisons = pytest.mark.parametrize(("routing", "value"), [("random", np.nan), ("many_tiles", np.inf)])
over_all_saves = pytest.mark.parametrize("save", get_args(Save))


def split(out, tokens, experts):
    """Every tensor cut to the rows of `tokens` or of `experts`."""
    return {name: value[tokens if name in ("y", "x", "weights") else experts] for name, value in out.items()}


@over_poisons
@over_all_saves
@pytest.mark.parametrize("where", ["x", "dy"])
def test_token_poisons_only_its_row_and_its_experts(kernels, routing, save, value, where):
    token, case, problem = 5, ROUTINGS[routing], kernels.problem(routing)
    poisoned = problem._replace(**{where: getattr(problem, where).at[token].set(value)})
    out, ref = kernels.results(poisoned, save=save), kernels.results(problem, save=save)

    other_tokens = np.arange(len(case.experts)) != token
    other_experts = ~np.isin(np.arange(case.num_experts), case.experts[token])
    assert_same_bits(split(out, other_tokens, other_experts), split(ref, other_tokens, other_experts))
    assert not np.isfinite(out["y" if where == "x" else "x"][token]).any()


@over_poisons
@over_all_saves
def test_weights_of_an_expert_poison_only_its_tokens(kernels, routing, save, value):
    expert, case, problem = 0, ROUTINGS[routing], kernels.problem(routing)
    poisoned = problem._replace(params={name: p.at[expert].set(value) for name, p in problem.params.items()})
    out, ref = kernels.results(poisoned, save=save), kernels.results(problem, save=save)

    other_tokens = (case.experts != expert).all(1)
    other_experts = np.arange(case.num_experts) != expert
    # A slot's own gradient only sees its own expert: the other slots of a poisoned token stay as they were too.
    assert_same_bits(split(out, other_tokens, other_experts), split(ref, other_tokens, other_experts))
    assert_same_bits(out["weights"][case.experts != expert], ref["weights"][case.experts != expert])
    assert not np.isfinite(out["y"][~other_tokens]).any()


def in_float64(problem):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, results(dense_expert_ffn, problem.cast(jnp.float64), activation="relu"))


@on("xla", "xla_batched", pytest.param("hopper", marks=needs_interpreter), "ampere")
@pytest.mark.default_cases("xla")
def test_a_pre_activation_that_rounds_to_zero_turns_one_unit_off_and_nothing_else(kernels):
    """It is 2^-30 - 1 + 1 for one token, whose dy pulls at that unit: there ReLU's derivative jumps."""
    token, expert, unit, num_experts, d = 5, 4, 7, 11, 120
    experts = random_experts(17, 3, range(num_experts))
    experts[::4, 1] = EMPTY
    experts[token] = [expert, EMPTY, expert + 1]
    problem = make_problem(experts, num_experts, d=d, n=104, activation="relu", dtype="bfloat16")
    w_up = problem.params["w_up"].at[expert, :, unit].set(jnp.array([-1, 1] + [0] * (d - 2), jnp.bfloat16))
    b_up = problem.params["b_up"].at[expert, unit].set(1)
    x = problem.x.at[token, :2].set(jnp.array([1, 2**-30], jnp.bfloat16))
    dy = problem.dy.at[token].set(8 * problem.params["w_down"][expert, unit])
    params = problem.params | {"w_up": w_up, "b_up": b_up}
    problem = problem._replace(x=x, dy=dy, params=params)
    out, truth = kernels.results(problem, activation="relu"), in_float64(problem)

    off = in_float64(problem._replace(params=params | {"b_up": b_up.at[expert, unit].add(-(2.0**-7))}))
    assert_close(out, off, TOLERANCE["bfloat16"])

    jumps = {"x": (token,), "w_up": (expert, slice(None), unit), "b_up": (expert, unit)}
    for name, value in out.items():
        error = np.asarray(value, np.float64) - truth[name]
        if name in jumps:
            assert scaled_error(value, truth[name]) > 0.02, name  # of the whole
            error[jumps[name]] = 0
        assert np.linalg.norm(error) < TOLERANCE["bfloat16"] * np.linalg.norm(truth[name]), name


@on_gpus
def test_more_elements_than_32_bits_count(kernels):
    """2M tokens: the pre-activations alone have 2^32 elements. Tokens at both ends are held to the oracle."""
    tokens, d, n, num_experts = 2**21, 512, 2048, 4
    experts = np.random.default_rng(0).integers(0, num_experts, (tokens, 1), np.int32)
    small = make_problem(experts[:64], num_experts, d=d, n=n, biases=False, dtype="bfloat16")
    x = jax.random.normal(jax.random.key(0), (tokens, d), jnp.bfloat16)
    weights = jax.random.uniform(jax.random.key(1), (tokens, 1))
    out = kernels.results(small._replace(x=x, weights=weights, experts=jnp.asarray(experts), dy=x))
    for part in (slice(0, 512), slice(tokens - 512, tokens)):
        few = small._replace(x=x[part], weights=weights[part], experts=jnp.asarray(experts[part]), dy=x[part])
        expected = results(dense_expert_ffn, few.cast(jnp.float32))
        for name in ("y", "x", "weights"):
            assert_close(out[name][part], expected[name], kernels.tolerance["bfloat16"])
