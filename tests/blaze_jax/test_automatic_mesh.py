"""Meshes with automatic axes, as `jax.sharding.Mesh` has: every device computes its own tokens, or it is warned of."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding

from blaze_jax import MoEConfig, Parallelism, expert_ffn, moe
from blaze_jax.checks import warn_once
from blaze_jax.layer_observer import observed_layers
from tests.expert_problems import apply, make_problem
from tests.layers import CONFIGS, gradients, layer, random_parameters, random_tokens, step
from tests.numerics import assert_close
from tests.routings import random_experts

MESH = Mesh(np.array(jax.devices("cpu")[:8]).reshape(4, 2), ("data", "model"))
SPLIT, WHOLE = P("data"), P()
EACH_COMPUTES_ALL = "the experts are compiled for {} devices, each of which computes all tokens"


def put(tree, spec, mesh=MESH):
    """The arrays on the mesh, or where they were."""
    return tree if spec is None else jax.device_put(tree, NamedSharding(mesh, spec))


@pytest.mark.parametrize(
    ("name", "tokens", "parameters"),
    [
        ("everything", SPLIT, WHOLE),
        ("plain", P(None, ("data", "model")), None),
        ("plain", None, None),
        ("rounded", SPLIT, WHOLE),
    ],
    ids=str,
)
def test_layer(name, tokens, parameters):
    config, x = CONFIGS[name], random_tokens(4, 16)
    params = random_parameters(config, use_bias=True)
    with jax.set_mesh(MESH), observed_layers() as layers:
        out = jax.jit(partial(gradients, config=config))(put(params, parameters), put(x, tokens))
    assert {traced.num_tokens for traced in layers} == {4 * 16 // 8}
    assert_close(out, step(params, x, config))


@pytest.mark.parametrize("parallel", [None, Parallelism(data="data", expert="model")], ids=["", "experts"])
@pytest.mark.slow
def test_beside_explicit_axes(parallel):
    config, x = CONFIGS["plain"], random_tokens(8)
    params = random_parameters(config)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mesh), observed_layers() as layers:
        run = jax.jit(partial(gradients, config=config, parallel=parallel))
        out = run(put(params, WHOLE, mesh), put(x, SPLIT, mesh))
    assert {traced.num_tokens for traced in layers} == {1}
    assert jax.typeof(out[0][1][0]).sharding.spec == P("data", None)
    assert_close(out, step(params, x, config))


@pytest.mark.slow
def test_mesh_is_that_of_the_arrays():
    config, few = CONFIGS["plain"], random_tokens(5)  # so that three of eight devices have padding
    params = random_parameters(config)
    with observed_layers() as layers:
        jax.jit(moe, static_argnums=2).trace(put(random_tokens(8), SPLIT), params, config)
        out = jax.jit(moe, static_argnums=2)(few, put(params, WHOLE), config)
    assert {traced.num_tokens for traced in layers} == {1}
    assert_close(out, layer(few, params, config))


@pytest.mark.parametrize(("axis", "tokens"), [(None, 1), ("data", 4), (("data", "model"), 8)])
@pytest.mark.slow
def test_examples_that_vmap_splits_are_not_split_again(axis, tokens):
    config, x = CONFIGS["plain"], random_tokens(8, 8)
    params = random_parameters(config)

    def loss(params, x):
        return jnp.square(jax.vmap(lambda x: moe(x, params, config)[0], spmd_axis_name=axis)(x)).sum()

    warn_once.cache_clear()
    with observed_layers() as layers:
        step = jax.jit(jax.grad(loss)).trace(put(params, WHOLE), put(x, P(axis)))
        if axis == ("data", "model"):  # the examples' loop is what XLA cannot split
            with pytest.warns(UserWarning, match=EACH_COMPUTES_ALL.format(8)):
                step.lower()
            return
        out = step.lower().compile()(put(params, WHOLE), put(x, P(axis)))
    assert {traced.num_tokens for traced in layers} == {tokens}
    assert_close(out, jax.jit(jax.grad(loss))(params, x))


@pytest.mark.slow
def test_inside_shard_map_over_some_axes_the_others_split_the_rest():
    config, x = CONFIGS["plain"], random_tokens(8, 2)
    params = random_parameters(config)

    def loss(params, x, parallel=None):
        return jnp.square(moe(x, params, config, axis_name=None if parallel else (), parallel=parallel)[0]).sum()

    @partial(jax.shard_map, mesh=MESH, in_specs=(WHOLE, SPLIT), out_specs=P(), axis_names={"data"}, check_vma=False)
    def of_all(params, x):
        return jax.lax.psum(loss(params, x, Parallelism(data="model")), "data")

    with observed_layers() as layers:
        out = jax.jit(jax.value_and_grad(of_all))(params, x)
    assert {traced.num_tokens for traced in layers} == {2}
    assert_close(out, jax.jit(jax.value_and_grad(loss))(params, x))


def placed_in_jit(config, params, x):
    """The sharding is said to `jax.jit` alone, of arrays of numpy."""
    everywhere = [NamedSharding(MESH, WHOLE), NamedSharding(MESH, SPLIT)]
    run = jax.jit(lambda params, x: moe(x, params, config)[0], in_shardings=everywhere)
    return run, (jax.tree.map(np.asarray, params), np.asarray(x))


def experts_alone(*_):
    problem = make_problem(random_experts(32, 2, range(6)), 6)
    arguments = (problem.x, problem.params, problem.weights, problem.experts)
    return jax.jit(partial(apply, expert_ffn)), tuple(map(put, arguments, (SPLIT, WHOLE, SPLIT, SPLIT)))


def experts_of_ones_own(config, params, x):
    run = jax.jit(lambda params, x: moe(x, params, config, experts=lambda *a, **k: expert_ffn(*a, **k))[0])
    return run, (put(params, WHOLE), put(x, SPLIT))


def half_inside(config, params, x):
    """Inside `jax.shard_map` over one of two axes."""

    @partial(jax.shard_map, mesh=MESH, in_specs=(WHOLE, SPLIT), out_specs=SPLIT, axis_names={"data"})
    def run(params, x):
        return moe(x, params, config)[0]

    return jax.jit(run), (params, x)


@pytest.mark.parametrize(
    ("make", "devices"), [(placed_in_jit, 8), (experts_alone, 8), (experts_of_ones_own, 8), (half_inside, 2)]
)
def test_devices_that_all_compute_the_same_are_warned_of(make, devices):
    config = CONFIGS["plain"]
    run, arguments = make(config, random_parameters(config), random_tokens(8))
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match=EACH_COMPUTES_ALL.format(devices)):
        run.lower(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_hopper_kernels_lower_on_each_devices_tokens(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    config = MoEConfig(num_experts=8, experts_per_token=2, expert_width=64, implementation="mosaic_gpu")

    def shaped(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    params = {name: shaped(parameter.shape, WHOLE) for name, parameter in config.parameters(128).items()}
    gradient = jax.jit(jax.grad(lambda params, x: moe(x, params, config)[0].astype(jnp.float32).sum()))
    with jax.set_mesh(mesh), observed_layers() as layers:
        text = gradient.trace(params, shaped((64, 128), SPLIT)).lower(lowering_platforms=("cuda",)).as_text()
    assert {traced.num_tokens for traced in layers} == {8}
    assert "moe_router" in text
    assert "moe_up_projection" in text
