"""The flax.linen module around the layer."""

from dataclasses import replace
from functools import partial

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax import MoE, MoEConfig, moe
from blaze_jax.checks import warn_once
from tests.layers import CONFIGS, WIDTH, layer, random_parameters, random_tokens
from tests.numerics import assert_close, assert_same_bits

COLLECTIONS = ["losses", "intermediates", "router_state"]


def initialised(config, **options):
    return jax.jit(MoE(config, **options).init)(jax.random.key(0), random_tokens(30))


def with_selection_bias(config, bias):
    return {"params": random_parameters(config), "router_state": {"selection_bias": jnp.asarray(bias)}}


def apply(module, variables, x, *, train=False, mutable=COLLECTIONS):
    """Output and what the module changed."""
    return jax.jit(partial(module.apply, train=train, mutable=mutable))(variables, x)


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_configuration(name, use_bias):
    config = CONFIGS[name]
    init = MoE(config, use_bias=use_bias, param_dtype=jnp.bfloat16).init
    variables = jax.eval_shape(init, jax.random.key(0), random_tokens(30))
    expected = config.parameters(WIDTH, use_bias=use_bias)
    assert {name: boxed.names for name, boxed in variables["params"].items()} == {
        name: parameter.axes for name, parameter in expected.items()
    }
    values = nn.unbox(variables["params"])
    assert {name: value.shape for name, value in values.items()} == {name: p.shape for name, p in expected.items()}
    chex.assert_type(list(values.values()), jnp.bfloat16)


def test_initialising_leaves_no_trace_of_the_first_tokens():
    assert set(initialised(CONFIGS["plain"])) == {"params"}
    variables = initialised(CONFIGS["everything"], use_bias=True)
    assert set(variables) == {"params", "router_state"}
    assert_same_bits(variables["router_state"]["selection_bias"], np.zeros(6, np.float32))
    params = nn.unbox(variables["params"])
    assert {name for name, value in params.items() if not value.any()} == {"b_up", "b_down"}


def test_initialisers_are_used():
    fill = {
        name: partial(lambda value, key, shape, dtype: jnp.full(shape, value, dtype), value)
        for name, value in {"router_init": 1.0, "kernel_init": 2.0, "bias_init": 3.0}.items()
    }
    variables = initialised(CONFIGS["everything"], use_bias=True, **fill)
    values = {name: np.unique(value).tolist() for name, value in nn.unbox(variables["params"]).items()}
    assert values.pop("w_router") == [1.0]
    assert values == {name: [3.0] if name.startswith("b_") else [2.0] for name in values}


@pytest.mark.parametrize(
    ("name", "leading"), [*((name, (2, 15)) for name in CONFIGS), ("everything", ()), ("everything", (0,))]
)
def test_output_is_the_layers(name, leading):
    config, x = CONFIGS[name], random_tokens(*leading)
    params = random_parameters(config, use_bias=True)
    y, sown = apply(MoE(config, use_bias=True), {"params": params}, x, train=True)
    bias = jnp.zeros(6) if config.bias_update_rate else None
    ref, routing = layer(x, params, config, selection_bias=bias, train=True)
    assert_same_bits(y, ref)

    losses = {"load_balancing_loss": 0.01 * routing.load_balancing_loss}
    if config.z_loss_weight:
        losses["z_loss"] = 0.001 * routing.z_loss
    assert_close({name: value for name, (value,) in sown["losses"].items()}, losses)
    for statistic in ("tokens_per_expert", "dropped_share", "entropy"):
        assert_same_bits(sown["intermediates"][statistic], (getattr(routing, statistic),))


@pytest.mark.parametrize(
    ("dtype", "x_dtype", "param_dtype", "out"),
    [
        (None, "bfloat16", "float32", "float32"),
        (None, "bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32", "bfloat16"),
    ],
)
def test_dtype_of_the_computation(dtype, x_dtype, param_dtype, out):
    module = MoE(CONFIGS["plain"], dtype=dtype, param_dtype=param_dtype)
    x = random_tokens(5, dtype=x_dtype)
    y, variables = jax.eval_shape(module.init_with_output, jax.random.key(0), x)
    assert y.dtype == out
    chex.assert_type(jax.tree.leaves(variables), jnp.dtype(param_dtype))


@pytest.mark.parametrize(("dtype", "out"), [(None, "bfloat16"), ("float32", "float32")])
def test_parameters_of_another_dtype_than_initialised(dtype, out):
    params = random_parameters(CONFIGS["plain"], dtype="bfloat16") | {"w_router": jnp.ones((WIDTH, 6))}
    module = MoE(CONFIGS["plain"], dtype=dtype, train=False)
    assert jax.eval_shape(module.apply, {"params": params}, random_tokens(5, dtype="bfloat16")).dtype == out


@pytest.mark.parametrize(
    ("train", "mutable", "moves"), [(True, True, True), (False, True, False), (False, False, False)]
)
def test_selection_bias_moves_in_training_where_mutable(train, mutable, moves):
    config = CONFIGS["everything"]
    collections = COLLECTIONS if mutable else ["losses"]
    variables = with_selection_bias(config, np.zeros(6, np.float32))
    _, state = apply(MoE(config), variables, random_tokens(30), train=train, mutable=collections)
    assert ("router_state" in state) == mutable
    if mutable:
        assert bool(state["router_state"]["selection_bias"].any()) == moves


def test_frozen_selection_bias():
    config = replace(CONFIGS["everything"], bias_update_rate=0.0, selection_bias=True)
    frozen = with_selection_bias(config, [9.0, 9, 0, 0, 0, 0])
    _, state = apply(MoE(config), frozen, random_tokens(30), train=True)
    assert_same_bits(state["router_state"]["selection_bias"], frozen["router_state"]["selection_bias"])
    assert state["intermediates"]["tokens_per_expert"][0].tolist() == [30, 30, 0, 0, 0, 0]


@pytest.mark.parametrize("form", ["attribute", "static argument"])
def test_rematerialised_training(form):
    config, x = CONFIGS["rounded"], random_tokens(30)
    params = {"params": random_parameters(config)}
    layer = (
        partial(nn.remat(MoE)(config, train=True).apply, mutable=["losses"])
        if form == "attribute"
        else lambda params, x: nn.remat(MoE, static_argnums=(2,))(config).apply(params, x, True, mutable=["losses"])
    )
    out, sown = jax.jit(layer)(params, x)
    ref, ref_sown = apply(MoE(config), params, x, train=True, mutable=["losses"])
    assert_same_bits((out, sown), (ref, ref_sown))
    plain, _ = apply(MoE(config), params, x)
    assert np.any(np.asarray(out) != np.asarray(plain))


def test_boxed_parameters_of_a_function_are_named():
    boxed = jax.eval_shape(MoE(CONFIGS["plain"]).init, jax.random.key(0), random_tokens(3))["params"]
    with pytest.raises(ValueError, match=r"params\['w_router'\] is boxed, .* give flax.linen.unbox\(params\)"):
        moe(random_tokens(3), boxed, CONFIGS["plain"])


def test_importing_all_names_leaves_flax_alone():
    names = {}
    exec("from flax import nnx\nfrom blaze_jax import *", names)
    assert names["nnx"].__name__ == "flax.nnx"
    assert names["MoE"] is MoE


def test_traced_train_is_named():
    params = {"params": random_parameters(CONFIGS["plain"])}
    with pytest.raises(ValueError, match=r"must be True, False or None, and not traced: under nn\.remat .* MoE"):
        nn.remat(MoE)(CONFIGS["plain"]).apply(params, random_tokens(3), train=True, mutable=["losses"])


class Scanned(nn.Module):
    """A layer in a scan that forgets the losses' axis."""

    config: MoEConfig

    @nn.compact
    def __call__(self, x):
        scanned = nn.scan(
            lambda module, x, _: (x + module(x, train=True), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        return scanned(MoE(self.config, name="moe"), x, None)[0]


@pytest.mark.parametrize("name", ["losses", "scan", "router_state", "train"])
def test_what_nobody_collects_is_warned_of(name):
    warn_once.cache_clear()
    everything, x = CONFIGS["everything"], random_tokens(3)
    state = with_selection_bias(everything, np.zeros(6, np.float32))
    plain = {"params": random_parameters(CONFIGS["plain"])}
    stacked = {"params": {"moe": jax.tree.map(lambda a: jnp.stack([a, a]), plain["params"])}}
    call, message = {
        "losses": (
            lambda: MoE(CONFIGS["plain"]).apply(plain, x),
            "collects .* load_balancing_loss: apply with mutable",
        ),
        "scan": (
            lambda: Scanned(CONFIGS["plain"]).apply(stacked, x, mutable=["losses"]),
            r"collects .*in nn.scan also variable_axes=\{'losses': 0\}",
        ),
        "router_state": (
            lambda: MoE(everything).apply(state, x, train=True, mutable=["losses"]),
            r"selection_bias does not move .* mutable=\['router_state'\]",
        ),
        "train": (
            lambda: MoE(everything).apply(state, x, mutable=["losses", "router_state"]),
            "bias_update_rate applies in training only, and train was left out",
        ),
    }[name]
    with pytest.warns(UserWarning, match=message):
        jax.eval_shape(call)
    jax.eval_shape(call)  # once is enough


class Stack(nn.Module):
    """Three residual layers in a scan, each recomputed in the backward pass."""

    remat: bool

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(MoE) if self.remat else MoE
        scanned = nn.scan(
            lambda module, x, _: (x + module(x), None),
            variable_axes={"params": 0, "losses": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return scanned(layer(CONFIGS["plain"], name="moe"), x, None)[0]


@pytest.mark.slow
def test_scanned_and_rematerialised_layers():
    x = random_tokens(12)
    variables = jax.jit(Stack(remat=False).init)(jax.random.key(0), x)
    assert variables["params"]["moe"]["w_up"].names == ("layers", "expert", "embed", "expert_mlp")
    params = nn.unbox(variables["params"])

    def loss(params, remat):
        y, sown = Stack(remat=remat).apply({"params": params}, x, mutable=["losses"])
        (balance,) = sown["losses"]["moe"]["load_balancing_loss"]
        chex.assert_shape(balance, (3,))
        return jnp.square(y).mean() + balance.sum()

    def loss_of_loop(params):
        y, balance = x, 0
        for i in range(3):
            own = jax.tree.map(lambda a, i=i: a[i], params["moe"])
            out, routing = moe(y, own, CONFIGS["plain"])
            y, balance = y + out, balance + 0.01 * routing.load_balancing_loss
        return jnp.square(y).mean() + balance

    reference = jax.jit(jax.value_and_grad(loss_of_loop))(params)
    for remat in (False, True):
        assert_close(jax.jit(jax.value_and_grad(partial(loss, remat=remat)))(params), reference)
