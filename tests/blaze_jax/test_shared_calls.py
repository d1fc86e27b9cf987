"""Modules that are called several times in a step, or in a branch."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice

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

CONFIG = replace(CONFIGS["everything"], activation="relu", shared_width=0, shared_gate=False)
PARAMS = random_parameters(CONFIG)
BIAS = jnp.linspace(-0.05, 0.05, 6)
X = random_tokens(30)


class Linen(nn.Module):
    """A module that holds one layer, and calls it as `run` does."""

    run: Callable

    @nn.compact
    def __call__(self, *arguments):
        return self.run(MoE(CONFIG, train=True, name="moe"), *arguments)


class Nnx(nnx.Module):
    def __init__(self, run):
        self.moe, self.run = blaze_jax.nnx.MoE(WIDTH, CONFIG, train=True, rngs=nnx.Rngs(0)), run
        for name, value in ({"selection_bias": BIAS} | PARAMS).items():
            getattr(self.moe, name)[...] = value

    def __call__(self, *arguments):
        return self.run(self.moe, *arguments)


def steps(form, run, *arguments):
    """After each training step with such a module: the output, its losses and statistics, and the bias."""
    if form == "linen":
        apply = jax.jit(partial(Linen(run).apply, mutable=["losses", "intermediates", "router_state"]))
        state = {"router_state": {"moe": {"selection_bias": BIAS}}}
        while True:
            y, state = apply({"params": {"moe": PARAMS}, "router_state": state["router_state"]}, *arguments)
            yield y, state["losses"], state["intermediates"], state["router_state"]["moe"]["selection_bias"]

    @nnx.jit
    def step(model, *arguments):
        def loss(model):
            y, *sown = nnx.capture(model, AuxiliaryLoss, nnx.Intermediate)(*arguments)
            return sum(jax.tree.leaves(sown[0])), (y, *sown)

        (_, outcome), _ = nnx.value_and_grad(loss, has_aux=True)(model)
        return outcome

    model = Nnx(run)
    while True:
        yield *step(model, *arguments), model.moe.selection_bias[...]


def twice(layer, x):
    """Shared weights: one layer at two depths."""
    return layer(jnp.tanh(layer(x)))


@jax.jit
def reference(x, bias):
    """Output, losses, and the bias moved once by both calls' demand."""
    y, first = moe(x, PARAMS, CONFIG, selection_bias=bias, train=True)
    y, second = moe(jnp.tanh(y), PARAMS, CONFIG, selection_bias=bias, train=True)
    losses = sum(sum(routing.weighted_losses.values()) for routing in (first, second))
    return y, losses, update_selection_bias(bias, first.demand + second.demand, CONFIG.bias_update_rate)


@pytest.mark.parametrize("form", ["linen", "nnx"])
@pytest.mark.default_cases("linen")
@pytest.mark.ci_cases("nnx")
def test_a_module_called_twice_moves_its_bias_once(form):
    before = BIAS
    for y, losses, _, bias in islice(steps(form, twice, X), 2):
        assert_close((y, sum(jax.tree.leaves(losses)), bias), reference(X, before))
        before = bias  # the next step is another


def in_a_branch(form, how, layer, branch, x):
    """The layer, or nothing, with `cond` or `switch` of the module's library."""
    lift = nn if form == "linen" else nnx

    def with_layer(layer, x):
        return x + layer(x)

    def without(layer, x):
        return x + layer(x, skip=True)

    if how == "cond":
        return lift.cond(branch == 0, with_layer, without, layer, x)
    return lift.switch(branch, [with_layer, without], layer, x)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "how"), [("linen", "cond"), ("nnx", "cond"), ("linen", "switch"), ("nnx", "switch")])
@pytest.mark.ci_cases("nnx-cond", "linen-switch")
def test_a_branch_without_the_layer(form, how):
    run = partial(in_a_branch, form, how)
    if form == "linen":
        init = jax.eval_shape(Linen(run).init, jax.random.key(0), 0, X)
        assert set(init["params"]["moe"]) == set(PARAMS)

    y, losses, statistics, bias = next(steps(form, run, 0, X))
    ref, routing = jax.jit(partial(moe, config=CONFIG, train=True))(X, PARAMS, selection_bias=BIAS)
    assert_close(y, X + ref)
    assert_close(sum(jax.tree.leaves(losses)), sum(routing.weighted_losses.values()))
    assert (bias != BIAS).any()
    assert any(value.any() for value in jax.tree.leaves(statistics))

    y, losses, statistics, bias = next(steps(form, run, 1, X))
    assert_same_bits((y, bias), (X, BIAS))
    assert not any(value.any() for value in jax.tree.leaves((losses, statistics)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.default_cases("*")
def test_what_is_skipped_has_the_types_of_what_is_not(dtype):
    with jax.enable_x64(True):
        x, params = (jax.tree.map(lambda a: jnp.asarray(a, dtype), arrays) for arrays in (X, PARAMS))
        out = jax.eval_shape(partial(moe, config=CONFIG, selection_bias=BIAS), x, params)
        assert jax.eval_shape(partial(skipped, config=CONFIG), x) == out
