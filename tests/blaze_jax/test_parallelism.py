"""What `Parallelism` says: which part of the parameters and of the optimizer's moments a device keeps, and its limits.

Modules place their parameters, and optimizers their moments; inside of `jax.shard_map`, too, where each device draws
its part of one device's numbers. `test_meshes.py` holds what the layer then computes.
"""

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import P
from jax.sharding import AxisType

import blaze_jax
from blaze_jax import MoE, MoEConfig, Parallelism, moe
from blaze_jax.experts import compute_experts
from tests import layers
from tests.layers import random_parameters, random_tokens
from tests.numerics import assert_close, assert_same_bits
from tests.over_devices import make_mesh, roles

CONFIG = MoEConfig(num_experts=4, experts_per_token=1, expert_width=8, activation="relu", load_balancing_weight=0.0)
FULL = MoEConfig(num_experts=8, experts_per_token=3, expert_width=8, shared_width=8, shared_gate=True, router_bias=True)
WIDTH = 16
X = jnp.linspace(-1, 1, 16 * WIDTH).reshape(16, WIDTH)
AXES = {"fsdp": 2, "expert": 2}
SPLIT = {"all": {"fsdp": 2, "expert": 2, "tensor": 2}, "width": {"fsdp": 5}}  # by five, who do not divide the experts
OPTIMIZER = optax.adam(1e-3)
PARALLEL = Parallelism(fsdp="fsdp", expert="expert", exchange="all_gather", row_budget=None)


class Linen(nn.Module):
    parallel: Parallelism | None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH)(x)  # a layer that says nothing of meshes
        return x + MoE(CONFIG, parallel=self.parallel, train=True)(x)


class Nnx(nnx.Module):
    def __init__(self, parallel):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.moe = blaze_jax.nnx.MoE(WIDTH, CONFIG, parallel=parallel, train=True, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return x + self.moe(self.dense(x))


def loss(y):
    return jnp.square(y).mean()


def of_linen(parallel, mesh, steps=0):
    """Parameters and moments."""
    model = Linen(parallel)

    def create(key):
        params = model.init(key, X)["params"]
        return params, OPTIMIZER.init(params)

    @jax.jit
    def step(params, moments):
        gradients = jax.grad(lambda params: loss(model.apply({"params": params}, X)))(params)
        updates, moments = OPTIMIZER.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments

    shardings = nn.get_sharding(jax.eval_shape(create, jax.random.key(0)), mesh) if mesh else None
    state = jax.jit(create, out_shardings=shardings)(jax.random.key(0))
    return step(*state) if steps else state


def of_nnx(parallel, _, steps=0):
    model = nnx.jit(lambda: Nnx(parallel))()
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda model: loss(model(X)))(model))

    if steps:
        step(model, optimizer)
    return nnx.to_pure_dict(nnx.state(model, nnx.Param)), nnx.to_pure_dict(nnx.state(optimizer.opt_state))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("of", [of_linen, of_nnx])
@pytest.mark.ci_cases("of_linen-AxisType.Auto-*")
def test_each_device_keeps_a_part(of, kind, steps):
    mesh = make_mesh(AXES, kind)
    with jax.set_mesh(mesh):
        split = of(PARALLEL, mesh, steps)
    for path, array in jax.tree_util.tree_leaves_with_path(split):
        name = jax.tree_util.keystr(path)
        parts = 1 if "ense" in name or "count" in name else 4
        assert [s.data.nbytes * parts for s in array.addressable_shards] == [array.nbytes] * 4, name
    assert_close(nn.unbox(split[0]), nn.unbox(of(None, None, steps)[0]), 1e-4 if steps else 1e-6)


def test_stacked_parameters_are_split_in_the_same_way():
    stacked = nn.vmap(
        MoE, variable_axes={"params": 1}, split_rngs={"params": True}, metadata_params={nn.PARTITION_NAME: "layers"}
    )
    mesh = make_mesh(AXES)
    parallel = replace(PARALLEL, mesh=mesh)
    shapes = jax.eval_shape(stacked(CONFIG, parallel=parallel).init, jax.random.key(0), X[:, None])
    specs = jax.tree.map(lambda sharding: sharding.spec, nn.get_sharding(shapes, mesh))["params"]
    assert specs["w_up"] == P(("expert", "fsdp"), None, None, None)
    assert specs["w_router"] == P(("fsdp", "expert"), None, None)
    assert nn.get_partition_spec(shapes)["params"]["w_up"] == P("expert", "layers", "embed", "expert_mlp")


def test_models_of_nnx_are_split_while_abstract_and_at_once_where_the_mesh_is_given():
    _, state = nnx.get_abstract_model(lambda: Nnx(PARALLEL), make_mesh(AXES, AxisType.Explicit))
    assert nnx.to_pure_dict(state)["moe"]["w_up"].sharding.spec == P(("expert", "fsdp"), None, None)
    model = Nnx(replace(PARALLEL, mesh=make_mesh(AXES)))
    assert model.moe.w_up[...].addressable_shards[0].data.shape == (1, WIDTH, 8)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("module", "axes"), [("linen", "all"), ("nnx", "all"), ("linen", "width")])
@pytest.mark.default_cases("linen-all-False")
def test_parts_initialised_inside_shard_map_are_those_of_one_device(module, axes, check_vma):
    config = MoEConfig(num_experts=4, experts_per_token=2, expert_width=8, shared_width=8, router_bias=True)
    mesh = make_mesh(SPLIT[axes])
    parallel = Parallelism(mesh, **roles(SPLIT[axes]))
    specs = parallel.specs(config, layers.WIDTH, use_bias=True)
    assert any(spec != P(*[None] * len(spec)) for spec in specs.values())

    def created(parallel):
        options = {"use_bias": True, "bias_init": nn.initializers.normal(1.0), "parallel": parallel}
        return layers.unboxed(layers.created(module, config, **options))

    over = jax.shard_map(lambda: created(parallel), mesh=mesh, in_specs=(), out_specs=specs, check_vma=check_vma)
    assert_close(jax.jit(over)(), jax.jit(lambda: created(None))(), 1e-6)  # XLA fuses them in other ways


def test_a_devices_part_of_parameters_is_as_small_as_the_mesh_is_large():
    with jax.set_mesh(make_mesh(SPLIT["all"])):
        shards = Parallelism(**roles(SPLIT["all"])).shards(FULL, 16)
    for name, parameter in FULL.parameters(16).items():
        assert math.prod(shards[name].shape) * 8 == math.prod(parameter.shape), name


@pytest.mark.slow
def test_no_token():
    with jax.set_mesh(make_mesh({"expert": 2})):
        y, routing = moe(random_tokens(0), random_parameters(FULL), FULL, parallel=Parallelism(expert="expert"))
    assert y.shape == (0, layers.WIDTH)
    assert routing.demand.sum() == 0


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all", "permute"])
def test_an_id_of_no_expert_poisons_its_token(exchange):
    params = {name: w for name, w in random_parameters(CONFIG).items() if name != "w_router"}
    experts = jnp.array([[0], [4], [-1], [-2], [3], [2]])
    parallel, split = Parallelism(expert="expert", exchange=exchange), P("expert")
    specs = parallel.specs(CONFIG, layers.WIDTH, sizes={"expert": 2})
    options = {"activation": "relu", "save": "inputs", "implementation": None}
    run = partial(compute_experts, parallel=parallel, specs=specs, **options)
    in_specs = (split, {name: specs[name] for name in params}, split, split)
    over = jax.shard_map(run, mesh=make_mesh({"expert": 2}), in_specs=in_specs, out_specs=split)
    y = jax.jit(over)(random_tokens(6), params, jnp.ones((6, 1)), experts)
    assert_same_bits(np.isnan(y).any(1), np.array([False, True, False, True, False, False]))
    assert (y[2] == 0).all()


@pytest.mark.parametrize(
    ("axes", "options", "message"),
    [
        ({"expert": 3}, {}, "num_experts=8 must be a multiple of the 3 devices along 'expert', the expert axis"),
        ({"tensor": 3}, {}, "expert_width=8 must be a multiple of the 3 devices along 'tensor', the tensor axis"),
        ({"fsdp": 3}, {}, "model_width=10 must be a multiple of the 3 devices along 'fsdp', the fsdp axis"),
        ({"data": 2}, {"expert": "expert"}, "the mesh has 'data', but axis 'expert'"),
        ({}, {"expert": "expert"}, "there is no mesh, but axis 'expert' has a role"),
    ],
)
@pytest.mark.default_cases("*")
def test_meshes_that_do_not_fit_are_named(axes, options, message):
    call = partial(moe, random_tokens(6), random_parameters(FULL), FULL, parallel=Parallelism(**roles(axes) | options))
    with jax.set_mesh(make_mesh(axes)) if axes else nullcontext(), pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "at least one mesh axis must have a role"),
        ({"expert": "a", "data": ("a", "b")}, "and none two"),
        ({"expert": 3}, "expert=3 must be the name of a mesh axis"),
        ({"expert": "a", "exchange": "pigeon"}, "exchange='pigeon' must be None or one of all_gather"),
        ({"expert": "a", "chunks": 0}, "chunks=0 must be at least 1"),
        ({"expert": "a", "row_budget": 0}, "row_budget=0 must be above 0"),
    ],
)
@pytest.mark.default_cases("*")
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Parallelism(**options)


def test_a_call_that_says_its_devices_twice_or_by_half_is_named():
    params, x, parallel = random_parameters(FULL), random_tokens(8), Parallelism(data="data", expert="expert")
    with pytest.raises(ValueError, match="parallel takes the place of axis_name"):
        moe(x, params, FULL, parallel=parallel, axis_name="data")
    inside = jax.shard_map(
        lambda params, x: moe(x, params, FULL, parallel=parallel)[0],
        mesh=make_mesh({"data": 2, "expert": 2}),
        in_specs=(P(), P("data")),
        out_specs=P("data"),
        axis_names={"data"},
    )
    with pytest.raises(ValueError, match=r"jax.shard_map is over data but not over expert"):
        jax.eval_shape(inside, params, x)
