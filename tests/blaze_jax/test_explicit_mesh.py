"""Meshes with explicit axes, as `jax.make_mesh` gives them: same numbers, and results split as the tokens are."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding

from blaze_jax import MoEConfig, build_dispatch, moe, route
from blaze_jax.layer_observer import observed_layers
from tests.layers import CONFIGS, layer, loss, random_parameters, random_tokens, step
from tests.numerics import assert_close, assert_same_bits

MESH = jax.make_mesh((4,), ("data",), devices=jax.devices("cpu")[:4])  # a GPU may be the only one
SPLIT, WHOLE, NOWHERE = P("data"), P(), None
PLACES = [(SPLIT, WHOLE), (SPLIT, NOWHERE), (WHOLE, WHOLE), (NOWHERE, WHOLE)]


def put(tree, spec, mesh=MESH):
    """The arrays on the mesh, or where they were."""
    return tree if spec is None else jax.device_put(tree, NamedSharding(mesh, spec))


def spec_of(array):
    return [entry for entry in jax.typeof(array).sharding.spec if entry is not None]


@pytest.mark.parametrize(
    ("tokens", "parameters", "name"),
    [*((*place, "everything") for place in PLACES), (SPLIT, WHOLE, "limited"), (SPLIT, WHOLE, "rounded")],
    ids=str,
)
def test_layer(tokens, parameters, name):
    config, x = CONFIGS[name], random_tokens(8, 4)
    params = random_parameters(config, use_bias=True)
    expected = step(params, x, config)
    with jax.set_mesh(MESH):
        out = step(put(params, parameters), put(x, tokens), config)
    assert_close(out, expected)
    (_, (y, routing)), (_, dx) = out
    for array in (y, routing.experts, routing.weights, dx):
        assert spec_of(array) == (["data"] if tokens == SPLIT else [])
    assert_same_bits(np.asarray(routing.experts), np.asarray(expected[0][1][1].experts))


@pytest.mark.parametrize(
    ("name", "spec", "per_device"),
    [
        ("plain", P("data", "more"), 8),
        ("plain", P("more", None, "data"), 16),
        ("plain", P(None, ("more", "data")), 8),
        ("limited", P(None, "data"), 16),
        ("rounded", P("data", "more"), 8),
    ],
    ids=str,
)
def test_tokens_split_in_any_way_are_computed_once(name, spec, per_device):
    mesh = jax.make_mesh((2, 2), ("data", "more"), devices=jax.devices("cpu")[:4])
    config, x = CONFIGS[name], random_tokens(4, 8)
    params = random_parameters(config)

    @jax.jit
    @partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def in_order(params, x):
        value, (y, routing) = loss(params, x, config)
        return value + (routing.weights.T @ jnp.linspace(0, 1, 32)).sum(), (y, routing)

    expected = in_order(params, x)
    with jax.set_mesh(mesh), observed_layers() as layers:
        out = in_order(params, put(x, spec, mesh))
    (_, (y, routing)), (_, dx) = out
    assert {traced.num_tokens for traced in layers} == {per_device}
    assert jax.typeof(y).sharding.spec == jax.typeof(dx).sharding.spec == P(*spec, *[None] * (3 - len(spec)))
    assert_close(out, expected)
    assert_same_bits(np.asarray(routing.experts), np.asarray(expected[0][1][1].experts))


@pytest.mark.parametrize("spec", [WHOLE, P(None, "data")], ids=str)
@pytest.mark.slow
def test_vmap_of_examples_that_are_not_split(spec):
    config, x = CONFIGS["plain"], random_tokens(2, 8)
    params = random_parameters(config)
    expected = jax.jit(jax.vmap(lambda x: moe(x, params, config)[0]))(x)
    with jax.set_mesh(MESH):
        assert_close(jax.jit(jax.vmap(lambda x: moe(x, params, config)[0]))(put(x, spec)), expected)


def test_vmap_of_split_examples_is_refused():
    config = CONFIGS["plain"]
    params, x = random_parameters(config), random_tokens(4, 2)
    with jax.set_mesh(MESH), pytest.raises(NotImplementedError, match="split over the explicit mesh axis data: call"):
        jax.eval_shape(jax.vmap(lambda x: moe(x, params, config)[0]), put(x, SPLIT))


@pytest.mark.slow
def test_parameters_split_in_any_way():
    x = random_tokens(8)
    config = MoEConfig(num_experts=8, experts_per_token=2, expert_width=8)
    params = random_parameters(config)
    specs = {"w_router": P(None, "data"), "w_gate": P("data"), "w_up": P(None, None, "data"), "w_down": P(None, "data")}

    def loss(params, x):
        return jnp.square(moe(x, params, config)[0]).sum()

    with jax.set_mesh(MESH):
        placed = {name: put(value, specs[name]) for name, value in params.items()}
        gradient = jax.jit(jax.grad(loss))(placed, put(x, SPLIT))
    assert_close(gradient, jax.jit(jax.grad(loss))(params, x))
    assert {name: jax.typeof(value).sharding.spec for name, value in gradient.items()} == {
        name: P(*spec, *[None] * (value.ndim - len(spec)))
        for (name, spec), value in zip(specs.items(), params.values(), strict=True)
    }


@pytest.mark.slow
def test_without_a_mesh_set():
    config, x = CONFIGS["plain"], random_tokens(8)
    params = random_parameters(config)
    y, _ = layer(put(x, SPLIT), params, config)
    assert spec_of(y) == ["data"]
    assert_close(np.asarray(y), np.asarray(layer(x, params, config)[0]))


@pytest.mark.parametrize("spec", [SPLIT, WHOLE])
def test_router_and_dispatch_by_themselves(spec):
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((8, 6)), jnp.float32)
    choose = jax.jit(route, static_argnums=1)
    expected = choose(logits, 2)
    with jax.set_mesh(MESH):
        out = choose(put(logits, spec), 2)
        dispatch = build_dispatch(out.experts, 6)
    assert_close(out, expected)
    assert_same_bits(dispatch, build_dispatch(expected.experts, 6))
