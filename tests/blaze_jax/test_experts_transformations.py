"""`expert_ffn` under vmap, checkpoint and shard_map."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import P
from jax.sharding import AxisType

from blaze_jax import RESIDUAL_NAMES, expert_ffn
from tests.expert_problems import apply, make_problem, results
from tests.numerics import assert_close, assert_same_bits
from tests.routings import ROUTINGS, random_experts

SAVES = ("pre_activations", "inputs")


def loss(x, params, weights, experts, target, **options):
    return jnp.square(apply(expert_ffn, x, params, weights, experts, **options) - target).sum()


def gradients(function, problem):
    return jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2)))(*problem)


@pytest.mark.slow
def test_vmap_over_tokens_and_weights():
    problems = [make_problem(random_experts(9, 2, range(4), seed), 4, seed=seed) for seed in range(3)]
    out = jax.jit(jax.vmap(partial(results, expert_ffn)))(jax.tree.map(lambda *arrays: jnp.stack(arrays), *problems))
    for i, problem in enumerate(problems):
        assert_close(jax.tree.map(lambda a, i=i: a[i], out), results(expert_ffn, problem))


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize(
    "policy", [None, jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)], ids=["no_policy", "names"]
)
def test_checkpoint_gives_the_same_bits(policy, save):
    problem = make_problem(*ROUTINGS["random"])
    plain = partial(loss, save=save)
    assert_same_bits(gradients(jax.checkpoint(plain, policy=policy), problem), gradients(plain, problem))


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])


@pytest.fixture(scope="module")
def problem():
    return make_problem(random_experts(36, 2, range(5)), 5, n=12)


@pytest.mark.parametrize(
    ("check_vma", "save"), [(True, "pre_activations"), (True, "inputs"), (False, "pre_activations")]
)
def test_gradient_of_sharded_tokens(mesh, problem, check_vma, save):
    data = P("devices")

    @partial(jax.shard_map, mesh=mesh, in_specs=(data, P(), data, data, data), out_specs=P(), check_vma=check_vma)
    def sharded(*args):
        return jax.lax.psum(loss(*args, save=save), "devices")

    assert_close(gradients(sharded, problem), gradients(loss, problem))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.slow
def test_gradient_inside_sharded_tokens(mesh, problem, check_vma):
    data = P("devices")

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(data, P(), data, data, data),
        out_specs=(P(), (data, P(), data)),
        check_vma=check_vma,
    )
    def sharded(*args):
        value, (dx, d_params, d_weights) = jax.value_and_grad(loss, argnums=(0, 1, 2))(*args)
        if not check_vma:  # with it, the replicated parameters' gradients come summed
            d_params = jax.lax.psum(d_params, "devices")
        return jax.lax.psum(value, "devices"), (dx, d_params, d_weights)

    assert_close(sharded(*problem), gradients(loss, problem))


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_of_sharded_expert_width(mesh, problem, check_vma):
    whole = {name: problem.params[name] for name in ("w_gate", "w_up", "w_down", "b_gate", "b_up")}
    problem = problem._replace(params=whole)
    last, middle = P(None, None, "devices"), P(None, "devices", None)
    specs = {"w_gate": last, "w_up": last, "w_down": middle, "b_gate": P(None, "devices"), "b_up": P(None, "devices")}

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), specs, P(), P(), P()), out_specs=P(), check_vma=check_vma)
    def sharded(x, params, weights, experts, target):
        y = jax.lax.psum(apply(expert_ffn, x, params, weights, experts), "devices")
        return jnp.square(y - target).sum()

    assert_close(gradients(sharded, problem), gradients(loss, problem))
