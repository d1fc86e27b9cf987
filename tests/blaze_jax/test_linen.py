"""What only the flax.linen module has: its collections, and lifted transformations."""

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
from tests.layers import CONFIGS, layer, random_parameters, random_tokens
from tests.numerics import assert_close, assert_same_bits

COLLECTIONS = ["losses", "intermediates", "router_state"]


def with_selection_bias(config, bias):
    return {"params": random_parameters(config), "router_state": {"selection_bias": jnp.asarray(bias)}}


def apply(module, variables, x, *, train=False, mutable=COLLECTIONS):
    """Output and what the module changed."""
    return jax.jit(partial(module.apply, train=train, mutable=mutable))(variables, x)


def test_initialising_leaves_no_trace_of_the_first_tokens():
    for name, collections in {"plain": {"params"}, "everything": {"params", "router_state"}}.items():
        variables = jax.eval_shape(MoE(CONFIGS[name]).init, jax.random.key(0), random_tokens(30))
        assert set(variables) == collections


def test_losses_and_statistics_are_the_layers():
    config, x = CONFIGS["everything"], random_tokens(2, 15)
    params = random_parameters(config)
    _, sown = apply(MoE(config), {"params": params}, x, train=True)
    _, routing = layer(x, params, config, train=True)
    assert_close(sown["losses"], {name: (loss,) for name, loss in routing.weighted_losses.items()})
    for statistic in ("tokens_per_expert", "dropped_share", "entropy"):
        assert_same_bits(sown["intermediates"][statistic], (getattr(routing, statistic),))


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
