"""The layer over the devices of a mesh computes what one device computes, in whichever way the mesh is said.

Every device computes its own tokens once, where axes are automatic as in `jax.sharding.Mesh`, explicit as
`jax.make_mesh` gives them, or those of an enclosing `jax.shard_map`; where it cannot, it is warned of.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

from blaze_jax import MoEConfig, Parallelism, Router, build_dispatch, expert_ffn, moe, route
from blaze_jax.checks import warn_once
from blaze_jax.layer_observer import observed_layers
from tests.expert_problems import apply, make_problem
from tests.layers import CONFIGS, WIDTH, layer, random_parameters, random_tokens
from tests.numerics import assert_close, assert_same_bits
from tests.over_devices import Way, assert_as_one_device, make_mesh, on_one_device, over_devices, put, spec_of
from tests.routings import random_experts

# jax 0.12 cannot differentiate the error function of a GELU where check_vma=True.
SWIGLU = replace(CONFIGS["everything"], activation="swiglu")
FULL = MoEConfig(
    num_experts=8,
    experts_per_token=3,
    expert_width=8,
    shared_width=8,
    router=Router(scoring="sigmoid", num_groups=4, groups_per_token=2),
    router_bias=True,
    z_loss_weight=0.01,
    bias_update_rate=0.1,
)
SMALL = MoEConfig(num_experts=4, experts_per_token=2, expert_width=8, z_loss_weight=0.01, load_balancing_weight=0.1)
LIMITED, ROUNDED = Router(capacity_factor=0.5), Router(token_rounding="nearest", rounding_tile=4)

SPLIT, WHOLE, NOWHERE = P("data"), P(), None
FOUR, EIGHT, SQUARE = {"data": 4}, {"data": 4, "model": 2}, {"data": 2, "more": 2}
CUBE, TOGETHER = {"batch": 2, "more": 2, "expert": 2}, {"fsdp": 2, "expert": 2, "tensor": 2}
OF_KERNELS = {
    "w_router": P(None, "data"),
    "w_gate": P("data"),
    "w_up": P(None, None, "data"),
    "w_down": P(None, "data"),
}
PLACED = {  # and how many of the 32 tokens are a device's
    "automatic": (Way(EIGHT, x=SPLIT, params=WHOLE), CONFIGS["everything"], 4),
    "automatic, along the sequence": (Way(EIGHT, x=P(None, ("data", "model"))), CONFIGS["plain"], 4),
    "automatic, not placed": (Way(EIGHT), CONFIGS["plain"], 4),
    "automatic, rounded": (Way(EIGHT, x=SPLIT, params=WHOLE), CONFIGS["rounded"], 4),
    "automatic, not set": (Way(EIGHT, "unset", x=SPLIT), CONFIGS["plain"], 4),
    "beside explicit axes": (Way(EIGHT, "mixed", x=SPLIT, params=WHOLE), CONFIGS["plain"], 4),
    "beside explicit axes, with roles": (Way({"data": 4, "expert": 2}, "mixed", {}, SPLIT, WHOLE), SMALL, 4),
    "explicit": (Way(FOUR, "explicit", None, SPLIT, WHOLE), CONFIGS["everything"], 8),
    "explicit, tokens placed": (Way(FOUR, "explicit", None, SPLIT, NOWHERE), CONFIGS["everything"], 8),
    "explicit, whole": (Way(FOUR, "explicit", None, WHOLE, WHOLE), CONFIGS["everything"], 32),
    "explicit, parameters placed": (Way(FOUR, "explicit", None, NOWHERE, WHOLE), CONFIGS["everything"], 32),
    "explicit, limited": (Way(FOUR, "explicit", None, SPLIT, WHOLE), CONFIGS["limited"], 8),
    "explicit, rounded": (Way(FOUR, "explicit", None, SPLIT, WHOLE), CONFIGS["rounded"], 8),
    "explicit, parameters split": (Way(FOUR, "explicit", None, SPLIT, OF_KERNELS), replace(SMALL, num_experts=8), 8),
    "by batch and sequence": (Way(SQUARE, "explicit", None, P("data", "more")), CONFIGS["plain"], 8),
    "by width": (Way(SQUARE, "explicit", None, P("more", None, "data")), CONFIGS["plain"], 16),
    "by sequence": (Way(SQUARE, "explicit", None, P(None, ("more", "data"))), CONFIGS["plain"], 8),
    "by sequence, limited": (Way(SQUARE, "explicit", None, P(None, "data")), CONFIGS["limited"], 16),
    "by batch and sequence, rounded": (Way(SQUARE, "explicit", None, P("data", "more")), CONFIGS["rounded"], 8),
    # Axes without a role: all of an automatic mesh split tokens, and of an explicit one those that x is split over.
    "no role": (Way(CUBE, "auto", {}, WHOLE), SMALL, 4),
    "no role, split": (Way(CUBE, "auto", {}, P("more")), SMALL, 4),
    "no role, explicit": (Way(CUBE, "explicit", {}, WHOLE), SMALL, 16),
    "no role, explicit and split": (Way(CUBE, "explicit", {}, P("more")), SMALL, 8),
    "no role, explicit and all split": (Way(CUBE, "explicit", {}, P("more", ("batch", "expert"))), SMALL, 4),
}
WITH_ROLES = {  # or inside of jax.shard_map: ways of parallelism and of meshes, so that each meets each, and tokens
    "data": (Way({"data": 8}, "auto", {}), FULL, 40),
    "fsdp over experts": (Way({"fsdp": 4}, "auto", {"keep_gathered": True}), FULL, 40),
    "fsdp over the width": (Way({"fsdp": 5}, "explicit", {"row_budget": None}), FULL, 40),
    "experts": (Way({"expert": 2}, "explicit", {}), FULL, 40),
    "experts in chunks": (Way({"expert": 8}, "auto", {"exchange": "permute", "chunks": 3}), FULL, 40),
    "each token once": (Way({"expert": 4}, "check_vma", {"exchange": "all_to_all", "chunks": 2}), FULL, 40),
    "tensor": (Way({"tensor": 2}, "check_vma", {}), FULL, 40),
    "tensor, once": (Way({"tensor": 4}, "explicit", {"exchange": "all_to_all", "row_budget": 0.5}), FULL, 40),
    "all": (Way(TOGETHER, "auto", {"row_budget": 0.1, "chunks": 2}), FULL, 40),
    "all, permuted": (Way(TOGETHER, "auto", {"exchange": "permute", "row_budget": 0.1}), SMALL, 119),
    "all in shard_map": (Way(TOGETHER, "check_vma", {"row_budget": 0.1}), FULL, 40),
    "unchecked": (Way({"data": 2, "expert": 2, "tensor": 2}, "shard_map", {"exchange": "all_to_all"}), FULL, 40),
    "all, explicitly": (Way({"data": 2, "fsdp": 2, "expert": 2}, "explicit", {"exchange": "permute"}), FULL, 40),
    "fewer tokens than devices": (Way({"fsdp": 2, "expert": 4}, "auto", {}), FULL, 1),
    "tokens not divided": (Way({"fsdp": 2, "expert": 4}, "explicit", {}), FULL, 13),
    "limited": (Way({"data": 2, "expert": 2}, "auto", {}), replace(SMALL, router=LIMITED), 39),
    "rounded": (Way({"data": 2, "expert": 2}, "auto", {}), replace(SMALL, router=ROUNDED), 39),
    "padded, not set": (Way(EIGHT, "unset", params=WHOLE), SMALL, 5),
    **{
        f"axis_name of {len(axes)}, {kind}": (Way(axes, kind), config, 32)
        for axes, config in ((FOUR, SWIGLU), (SQUARE, SMALL))
        for kind in ("check_vma", "shard_map")
    },
}


@pytest.mark.parametrize("name", PLACED)
@pytest.mark.default_cases("by batch and sequence")
@pytest.mark.ci_cases("explicit", "automatic")
def test_placed_arrays_give_the_numbers_of_one_device(name):
    way, config, per_device = PLACED[name]
    assert_as_one_device(way, config, 4, 8, per_device=per_device)


@pytest.mark.parametrize("name", WITH_ROLES)
@pytest.mark.default_cases("all, permuted")
@pytest.mark.ci_cases("axis_name of 1, check_vma")
def test_roles_and_axis_names_give_the_numbers_of_one_device(name):
    assert_as_one_device(*WITH_ROLES[name])


@pytest.mark.slow
def test_without_a_mesh_set_an_explicit_one_is_that_of_the_tokens():
    x, params = random_tokens(8), random_parameters(CONFIGS["plain"])
    y, _ = layer(put(x, SPLIT, make_mesh(FOUR, AxisType.Explicit)), params, CONFIGS["plain"])
    assert spec_of(y) == P("data", None)
    assert_close(np.asarray(y), np.asarray(layer(x, params, CONFIGS["plain"])[0]))


@pytest.mark.parametrize(
    ("kind", "axis", "x", "per_device"),
    [
        (AxisType.Auto, None, P(None), 1),
        (AxisType.Auto, "data", SPLIT, 4),  # its examples are not split again
        (AxisType.Explicit, None, WHOLE, 8),
        (AxisType.Explicit, None, P(None, "data"), 2),
    ],
    ids=str,
)
@pytest.mark.slow
def test_vmap(kind, axis, x, per_device):
    mesh = make_mesh(EIGHT if kind == AxisType.Auto else FOUR, kind)
    config, examples = CONFIGS["plain"], random_tokens(8, 8)
    params = random_parameters(config)

    def loss(params, x):
        return jnp.square(jax.vmap(lambda x: moe(x, params, config)[0], spmd_axis_name=axis)(x)).sum()

    with jax.set_mesh(mesh), observed_layers() as layers:
        out = jax.jit(jax.grad(loss))(put(params, WHOLE, mesh), put(examples, x, mesh))
    assert {traced.num_tokens for traced in layers} == {per_device}
    assert_close(out, jax.jit(jax.grad(loss))(params, examples))


def test_vmap_of_split_examples_is_refused():
    mesh, config = make_mesh(FOUR, AxisType.Explicit), CONFIGS["plain"]
    params, x = random_parameters(config), random_tokens(4, 2)
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="split over the explicit mesh axis data: call"):
        jax.eval_shape(jax.vmap(lambda x: moe(x, params, config)[0]), put(x, SPLIT, mesh))


def test_axes_without_a_role_split_tokens():
    """But not those over which an enclosing vmap splits its examples, nor those of an enclosing shard_map."""
    x, automatic, explicit = random_tokens(2, 8), make_mesh(CUBE), make_mesh(CUBE, AxisType.Explicit)
    params, parallel = random_parameters(SMALL), Parallelism(expert="expert")

    def tokens_of_a_device(layer, spec=None, mesh=automatic):
        with jax.set_mesh(mesh), observed_layers() as layers:
            jax.eval_shape(layer, put(x, spec, mesh))
        return {traced.num_tokens for traced in layers}

    def one(x):
        return moe(x, params, SMALL, parallel=parallel)[0]

    by_batch = partial(jax.shard_map, in_specs=P("batch"), out_specs=P("batch"), axis_names={"batch"}, check_vma=False)
    assert tokens_of_a_device(one) == tokens_of_a_device(lambda x: moe(x, params, SMALL)[0]) == {16 // 8}
    assert tokens_of_a_device(one, P("more"), explicit) == {16 // 4}
    assert tokens_of_a_device(jax.vmap(one, spmd_axis_name="batch")) == {8 // 4}
    assert tokens_of_a_device(by_batch(one)) == {8 // 4}


@pytest.mark.slow
def test_inside_shard_map_over_some_axes_the_others_split_the_rest():
    config, x = CONFIGS["plain"], random_tokens(8, 2)
    params, mesh = random_parameters(config), make_mesh(EIGHT)

    def loss(params, x, parallel=None):
        return jnp.square(moe(x, params, config, axis_name=None if parallel else (), parallel=parallel)[0]).sum()

    @partial(jax.shard_map, mesh=mesh, in_specs=(WHOLE, SPLIT), out_specs=P(), axis_names={"data"}, check_vma=False)
    def of_all(params, x):
        return jax.lax.psum(loss(params, x, Parallelism(data="model")), "data")

    with observed_layers() as layers:
        out = jax.jit(jax.value_and_grad(of_all))(params, x)
    assert {traced.num_tokens for traced in layers} == {2}
    assert_close(out, jax.jit(jax.value_and_grad(loss))(params, x))


def placed_in_jit(layer, mesh, params, x):
    """The sharding is said to `jax.jit` alone, of arrays of numpy."""
    run = jax.jit(layer, in_shardings=[NamedSharding(mesh, spec) for spec in (WHOLE, SPLIT)])
    return run, jax.tree.map(np.asarray, (params, x))


def experts_alone(_, mesh, *__):
    problem = make_problem(random_experts(32, 2, range(6)), 6)
    arguments = (problem.x, problem.params, problem.weights, problem.experts)
    return jax.jit(partial(apply, expert_ffn)), map(partial(put, mesh=mesh), arguments, (SPLIT, WHOLE, SPLIT, SPLIT))


def experts_of_ones_own(layer, mesh, params, x):
    run = jax.jit(partial(layer, experts=lambda *arguments, **options: expert_ffn(*arguments, **options)))
    return run, (put(params, WHOLE, mesh), put(x, SPLIT, mesh))


def split_by_vmap(layer, mesh, params, x):
    """The loop over the examples is what XLA cannot split."""
    each = jax.vmap(lambda params, x: layer(params, x[None]), (None, 0), spmd_axis_name=("data", "model"))
    return jax.jit(each), (put(params, WHOLE, mesh), put(x, P(("data", "model")), mesh))


def half_inside(layer, mesh, params, x):
    """Inside `jax.shard_map` over one of two axes."""
    options = {"in_specs": (WHOLE, SPLIT), "out_specs": SPLIT, "axis_names": {"data"}}
    return jax.jit(jax.shard_map(layer, mesh=mesh, **options)), (params, x)


@pytest.mark.parametrize(
    ("make", "devices"),
    [(placed_in_jit, 8), (experts_alone, 8), (experts_of_ones_own, 8), (split_by_vmap, 8), (half_inside, 2)],
)
def test_devices_that_all_compute_the_same_are_warned_of(make, devices):
    def layer(params, x, **options):
        return moe(x, params, CONFIGS["plain"], **options)[0]

    run, arguments = make(layer, make_mesh(EIGHT), random_parameters(CONFIGS["plain"]), random_tokens(8))
    warn_once.cache_clear()
    message = f"the experts are compiled for {devices} devices, each of which computes all tokens"
    with pytest.warns(UserWarning, match=message):
        run.lower(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_hopper_kernels_lower_on_each_devices_tokens(kind):
    mesh = make_mesh({"data": 8}, kind)
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


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SPLIT, WHOLE])
def test_router_and_dispatch_by_themselves(spec):
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((8, 6)), jnp.float32)
    mesh, choose = make_mesh(FOUR, AxisType.Explicit), jax.jit(route, static_argnums=1)
    expected = choose(logits, 2)
    with jax.set_mesh(mesh):
        out = choose(put(logits, spec, mesh), 2)
        dispatch = build_dispatch(out.experts, 6)
    assert_close(out, expected)
    assert_same_bits(dispatch, build_dispatch(expected.experts, 6))


def test_dropped_share_is_that_of_all_devices():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((40, 6)), jnp.float32)

    @jax.jit
    @partial(jax.shard_map, mesh=make_mesh(FOUR), in_specs=SPLIT, out_specs=(SPLIT, P(), P()))
    def sharded(logits):
        out = route(logits, 2, expert_capacity=2, axis_name="data")
        return out.experts, out.tokens_per_expert, out.dropped_share

    experts, tokens_per_expert, dropped_share = sharded(logits)
    assert_close(dropped_share, np.mean(np.asarray(experts) == -1))
    assert_same_bits(tokens_per_expert, np.bincount(experts[experts >= 0], minlength=6).astype(np.int32))


def test_one_devices_losses_are_warned_of():
    def sharded(axis_name):
        step = partial(moe, config=CONFIGS["plain"], train=True, axis_name=axis_name)
        return jax.shard_map(
            lambda params, x: step(x, params)[0], mesh=make_mesh(FOUR), in_specs=(P(), SPLIT), out_specs=SPLIT
        )

    warn_once.cache_clear()
    arguments = random_parameters(CONFIGS["plain"]), random_tokens(32)
    jax.eval_shape(sharded(()), *arguments)
    with pytest.warns(UserWarning, match=r"inside jax.shard_map over data, .* give axis_name"):
        jax.eval_shape(sharded(None), *arguments)
    with pytest.raises(ValueError, match="axis_name=3 must be the name of a mesh axis"):
        route(jnp.zeros((2, 3)), 2, axis_name=3)


@pytest.mark.parametrize(("exchange", "favourite"), [("all_gather", 0), ("all_to_all", 7)])
@pytest.mark.slow
def test_all_tokens_on_the_same_experts_in_rows_for_few(exchange, favourite):
    config = MoEConfig(num_experts=8, experts_per_token=1, expert_width=8, load_balancing_weight=0.1)
    params, x = random_parameters(config), jnp.abs(random_tokens(640))
    params["w_router"] = params["w_router"].at[:, favourite].set(10)
    ref = on_one_device(params, x, config)
    assert (ref[0][1][1].demand == 640 * (jnp.arange(8) == favourite)).all()
    way = Way({"expert": 4}, "auto", {"exchange": exchange, "row_budget": 0.5})
    assert_close(over_devices(way, params, x, config), ref)


def test_constant_tokens_inside_shard_map():
    """They are the same on all devices, to jax's check of what varies, and the layer sums over devices."""
    params, parallel = random_parameters(SMALL), Parallelism(data="data", expert="expert")

    def layer(params, tokens=3, parallel=parallel):
        y, routing = moe(jnp.ones((tokens, WIDTH)), params, SMALL, parallel=parallel)
        return y, routing.weighted_losses

    with jax.set_mesh(make_mesh({"data": 2, "expert": 2})):
        specs, outs = (parallel.specs(SMALL, WIDTH),), (P(parallel.axes), P())
        out = jax.jit(jax.shard_map(layer, in_specs=specs, out_specs=outs))(params)
    assert_close(out, layer(params, 12, None))
