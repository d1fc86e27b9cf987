"""Tokens computed a range at a time: outputs and gradients are those of all tokens at once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from blaze_jax import expert_ffn, experts
from blaze_jax.plan import TokenRanges, token_ranges
from tests.expert_problems import Problem, apply, make_problem, results
from tests.numerics import assert_close, assert_same_bits
from tests.over_devices import make_mesh
from tests.pallas_kernels.rows import portable_dispatch
from tests.routings import ROUTINGS


@pytest.fixture
def in_ranges(monkeypatch, traced_anew):
    """`expert_ffn` of few tokens, in ranges: a function of its own, so that jax compiles it."""
    monkeypatch.setattr(experts, "token_ranges", lambda num_tokens, *_: TokenRanges(num_tokens, -(-num_tokens // 2)))
    return partial(expert_ffn)


@pytest.mark.slow
def test_a_range_has_a_budget_of_rows_and_further_turns(in_ranges):
    problem = make_problem(*ROUTINGS["many_tiles"])
    assert_close(results(in_ranges, problem, mean_experts=0.8), results(expert_ffn, problem))


@pytest.mark.parametrize("num_tokens", [12, 37, 38])
@pytest.mark.default_cases("*")
def test_ranges_cover_every_token_once(num_tokens):
    own = TokenRanges(num_tokens, -(-num_tokens // 3)).cut(np.arange(num_tokens))
    assert len(own) == 3
    assert np.concatenate(own).tolist() == [*range(num_tokens)]
    for size in (0, num_tokens + 1):
        with pytest.raises(ValueError, match=rf"size={size} of a range must be from 1 to num_tokens={num_tokens}"):
            TokenRanges(num_tokens, size)


def test_all_ranges_but_the_last_have_their_size():
    for num_tokens in range(1, 40):
        for size in range(1, num_tokens + 1):
            *others, last = map(len, TokenRanges(num_tokens, size).cut(np.arange(num_tokens)))
            assert set(others) <= {size}
            assert 0 < last <= size
            assert sum(others) + last == num_tokens


def test_rows_that_align_a_group_are_of_no_token():
    """Not of one of the next range, which kernels would read."""
    experts, num_experts = ROUTINGS["random"]
    ranges = TokenRanges(37, 13)
    groups = ranges.dispatch(lambda own: portable_dispatch(own, num_experts, row_alignment=8), jnp.asarray(experts))
    for of_range, own in zip(groups, ([0, 13], [13, 26], [26, 37]), strict=True):
        tokens, pairs = np.unique(of_range.expert_token_indices, return_counts=True)
        assert tokens.tolist() == [*range(*own), len(experts)]
        assert (pairs[:-1] == 2).all()


def test_ranges_where_many_rows_meet_few_experts():
    assert token_ranges(2_097_152, 1, 4, 4096) == TokenRanges(2_097_152, 131_072)
    assert token_ranges(2_000_001, 1, 4, 4096) == TokenRanges(2_000_001, 125_001)
    assert token_ranges(524_288, 1, 4, 4096) == TokenRanges(524_288, 65_536)
    assert token_ranges(131_072, 1, 4, 4096) == TokenRanges(131_072, 65_536)


@pytest.mark.parametrize(
    ("num_tokens", "slots", "num_experts", "n"), [(65_536, 1, 4, 2048), (32_768, 8, 128, 1024), (65_536, 4, 16, 4096)]
)
@pytest.mark.default_cases("*")
def test_no_ranges_where_they_would_cost_much(num_tokens, slots, num_experts, n):
    assert token_ranges(num_tokens, slots, num_experts, 2 * n) is None


@pytest.mark.parametrize("save", ["pre_activations", "int8", "inputs"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("routing", ["random", "empty_slots", "all_slots_empty"])
@pytest.mark.default_cases("random-swiglu-int8", "random-gelu-inputs")
def test_results_are_those_of_all_tokens(in_ranges, routing, activation, save):
    problem = make_problem(*ROUTINGS[routing], activation=activation)
    compare(problem, in_ranges, activation=activation, save=save)


@pytest.mark.slow
def test_rows_wider_than_an_expert_come_in_blocks_of_columns(in_ranges):
    compare(make_problem(*ROUTINGS["random"], d=136, n=24), in_ranges)


@pytest.mark.slow
def test_rows_not_wider_than_an_expert_come_at_once(in_ranges):
    compare(make_problem(*ROUTINGS["random"], d=24, n=136), in_ranges)


def test_gradients_of_narrow_weights_are_added_up_wide(in_ranges):
    problem = make_problem(*ROUTINGS["single_expert"], dtype="bfloat16", biases=False)
    ours = results(in_ranges, problem)
    assert ours["w_up"].dtype == jnp.bfloat16
    assert_close(ours["w_up"], at_once(problem)["w_up"], 1e-3)


def at_once(problem, **options):
    """The results of all tokens, also where `in_ranges` has them in ranges."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "token_ranges", lambda *_: None)
        return results(partial(expert_ffn), problem, **options)


def compare(problem, in_ranges, **options):
    ours, expected = results(in_ranges, problem, **options), at_once(problem, **options)
    for name in ("y", "x", "weights"):
        assert_same_bits(ours[name], expected[name])
    for name in expected.keys() - {"y", "x", "weights"}:
        assert_close(ours[name], expected[name], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("transformed", ["checkpoint", "vmap", "shard_map"])
@pytest.mark.ci_cases("shard_map")
def test_under_transformations(in_ranges, transformed):
    problem, other = (make_problem(*ROUTINGS["random"], biases=False, seed=seed) for seed in (0, 1))
    run = partial(results, in_ranges)
    expected = run(problem)
    if transformed == "checkpoint":
        found = results(jax.checkpoint(in_ranges), problem)
    elif transformed == "vmap":
        both = jax.tree.map(lambda *arrays: jnp.stack(arrays), other, problem)
        found = jax.tree.map(lambda array: array[1], jax.jit(jax.vmap(run))(both))
    else:
        by_token = dict.fromkeys(("x", "weights", "experts", "dy", "y"), P("data"))
        specs = Problem(params=P(), **{name: spec for name, spec in by_token.items() if name != "y"})
        outs = {name: by_token.get(name, P()) for name in expected}
        found = jax.jit(jax.shard_map(run, mesh=make_mesh({"data": 1}), in_specs=(specs,), out_specs=outs))(problem)
    assert_close(found, expected, 1e-6)


def test_first_pass_under_checkpoint_keeps_no_pre_activations(in_ranges):
    *arguments, _ = make_problem(*ROUTINGS["random"], biases=False)

    def kept(ffn):
        _, residuals = jax.eval_shape(lambda x, *others: jax.vjp(lambda x: apply(ffn, x, *others), x), *arguments)
        return [a.shape for a in jax.tree.leaves(residuals)]

    of_a_range = 38, 12
    assert of_a_range in kept(in_ranges)
    assert of_a_range not in kept(jax.checkpoint(in_ranges))
