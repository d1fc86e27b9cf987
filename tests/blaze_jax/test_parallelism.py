"""The layer over the devices of a mesh computes what one device computes, however tokens and experts are split."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType

import blaze_jax
from blaze_jax import MoEConfig, Parallelism, Router, moe
from blaze_jax.layer_observer import observed_layers
from tests.layers import WIDTH, gradients, random_parameters, random_tokens, step
from tests.numerics import assert_close, assert_same_bits
from tests.over_devices import assert_as_one_device, make_mesh, over_devices, roles

# jax 0.12 cannot differentiate the error function of a GELU where check_vma=True.
CONFIG = MoEConfig(
    num_experts=8,
    experts_per_token=3,
    expert_width=8,
    shared_width=8,
    router=Router(scoring="sigmoid", num_groups=4, groups_per_token=2),
    router_bias=True,
    z_loss_weight=0.01,
    bias_update_rate=0.1,
)
BIAS = jnp.linspace(-0.1, 0.1, 8)
SMALL = MoEConfig(num_experts=4, experts_per_token=2, expert_width=8, z_loss_weight=0.01, load_balancing_weight=0.1)
TOGETHER = {"fsdp": 2, "expert": 2, "tensor": 2}
WAYS = {  # of parallelism and of meshes, so that each meets each
    "data": ({"data": 8}, "auto", {}),
    "fsdp over experts": ({"fsdp": 4}, "auto", {"keep_gathered": True}),
    "fsdp over the width": ({"fsdp": 5}, "explicit", {"row_budget": None}),
    "experts": ({"expert": 2}, "explicit", {}),
    "experts in chunks": ({"expert": 8}, "auto", {"exchange": "permute", "chunks": 3}),
    "experts, each token once": ({"expert": 4}, "check_vma", {"exchange": "all_to_all", "chunks": 2}),
    "their width": ({"tensor": 2}, "check_vma", {}),
    "their width, each token once": ({"tensor": 4}, "explicit", {"exchange": "all_to_all", "row_budget": 0.5}),
    "all": ({"fsdp": 2, "expert": 2, "tensor": 2}, "auto", {"row_budget": 0.1, "chunks": 2}),
    "all in shard_map": ({"fsdp": 2, "expert": 2, "tensor": 2}, "check_vma", {"row_budget": 0.1}),
    "all in shard_map, unchecked": ({"data": 2, "expert": 2, "tensor": 2}, "shard_map", {"exchange": "all_to_all"}),
    "all, explicitly": ({"data": 2, "fsdp": 2, "expert": 2}, "explicit", {"exchange": "permute"}),
}


def test_all_axes_together():
    assert_as_one_device((TOGETHER, "auto", {"exchange": "permute", "row_budget": 0.1}), tokens=119, config=SMALL)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_every_way(way):
    assert_as_one_device(WAYS[way], 40, CONFIG)


@pytest.mark.parametrize(
    ("kind", "spec", "tokens"),
    [
        (AxisType.Auto, P(), 2),  # all axes of such a mesh split tokens
        (AxisType.Auto, P("more"), 2),
        (AxisType.Explicit, P("more"), 4),  # and on this one those that x is split over
        (AxisType.Explicit, P("more", ("data", "expert")), 2),
        (AxisType.Explicit, P(), 8),
    ],
    ids=str,
)
@pytest.mark.slow  # functions run by default
def test_tokens_of_a_device_where_axes_have_no_role(kind, spec, tokens):
    mesh, parallel = make_mesh({"data": 2, "more": 2, "expert": 2}, kind), Parallelism(expert="expert")
    params, x = random_parameters(SMALL), random_tokens(4, 4)
    with jax.set_mesh(mesh), observed_layers() as layers:
        run = jax.jit(partial(gradients, config=SMALL, parallel=parallel))
        out = run(params, jax.device_put(x, jax.NamedSharding(mesh, spec)))
    assert {traced.num_tokens for traced in layers} == {tokens}
    assert_close(out, step(params, x, SMALL))


def test_axes_without_a_role_split_tokens():
    """But not those over which an enclosing vmap splits its examples, nor those of an enclosing shard_map."""
    mesh, x = make_mesh({"data": 2, "more": 2, "expert": 2}), random_tokens(2, 8)
    params, parallel = random_parameters(SMALL), Parallelism(expert="expert")

    def tokens_of_a_device(layer):
        with jax.set_mesh(mesh), observed_layers() as layers:
            jax.eval_shape(layer, x)
        return {traced.num_tokens for traced in layers}

    def one(x):
        return moe(x, params, SMALL, parallel=parallel)[0]

    by_data = partial(jax.shard_map, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}, check_vma=False)
    assert tokens_of_a_device(one) == {16 // 8}
    assert tokens_of_a_device(jax.vmap(one, spmd_axis_name="data")) == {8 // 4}
    assert tokens_of_a_device(by_data(one)) == {8 // 4}


@pytest.mark.parametrize(
    "router", [{"capacity_factor": 0.5}, {"token_rounding": "nearest", "rounding_tile": 4}], ids=str
)
@pytest.mark.slow
def test_options_that_look_at_all_tokens(router):
    config = replace(CONFIG, router=Router(**router), shared_width=0, router_bias=False)
    params, x = random_parameters(config), random_tokens(39)
    way = ({"data": 2, "expert": 2}, "auto", {})
    assert_close(over_devices(*way, params, x, config), step(params, x, config))


@pytest.mark.parametrize(("tokens", "kind"), [(1, "auto"), (13, "explicit")])
@pytest.mark.slow
def test_tokens_that_the_devices_do_not_divide(tokens, kind):
    params, x = random_parameters(CONFIG), random_tokens(tokens)
    out = over_devices({"fsdp": 2, "expert": 4}, kind, {}, params, x, CONFIG)
    assert_close(out, step(params, x, CONFIG))


@pytest.mark.slow
def test_no_token():
    parallel, params = Parallelism(expert="expert"), random_parameters(CONFIG)
    with jax.set_mesh(make_mesh({"expert": 2})):
        y, routing = moe(random_tokens(0), params, CONFIG, selection_bias=BIAS, parallel=parallel)
    assert y.shape == (0, WIDTH)
    assert routing.demand.sum() == 0


@pytest.mark.parametrize(("exchange", "favourite"), [("all_gather", 0), ("all_to_all", 7)])
@pytest.mark.slow
def test_all_tokens_on_the_same_experts_in_rows_for_few(exchange, favourite):
    config = MoEConfig(num_experts=8, experts_per_token=1, expert_width=8, load_balancing_weight=0.1)
    params, x = random_parameters(config), jnp.abs(random_tokens(64, 10))
    x = x.reshape(-1, WIDTH)
    params["w_router"] = params["w_router"].at[:, favourite].set(10)
    ref = step(params, x, config)
    assert (ref[0][1][1].demand == 640 * (jnp.arange(8) == favourite)).all()
    options = {"exchange": exchange, "row_budget": 0.5}
    assert_close(over_devices({"expert": 4}, "auto", options, params, x, config), ref)


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all", "permute"])
def test_an_id_of_no_expert_poisons_its_token(exchange):
    config = MoEConfig(num_experts=4, experts_per_token=1, expert_width=8)
    params = {name: w for name, w in random_parameters(config).items() if name != "w_router"}
    experts = jnp.array([[0], [4], [-1], [-2], [3], [2]])
    parallel, mesh = Parallelism(expert="expert", exchange=exchange), make_mesh({"expert": 2})
    specs = parallel.specs(config, WIDTH, sizes={"expert": 2})
    options = {"activation": "swiglu", "save": "inputs", "implementation": None}
    run = partial(blaze_jax.experts.compute_experts, parallel=parallel, specs=specs, **options)
    split, of_params = P("expert"), {name: specs[name] for name in params}
    over = jax.shard_map(run, mesh=mesh, in_specs=(split, of_params, split, split), out_specs=split)
    y = jax.jit(over)(random_tokens(6), params, jnp.ones((6, 1)), experts)
    assert_same_bits(np.isnan(y).any(1), np.array([False, True, False, True, False, False]))
    assert (y[2] == 0).all()


@pytest.mark.parametrize(
    ("axes", "config", "message"),
    [
        ({"expert": 3}, {}, "num_experts=8 must be a multiple of the 3 devices along 'expert', the expert axis"),
        ({"tensor": 3}, {}, "expert_width=8 must be a multiple of the 3 devices along 'tensor', the tensor axis"),
        ({"fsdp": 3}, {}, "model_width=10 must be a multiple of the 3 devices along 'fsdp', the fsdp axis"),
    ],
)
def test_sizes_that_the_devices_do_not_divide(axes, config, message):
    with jax.set_mesh(make_mesh(axes)), pytest.raises(ValueError, match=message):
        moe(
            random_tokens(6),
            random_parameters(CONFIG),
            CONFIG,
            selection_bias=BIAS,
            parallel=Parallelism(**roles(axes)),
        )


def test_misuse():
    params, x = random_parameters(CONFIG), random_tokens(8)
    with pytest.raises(ValueError, match="there is no mesh, but axis 'expert' has a role"):
        moe(x, params, CONFIG, selection_bias=BIAS, parallel=Parallelism(expert="expert"))
    with (
        jax.set_mesh(make_mesh({"data": 2})),
        pytest.raises(ValueError, match="the mesh has 'data', but axis 'expert'"),
    ):
        moe(x, params, CONFIG, selection_bias=BIAS, parallel=Parallelism(data="data", expert="expert"))
    with pytest.raises(ValueError, match="parallel takes the place of axis_name"):
        moe(x, params, CONFIG, selection_bias=BIAS, parallel=Parallelism(expert="expert"), axis_name="data")
    for wrong, message in [
        ({}, "at least one mesh axis must have a role"),
        ({"expert": "a", "data": ("a", "b")}, "and none two"),
        ({"expert": 3}, "expert=3 must be the name of a mesh axis"),
        ({"expert": "a", "exchange": "pigeon"}, "exchange='pigeon' must be None or one of all_gather"),
        ({"expert": "a", "chunks": 0}, "chunks=0 must be at least 1"),
        ({"expert": "a", "row_budget": 0}, "row_budget=0 must be above 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            Parallelism(**wrong)

    def half_inside(params, x):
        return moe(x, params, CONFIG, selection_bias=BIAS, parallel=Parallelism(data="data", expert="expert"))[0]

    mesh = make_mesh({"data": 2, "expert": 2})
    inside = jax.shard_map(half_inside, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), axis_names={"data"})
    with pytest.raises(ValueError, match=r"jax.shard_map is over data but not over expert"):
        jax.eval_shape(inside, params, x)


def test_a_devices_part_of_parameters_is_as_small_as_the_mesh_is_large():
    axes = {"fsdp": 2, "expert": 2, "tensor": 2}
    parallel, params = Parallelism(**roles(axes)), CONFIG.parameters(16)
    shards = {name: p.shape for name, p in parallel_shards(parallel, axes).items()}
    for name, parameter in params.items():
        assert math.prod(shards[name]) * 8 == math.prod(parameter.shape), name


def parallel_shards(parallel, axes):
    with jax.set_mesh(make_mesh(axes)):
        return parallel.shards(CONFIG, 16)


def test_constant_tokens_inside_shard_map():
    """They are the same on all devices, to jax's check of what varies, and the layer sums over devices."""
    axes, params = {"data": 2, "expert": 2}, random_parameters(SMALL)
    parallel = Parallelism(**roles(axes))

    def layer(params):
        return moe(jnp.ones((3, WIDTH)), params, SMALL, parallel=parallel)[0]

    with jax.set_mesh(make_mesh(axes)):
        specs = (parallel.specs(SMALL, WIDTH),)
        y = jax.jit(jax.shard_map(layer, in_specs=specs, out_specs=P(parallel.axes)))(params)
    assert_close(y, moe(jnp.ones((12, WIDTH)), params, SMALL)[0])
