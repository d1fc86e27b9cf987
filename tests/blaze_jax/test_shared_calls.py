"""Modules that are called several times in a step, or in a branch."""

from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import blaze_jax
from blaze_jax import MoE, moe, update_selection_bias
from blaze_jax.layer import skipped
from blaze_jax.nnx import AuxiliaryLoss
from tests.layers import CONFIGS, WIDTH, random_parameters, random_tokens
from tests.numerics import assert_close, assert_same_bits

CONFIG = replace(CONFIGS["everything"], activation="relu", shared_width=0)
PARAMS = random_parameters(CONFIG)
BIAS = jnp.linspace(-0.05, 0.05, 6)
X = random_tokens(30)


class Twice(nn.Module):
    """Shared weights: one layer at two depths."""

    @nn.compact
    def __call__(self, x):
        layer = MoE(CONFIG, train=True, name="moe")
        return layer(jnp.tanh(layer(x)))


class NnxTwice(nnx.Module):
    def __init__(self):
        self.moe = blaze_jax.nnx.MoE(WIDTH, CONFIG, train=True, rngs=nnx.Rngs(0))
        for name, value in ({"selection_bias": BIAS} | PARAMS).items():
            getattr(self.moe, name)[...] = value

    def __call__(self, x):
        return self.moe(jnp.tanh(self.moe(x)))


@jax.jit
def reference(x, bias):
    """Output, losses, and the bias moved once by both calls' demand."""
    y, first = moe(x, PARAMS, CONFIG, selection_bias=bias, train=True)
    y, second = moe(jnp.tanh(y), PARAMS, CONFIG, selection_bias=bias, train=True)
    losses = sum(sum(routing.weighted_losses.values()) for routing in (first, second))
    return y, losses, update_selection_bias(bias, first.demand + second.demand, CONFIG.bias_update_rate)


@jax.jit
def linen_step(x, bias):
    variables = {"params": {"moe": PARAMS}, "router_state": {"moe": {"selection_bias": bias}}}
    y, state = Twice().apply(variables, x, mutable=["losses", "router_state"])
    return y, sum(jax.tree.leaves(state["losses"])), state["router_state"]["moe"]["selection_bias"]


@nnx.jit
def nnx_step(model, x):
    def loss(model):
        y, losses = nnx.capture(model, AuxiliaryLoss)(x)
        return sum(jax.tree.leaves(losses)), y

    (losses, y), _ = nnx.value_and_grad(loss, has_aux=True)(model)
    return y, losses


@pytest.mark.parametrize("form", ["linen", "nnx"])
@pytest.mark.default_cases("*")
def test_a_module_called_twice_moves_its_bias_once(form):
    expected = reference(X, BIAS)
    if form == "linen":
        out = linen_step(X, BIAS)
        again = linen_step(X, out[2])
    else:
        model = NnxTwice()
        out = (*nnx_step(model, X), model.moe.selection_bias[...])
        again = (*nnx_step(model, X), model.moe.selection_bias[...])
    assert_close(out, expected)
    assert_close(again, reference(X, expected[2]))  # the next step is another


def branches(lift, how, branch, layer, x):
    """The layer, or nothing, with `cond` or `switch` of the module `lift`."""

    def with_layer(layer, x):
        return x + layer(x)

    def without(layer, x):
        return x + layer(x, skip=True)

    if how == "cond":
        return lift.cond(branch == 0, with_layer, without, layer, x)
    return lift.switch(branch, [with_layer, without], layer, x)


class LinenBranch(nn.Module):
    how: str

    @nn.compact
    def __call__(self, branch, x):
        return branches(nn, self.how, branch, MoE(CONFIG, train=True, name="moe"), x)


class NnxBranch(NnxTwice):
    def __call__(self, how, branch, x):
        return branches(nnx, how, branch, self.moe, x)


@pytest.mark.parametrize(("form", "how"), [("linen", "cond"), ("nnx", "cond"), ("linen", "switch"), ("nnx", "switch")])
@pytest.mark.default_cases("nnx-cond", "linen-switch")
def test_a_branch_without_the_layer(form, how):
    if form == "linen":
        run = jax.jit(partial(LinenBranch(how).apply, mutable=["losses", "intermediates", "router_state"]))
        init = jax.eval_shape(LinenBranch(how).init, jax.random.key(0), 0, X)
        assert set(init["params"]["moe"]) == set(PARAMS)

        def outcome(branch):
            y, state = run({"params": {"moe": PARAMS}, "router_state": {"moe": {"selection_bias": BIAS}}}, branch, X)
            return y, state["losses"], state["intermediates"], state["router_state"]["moe"]["selection_bias"]
    else:
        run = nnx.jit(lambda model, branch, x: nnx.capture(model, AuxiliaryLoss, nnx.Intermediate)(how, branch, x))

        def outcome(branch):
            model = NnxBranch()
            return *run(model, branch, X), model.moe.selection_bias[...]

    y, losses, statistics, bias = outcome(0)
    ref, routing = jax.jit(partial(moe, config=CONFIG, train=True))(X, PARAMS, selection_bias=BIAS)
    assert_close(y, X + ref)
    assert_close(sum(jax.tree.leaves(losses)), sum(routing.weighted_losses.values()))
    assert (bias != BIAS).any()
    assert any(value.any() for value in jax.tree.leaves(statistics))

    y, losses, statistics, bias = outcome(1)
    assert_same_bits((y, bias), (X, BIAS))
    assert not any(value.any() for value in jax.tree.leaves((losses, statistics)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.default_cases("*")
def test_what_is_skipped_has_the_types_of_what_is_not(dtype):
    with jax.enable_x64(True):
        x, params = (jax.tree.map(lambda a: jnp.asarray(a, dtype), arrays) for arrays in (X, PARAMS))
        out = jax.eval_shape(partial(moe, config=CONFIG, selection_bias=BIAS), x, params)
        assert jax.eval_shape(partial(skipped, config=CONFIG), x) == out
