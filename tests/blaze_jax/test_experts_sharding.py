"""`expert_ffn` over several devices: sharded tokens, sharded expert widths, explicit and automatic."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from blaze_jax import expert_ffn
from tests.expert_problems import apply, make_problem
from tests.numerics import assert_close
from tests.routings import random_experts

DEVICES = 4


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices("cpu")[:DEVICES]), ("devices",))


@pytest.fixture(scope="module")
def problem():
    return make_problem(random_experts(DEVICES * 9, 2, range(5)), 5, n=DEVICES * 3)


def loss(x, params, weights, experts, target, **options):
    return jnp.square(apply(expert_ffn, x, params, weights, experts, **options) - target).sum()


def gradients(function, problem):
    return jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2)))(*problem)


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
