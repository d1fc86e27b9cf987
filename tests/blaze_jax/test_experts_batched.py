"""The portable form as accelerators run it: several experts at a time, forced on whatever runs these tests."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import P, lax

from blaze_jax import expert_ffn
from blaze_jax.oracle import dense_expert_ffn
from pallas_kernels.xla.loops import Turn, turns_of
from tests.expert_problems import RAGGED, apply, batched, lowered, make_problem, results
from tests.numerics import TOLERANCE, assert_close, assert_same_bits
from tests.routings import ROUTINGS

SMALL, WHOLE = Turn(2, 8), Turn(64, 512)


@pytest.mark.parametrize("turn", [SMALL, WHOLE, Turn(1, 5)], ids=str)
@pytest.mark.parametrize(("activation", "biases"), [("swiglu", True), ("gelu", False)])
def test_matches_oracle_for_any_turn(turn, activation, biases):
    problem = make_problem(*ROUTINGS["empty_slots"], activation=activation, biases=biases)
    truth = results(dense_expert_ffn, problem, activation=activation)
    assert_close(batched(problem, turn, activation=activation), truth, TOLERANCE["float32"])


@pytest.mark.parametrize("turn", [RAGGED, WHOLE], ids=str)
@pytest.mark.parametrize("routing", ["empty_slots", "more_experts_than_rows", "whole_tiles_and_a_tail"])
def test_what_buffers_hold_at_first_does_not_matter(monkeypatch, traced_anew, routing, turn):
    problem = make_problem(*ROUTINGS[routing])
    expected = batched(problem, turn)
    monkeypatch.setattr(lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    with turns_of(*turn):
        assert_same_bits(results(partial(expert_ffn), problem, implementation="xla"), expected)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.slow
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


def test_the_form_is_that_of_the_platform_compiled_for():
    """Three experts and 1034 rows: a CPU takes 128 of one expert a turn, accelerators more."""
    problem = make_problem(*ROUTINGS["many_tiles"])
    programs = (lowered(platform, problem, implementation="xla") for platform in ("cpu", "cuda", "rocm", "tpu"))
    assert ["tensor<1x128x20xf32>" in program for program in programs] == [True, False, False, False]
