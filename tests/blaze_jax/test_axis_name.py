"""Tokens split over devices by `shard_map`: with `axis_name` the layer is that of one device with all tokens."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import P
from jax.sharding import AxisType

import blaze_jax
from blaze_jax import MoE, moe, route, update_selection_bias
from blaze_jax.checks import warn_once
from blaze_jax.nnx import AuxiliaryLoss
from blaze_jax.routing import Routing
from tests.layers import CONFIGS, WIDTH, layer, loss, random_parameters, random_tokens, step
from tests.numerics import assert_close, assert_same_bits

# jax 0.12 cannot differentiate the error function of a GELU where check_vma=True.
CONFIG = replace(CONFIGS["everything"], activation="swiglu")
MESHES = {"data": ((4,), ("data",)), ("data", "more"): ((2, 2), ("data", "more"))}
over_axes = pytest.mark.parametrize("axis_name", MESHES)


def mesh_of(axis_name):
    shape, names = MESHES[axis_name]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


@over_axes
@pytest.mark.parametrize("check_vma", [True, False])
def test_statistics_losses_and_their_gradients_are_those_of_all_tokens(axis_name, check_vma):
    logits = jnp.asarray(2 * np.random.default_rng(0).standard_normal((40, 12)), jnp.float32)
    split, names = P(axis_name), ("load_balancing_loss", "z_loss", "entropy")

    def routed(logits, axis_name=None):
        out = route(logits, 3, axis_name=axis_name)
        return out._replace(weighted_losses=sum((i + 2) * getattr(out, name) for i, name in enumerate(names)))

    sharded = jax.shard_map(
        partial(routed, axis_name=axis_name),
        mesh=mesh_of(axis_name),
        in_specs=split,
        out_specs=Routing(split, split, *[P()] * 7),
        check_vma=check_vma,
    )
    out, ref = jax.jit(sharded)(logits), jax.jit(routed)(logits)
    assert_same_bits((out.experts, out.demand), (ref.experts, ref.demand))
    assert_close(out, ref)
    gradient, expected = (jax.jit(jax.grad(lambda l, f=f: f(l).weighted_losses))(logits) for f in (sharded, routed))
    assert_close(gradient, expected)


def test_dropped_share_is_that_of_all_devices():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((40, 6)), jnp.float32)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh_of("data"), in_specs=P("data"), out_specs=(P("data"), P(), P()))
    def sharded(logits):
        out = route(logits, 2, expert_capacity=2, axis_name="data")
        return out.experts, out.tokens_per_expert, out.dropped_share

    experts, tokens_per_expert, dropped_share = sharded(logits)
    assert_close(dropped_share, np.mean(np.asarray(experts) == -1))
    assert_same_bits(tokens_per_expert, np.bincount(experts[experts >= 0], minlength=6).astype(np.int32))


@over_axes
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_is_that_of_one_device(axis_name, check_vma):
    @partial(jax.shard_map, mesh=mesh_of(axis_name), in_specs=(P(), P(axis_name)), out_specs=P(), check_vma=check_vma)
    def sharded(params, x):
        return loss(params, x, CONFIG, axis_name=axis_name)[0]

    params, x = random_parameters(CONFIG), random_tokens(32)
    (expected, _), gradients = step(params, x, CONFIG)
    assert_close(jax.jit(jax.value_and_grad(sharded, argnums=(0, 1)))(params, x), (expected, gradients))


@pytest.mark.parametrize("form", ["linen", "nnx"])
@pytest.mark.slow
def test_selection_bias_of_every_device_is_that_of_all_tokens(form):
    params, x = random_parameters(CONFIG), random_tokens(32)
    _, routing = layer(x, params, CONFIG, selection_bias=jnp.zeros(6))
    expected = update_selection_bias(jnp.zeros(6), routing.demand, CONFIG.bias_update_rate)

    # What each device has: the spec of the bias promises nothing.
    @partial(jax.shard_map, mesh=mesh_of("data"), in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)
    def step(params, x):
        if form == "linen":
            _, state = MoE(CONFIG, axis_name="data").apply(
                {"params": params, "router_state": {"selection_bias": jnp.zeros(6)}},
                x,
                train=True,
                mutable=["losses", "router_state"],
            )
            return state["router_state"]["selection_bias"][None]
        module = blaze_jax.nnx.MoE(WIDTH, CONFIG, axis_name="data", rngs=nnx.Rngs(0))
        for name, value in params.items():
            getattr(module, name)[...] = value
        nnx.capture(module, AuxiliaryLoss)(x, train=True)
        return module.selection_bias[...][None]

    assert_same_bits(np.asarray(jax.jit(step)(params, x)), np.tile(expected, (4, 1)))


def test_one_devices_losses_are_warned_of():
    def sharded(axis_name):
        def step(params, x):
            return moe(x, params, CONFIGS["plain"], train=True, axis_name=axis_name)[0]

        return jax.shard_map(step, mesh=mesh_of("data"), in_specs=(P(), P("data")), out_specs=P("data"))

    warn_once.cache_clear()
    arguments = random_parameters(CONFIGS["plain"]), random_tokens(32)
    jax.eval_shape(sharded(()), *arguments)
    with pytest.warns(UserWarning, match=r"inside jax.shard_map over data, .* give axis_name"):
        jax.eval_shape(sharded(None), *arguments)
    with pytest.raises(ValueError, match="axis_name=3 must be the name of a mesh axis"):
        route(jnp.zeros((2, 3)), 2, axis_name=3)
