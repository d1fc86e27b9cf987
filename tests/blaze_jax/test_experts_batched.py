"""The portable form as accelerators run it: several experts at a time, forced on whatever runs these tests."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

from blaze_jax import expert_ffn
from blaze_jax.oracle import dense_expert_ffn
from pallas_kernels.xla.row_groups import Turn, turns_of
from tests.expert_problems import apply, make_problem, results
from tests.numerics import TOLERANCE, assert_close, assert_same_bits
from tests.routings import ROUTINGS

SMALL, RAGGED, WHOLE = Turn(2, 8), Turn(4, 7), Turn(64, 512)


@cache
def experts_in(turn: Turn):
    """`expert_ffn` as a function of its own for each turn, so that jax compiles each."""
    return partial(expert_ffn)


def batched(problem, turn=RAGGED, **options):
    with turns_of(*turn):
        return results(experts_in(turn), problem, implementation="xla", **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_matches_oracle_for_any_routing(routing, dtype):
    problem = make_problem(*ROUTINGS[routing], dtype=dtype)
    truth = results(dense_expert_ffn, problem.cast(jnp.float32))
    assert_close(batched(problem), truth, TOLERANCE[dtype])


@pytest.mark.parametrize("turn", [SMALL, WHOLE, Turn(1, 5)], ids=str)
@pytest.mark.parametrize(("activation", "biases"), [("swiglu", True), ("gelu", False)])
def test_matches_oracle_for_any_turn(turn, activation, biases):
    problem = make_problem(*ROUTINGS["empty_slots"], activation=activation, biases=biases)
    truth = results(dense_expert_ffn, problem, activation=activation)
    assert_close(batched(problem, turn, activation=activation), truth, TOLERANCE["float32"])


@pytest.mark.parametrize("turn", [RAGGED, WHOLE], ids=str)
@pytest.mark.parametrize("routing", ["empty_slots", "more_experts_than_rows", "whole_tiles_and_a_tail"])
def test_what_buffers_hold_at_first_does_not_matter(monkeypatch, routing, turn):
    problem = make_problem(*ROUTINGS[routing])
    expected = batched(problem, turn)
    monkeypatch.setattr(lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    with turns_of(*turn):
        assert_same_bits(results(partial(expert_ffn), problem, implementation="xla"), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_runs_give_the_same_bits(dtype):
    problem = make_problem(*ROUTINGS["many_tiles"], dtype=dtype)
    assert_same_bits(batched(problem), batched(problem))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_saves_give_the_same_bits(dtype):
    problem = make_problem(*ROUTINGS["empty_slots"], dtype=dtype)
    assert_same_bits(batched(problem, save="inputs"), batched(problem))


def test_parameters_of_another_type():
    problem = make_problem(*ROUTINGS["random"], dtype="bfloat16", param_dtype="float32")
    out = batched(problem)
    assert_close(out, results(dense_expert_ffn, problem.cast(jnp.float32)), TOLERANCE["bfloat16"])
    assert {value.dtype.name for name, value in out.items() if name not in ("x", "y")} == {"float32"}


def test_gradients_of_unused_experts_are_zero():
    out = batched(make_problem(*ROUTINGS["two_experts_of_six"]))
    for name in ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"):
        used = np.asarray(out[name]).reshape(6, -1).any(1)
        assert np.flatnonzero(used).tolist() == [1, 4]


@pytest.mark.parametrize("where", ["x", "dy"])
def test_a_token_that_is_not_finite_poisons_no_other(where):
    case, token = ROUTINGS["random"], 5
    problem = make_problem(*case)
    out = batched(problem._replace(**{where: getattr(problem, where).at[token].set(jnp.nan)}))
    ref = batched(problem)
    others, own = np.arange(len(case.experts)) != token, case.experts[token]
    for name in ("y", "x", "weights"):
        assert_same_bits(out[name][others], ref[name][others])
    other_experts = ~np.isin(np.arange(case.num_experts), own)
    for name in problem.params:
        assert_same_bits(out[name][other_experts], ref[name][other_experts])


def test_weights_that_are_not_finite_poison_their_tokens_alone():
    case = ROUTINGS["random"]
    problem = make_problem(*case)
    out = batched(problem._replace(params={name: p.at[0].set(jnp.nan) for name, p in problem.params.items()}))
    ref, others = batched(problem), (case.experts != 0).all(1)
    assert_same_bits(out["y"][others], ref["y"][others])
    assert np.isnan(out["y"][~others]).all()
    for name in problem.params:
        assert_same_bits(out[name][1:], ref[name][1:])


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    problem = make_problem(*ROUTINGS["every_expert"])
    first = {name: getattr(problem, name)[:8] for name in ("x", "weights", "experts", "dy")}
    problem = problem._replace(**first)  # as many tokens as two devices can share
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2])
    specs = P("data"), P(), P("data"), P("data")

    def loss(x, params, weights):
        @partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=check_vma)
        def run(x, params, weights, experts):
            return apply(expert_ffn, x, params, weights, experts, implementation="xla")

        return (run(x, params, weights, problem.experts) * problem.dy).sum()

    with turns_of(*RAGGED):
        dx, d_params, d_weights = jax.jit(jax.grad(loss, (0, 1, 2)))(problem.x, problem.params, problem.weights)
    ref = batched(problem)
    assert_close({"x": dx, "weights": d_weights, **d_params}, {k: v for k, v in ref.items() if k != "y"})


def test_under_vmap_and_scan():
    problem = make_problem(*ROUTINGS["random"])
    both = jnp.stack([problem.x, 2 * problem.x])

    def ffn(x):
        return apply(expert_ffn, x, problem.params, problem.weights, problem.experts, implementation="xla")

    with turns_of(*RAGGED):
        mapped = jax.jit(jax.vmap(ffn))(both)
        scanned = jax.jit(lambda xs: jax.lax.scan(lambda c, x: (c, ffn(x)), 0, xs)[1])(both)
    ref = [batched(problem._replace(x=x))["y"] for x in both]
    assert_close(mapped, jnp.stack(ref))
    assert_close(scanned, jnp.stack(ref))


def lowered(platform):
    problem = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), make_problem(*ROUTINGS["many_tiles"]))

    def step(x, params, weights, experts, dy):
        y, vjp = jax.vjp(lambda *args: apply(expert_ffn, *args, experts, implementation="xla"), x, params, weights)
        return y, vjp(dy)

    return jax.jit(step).trace(*problem).lower(lowering_platforms=(platform,)).as_text()


def test_the_form_is_that_of_the_platform_compiled_for():
    """Three experts and 1034 rows: a CPU takes 128 of one expert a turn, accelerators more."""
    tiles = {platform: "tensor<1x128x20xf32>" in lowered(platform) for platform in ("cpu", "cuda", "rocm", "tpu")}
    assert tiles == {"cpu": True, "cuda": False, "rocm": False, "tpu": False}
