"""Modules with `Parallelism` place their parameters, and optimizers their moments: each device keeps its part.

Inside `jax.shard_map`, too, where each device draws its part of one device's numbers.
"""

from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import P
from jax.sharding import AxisType

import blaze_jax
from blaze_jax import MoE, MoEConfig, Parallelism
from tests import layers
from tests.numerics import assert_close
from tests.over_devices import make_mesh, roles

CONFIG = MoEConfig(num_experts=4, experts_per_token=1, expert_width=8, activation="relu", load_balancing_weight=0.0)
WIDTH = 16
X = jnp.linspace(-1, 1, 16 * WIDTH).reshape(16, WIDTH)
AXES = {"fsdp": 2, "expert": 2}
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


@pytest.mark.parametrize(
    ("kind", "of", "steps"),
    [(kind, of, steps) for steps in (0, 1) for kind in (AxisType.Explicit, AxisType.Auto) for of in (of_linen, of_nnx)],
)
@pytest.mark.default_cases("AxisType.Auto-of_linen-0", "AxisType.Auto-of_linen-1")
def test_each_device_keeps_a_part(kind, of, steps):
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


def test_abstract_models_of_nnx_are_split():
    mesh = make_mesh(AXES, AxisType.Explicit)
    _, state = nnx.get_abstract_model(lambda: Nnx(PARALLEL), mesh)
    assert nnx.to_pure_dict(state)["moe"]["w_up"].sharding.spec == P(("expert", "fsdp"), None, None)


def test_a_mesh_given_with_the_axes_places_at_once():
    mesh = make_mesh(AXES)
    model = Nnx(replace(PARALLEL, mesh=mesh))
    assert model.moe.w_up[...].addressable_shards[0].data.shape == (1, WIDTH, 8)


SPLIT = {"all": {"fsdp": 2, "expert": 2, "tensor": 2}, "width": {"fsdp": 5}}  # by five, who do not divide the experts


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
