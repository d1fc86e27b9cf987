"""Meshes with explicit axes, as `jax.make_mesh` gives them: same numbers, and results split as the tokens are."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import P
from jax.sharding import NamedSharding

import blaze_jax
from blaze_jax import MoE, MoEConfig, Router, build_dispatch, expert_ffn, moe, route
from blaze_jax.layer_observer import observed_layers
from blaze_jax.nnx import AuxiliaryLoss
from tests.expert_problems import apply, make_problem
from tests.layers import CONFIGS, WIDTH, layer, random_parameters, random_tokens
from tests.numerics import assert_close, assert_same_bits
from tests.routings import random_experts

MESH = jax.make_mesh((4,), ("data",), devices=jax.devices("cpu")[:4])  # a GPU may be the only one
SPLIT, WHOLE, NOWHERE = P("data"), P(), None
PLACES = [(SPLIT, WHOLE), (SPLIT, NOWHERE), (WHOLE, WHOLE), (NOWHERE, WHOLE), (NOWHERE, NOWHERE)]


def put(tree, spec, mesh=MESH):
    """The arrays on the mesh, or where they were."""
    return tree if spec is None else jax.device_put(tree, NamedSharding(mesh, spec))


def spec_of(array):
    return [entry for entry in jax.typeof(array).sharding.spec if entry is not None]


def total(outputs):
    return sum(
        jnp.vdot(jnp.sin(1 + jnp.arange(o.size, dtype=o.dtype)).reshape(o.shape), jnp.asarray(o)) for o in outputs
    )


@pytest.mark.parametrize(("tokens", "parameters"), PLACES[::2], ids=str)  # a layer meets all of them
@pytest.mark.slow
def test_experts(tokens, parameters):
    problem = make_problem(random_experts(32, 2, range(6)), 6)

    def gradients(x, params, weights, experts):
        def loss(x, params, weights):
            y = apply(expert_ffn, x, params, weights, experts)
            return jnp.square(y).sum(), y

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(x, params, weights)

    arguments = (problem.x, problem.params, problem.weights, problem.experts)
    expected = jax.jit(gradients)(*arguments)
    with jax.set_mesh(MESH):
        # Ids that lie elsewhere than the tokens are brought to them.
        placed = put(problem.x, tokens), put(problem.params, parameters), put(problem.weights, tokens), problem.experts
        out = jax.jit(gradients)(*placed)
        assert_close(out, expected)
        assert spec_of(out[0][1]) == spec_of(out[1][0]) == (["data"] if tokens == SPLIT else [])


@pytest.mark.parametrize(
    ("tokens", "parameters", "name"),
    [*((*place, "everything") for place in PLACES), (SPLIT, WHOLE, "limited"), (SPLIT, WHOLE, "rounded")],
    ids=str,
)
def test_layer(tokens, parameters, name):
    config, x = CONFIGS[name], random_tokens(8, 4)
    params = random_parameters(config, use_bias=True)
    bias = jnp.linspace(-0.1, 0.1, 6) if config.has_selection_bias else None

    def loss(params, x):
        y, routing = moe(x, params, config, selection_bias=bias, train=True)
        return jnp.square(y).mean() + sum(routing.weighted_losses.values()), (y, routing)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    expected = step(params, x)
    with jax.set_mesh(MESH):
        out = step(put(params, parameters), put(x, tokens))
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

    def loss(params, x):
        y, routing = moe(x, params, config, train=True)
        in_order = routing.weights.T @ jnp.linspace(0, 1, 32)
        return jnp.square(y).mean() + in_order.sum() + sum(routing.weighted_losses.values()), (y, routing)

    step = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    expected = jax.jit(step)(params, x)
    with jax.set_mesh(mesh), observed_layers() as layers:
        out = jax.jit(step)(params, put(x, spec, mesh))
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


@pytest.mark.slow  # functions run by default
def test_linen():
    config, x = CONFIGS["everything"], random_tokens(8)
    module = MoE(config, use_bias=True, train=True)

    def loss(variables, x):
        y, sown = module.apply(variables, x, mutable=["losses", "router_state"])
        return jnp.square(y).mean() + sum(jax.tree.leaves(sown["losses"])), sown["router_state"]

    variables = jax.jit(module.init)(jax.random.key(0), x)
    expected = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables, x)
    with jax.set_mesh(MESH):
        own = jax.jit(module.init)(jax.random.key(0), put(x, SPLIT))
        assert_close(nn.unbox(own), nn.unbox(variables))
        assert_close(jax.jit(jax.value_and_grad(loss, has_aux=True))(own, put(x, SPLIT)), expected)


@pytest.mark.slow
def test_nnx():
    config, x = CONFIGS["everything"], random_tokens(8)

    def gradient(x):
        module = blaze_jax.nnx.MoE(WIDTH, config, train=True, rngs=nnx.Rngs(0))

        @nnx.jit
        def step(module, x):
            def loss(module):
                y, losses = nnx.capture(module, AuxiliaryLoss)(x)
                return jnp.square(y).mean() + sum(jax.tree.leaves(losses))

            return nnx.grad(loss)(module)

        return nnx.to_pure_dict(step(module, x)), module.selection_bias[...]

    expected = gradient(x)
    with jax.set_mesh(MESH):
        assert_close(gradient(put(x, SPLIT)), expected)


@pytest.mark.slow
def test_hopper_kernels_lower_on_each_devices_tokens():
    config = MoEConfig(
        num_experts=8, experts_per_token=2, expert_width=64, implementation="mosaic_gpu", router=Router()
    )
    shapes = {name: p.shape for name, p in config.parameters(128).items()}
    with jax.set_mesh(MESH):
        params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
        x = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16, sharding=NamedSharding(MESH, SPLIT))
        step = jax.jit(jax.grad(lambda params, x: moe(x, params, config)[0].astype(jnp.float32).sum()))
        text = step.trace(params, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "moe_router" in text
    assert "moe_up_projection" in text
