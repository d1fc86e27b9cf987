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
    monkeypatch.setattr(experts, "token_ranges", lambda num_tokens, *_: TokenRanges(num_tokens, -(-num_tokens // 3)))
    return partial(expert_ffn)


def test_a_range_has_a_budget_of_rows_and_further_turns(in_ranges):
    problem = make_problem(*ROUTINGS["many_tiles"])
    assert_close(results(in_ranges, problem, mean_experts=0.8), results(expert_ffn, problem))


@pytest.mark.parametrize("num_tokens", [12, 37, 38])
@pytest.mark.default_cases("*")
def test_ranges_cover_every_token_once(num_tokens):
    ranges = TokenRanges(num_tokens, -(-num_tokens // 3))
    first, *others = np.asarray(ranges.start(np.arange(3)))
    assert first == 0
    assert np.diff(others).tolist() == [ranges.size]
    assert others[0] <= ranges.size
    assert others[-1] + ranges.size == num_tokens


def test_no_token_is_in_more_than_two_ranges():
    """The first two may overlap, and no others: their number follows from the tokens and the size."""
    for num_tokens in range(1, 40):
        for size in range(1, num_tokens + 1):
            ranges = TokenRanges(num_tokens, size)
            assert 0 <= ranges.count * size - num_tokens < size
    for size in (0, 18):
        with pytest.raises(ValueError, match=rf"size={size} of a range must be from 1 to num_tokens=17"):
            TokenRanges(17, size)


def test_rows_that_align_a_group_are_of_no_token():
    """Not of one of the next range, which kernels would read."""
    experts, num_experts = ROUTINGS["random"]
    ranges = TokenRanges(37, 13)
    groups = ranges.dispatch(lambda own: portable_dispatch(own, num_experts, row_alignment=8), jnp.asarray(experts))
    for i, own in enumerate(([0, 11], [11, 24], [24, 37])):
        tokens, pairs = np.unique(groups.expert_token_indices[i], return_counts=True)
        assert tokens.tolist() == [*range(*own), len(experts)]
        assert (pairs[:-1] == 2).all()


def test_ranges_where_many_rows_meet_few_experts():
    assert token_ranges(2_097_152, 1, 4, 4096) == TokenRanges(2_097_152, 131_072)
    assert token_ranges(2_000_001, 1, 4, 4096) == TokenRanges(2_000_001, 133_334)


@pytest.mark.parametrize(
    ("num_tokens", "slots", "num_experts", "n"), [(131_072, 1, 4, 2048), (32_768, 8, 128, 1024), (65_536, 4, 16, 4096)]
)
@pytest.mark.default_cases("*")
def test_no_ranges_where_they_would_save_little_or_cost_much(num_tokens, slots, num_experts, n):
    assert token_ranges(num_tokens, slots, num_experts, 2 * n) is None


@pytest.mark.parametrize("save", ["pre_activations", "int8", "inputs"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("routing", ["random", "empty_slots", "all_slots_empty"])
@pytest.mark.default_cases("random-swiglu-int8", "random-gelu-inputs")
def test_results_are_those_of_all_tokens(in_ranges, routing, activation, save):
    problem = make_problem(*ROUTINGS[routing], activation=activation)
    compare(problem, in_ranges, activation=activation, save=save)


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


@pytest.mark.parametrize("transformed", ["checkpoint", "vmap", "shard_map"])
@pytest.mark.default_cases("shard_map")
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

    def first_pass(ffn):
        run = jax.jit(lambda x, *others: jax.vjp(lambda x: apply(ffn, x, *others), x))
        return run.lower(*arguments).as_text()

    of_all_ranges = "tensor<3x26x12xf32>"
    assert of_all_ranges in first_pass(in_ranges)
    assert of_all_ranges not in first_pass(jax.checkpoint(in_ranges))
