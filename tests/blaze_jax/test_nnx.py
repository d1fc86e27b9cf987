"""What only the flax.nnx module has: its state, views of it, and what it sows under `nnx.capture`."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from blaze_jax import MoE as LinenMoE
from blaze_jax.checks import warn_once
from blaze_jax.nnx import AuxiliaryLoss, MoE, RouterState
from tests.layers import CONFIGS, WIDTH, nnx_module, random_parameters, random_tokens
from tests.numerics import assert_same_bits

run = nnx.jit(lambda module, x, train: module(x, train=train), static_argnames="train")
collect = nnx.jit(
    lambda module, x, train: nnx.capture(module, AuxiliaryLoss, nnx.Intermediate)(x, train=train),
    static_argnames="train",
)
as_told = nnx.jit(lambda module, x: nnx.capture(module, AuxiliaryLoss)(x)[0])


def test_sows_under_capture_only():
    module, x = nnx_module(random_parameters(CONFIGS["everything"]), CONFIGS["everything"]), random_tokens(30)
    before = nnx.state(module)
    y = run(module, x, train=False)
    chex.assert_trees_all_equal(nnx.state(module), before)

    captured, losses, statistics = collect(module, x, train=False)
    assert_same_bits(captured, y)
    assert set(losses) == {"load_balancing_loss", "z_loss"}
    assert set(statistics) == {"tokens_per_expert", "dropped_share", "entropy"}
    assert int(jax.tree.leaves(statistics["tokens_per_expert"])[0].sum()) == 60


def test_nnx_tabulates_the_layer():
    module = MoE(WIDTH, CONFIGS["plain"], rngs=nnx.Rngs(0))
    assert "w_router" in nnx.tabulate(module, random_tokens(3))


def test_without_update_rate_there_is_no_state():
    module = MoE(WIDTH, CONFIGS["plain"], rngs=nnx.Rngs(0))
    assert not nnx.to_flat_state(nnx.state(module, RouterState))


def test_layers_of_one_module_class_differ():
    rngs = nnx.Rngs(0)
    first, second = (MoE(WIDTH, CONFIGS["plain"], rngs=rngs) for _ in range(2))
    assert not np.array_equal(first.w_up[...], second.w_up[...])


def test_frozen_selection_bias():
    config = replace(CONFIGS["everything"], bias_update_rate=0.0, selection_bias=True)
    module = nnx_module(random_parameters(config), config)
    module.selection_bias[...] = jnp.array([9.0, 9, 0, 0, 0, 0])
    _, _, sown = collect(module, random_tokens(30), train=True)
    assert jax.tree.leaves(sown["tokens_per_expert"])[0].tolist() == [30, 30, 0, 0, 0, 0]
    assert module.selection_bias[...].tolist() == [9.0, 9, 0, 0, 0, 0]


@pytest.mark.slow
def test_train_as_flax_modules_are_told():
    config, x = CONFIGS["rounded"], random_tokens(30)
    params = random_parameters(config)
    told, module = nnx_module(params, config, train=True), nnx_module(params, config)
    train, plain = (collect(module, x, train=train)[0] for train in (True, False))
    assert np.any(np.asarray(train) != np.asarray(plain))
    assert_same_bits(as_told(told, x), train)
    told.eval()
    assert_same_bits(as_told(told, x), plain)
    module.train()
    assert_same_bits(as_told(module, x), train)
    assert_same_bits(nnx.jit(nnx.remat(lambda module, x: nnx.capture(module, AuxiliaryLoss)(x)[0]))(module, x), train)


@pytest.mark.parametrize("told", [None, True, False])
def test_view_trains_or_evaluates(told):
    config, x = CONFIGS["everything"], random_tokens(30)

    class Block(nnx.Module):
        def __init__(self):
            self.moe = nnx_module(random_parameters(config), config, train=told)
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.dropout(self.moe(x))

    block = Block()
    evaluates, trains = (nnx.view(block, deterministic=deterministic) for deterministic in (True, False))
    assert (evaluates.moe.deterministic, trains.moe.deterministic) == (True, False)
    assert block.moe.deterministic == (None if told is None else not told)
    assert nnx.view(block, only=nnx.Dropout, deterministic=True).moe.deterministic == block.moe.deterministic
    as_told(evaluates, x)
    assert not block.moe.selection_bias[...].any()
    as_told(trains, x)
    assert trains.moe.selection_bias[...].any()
    trains.eval()
    assert trains.moe.deterministic
    assert "deterministic" in nnx.view_info(block.moe)


def test_what_nobody_collects_is_warned_of():
    warn_once.cache_clear()
    x = random_tokens(3)
    module = nnx_module(random_parameters(CONFIGS["everything"]), CONFIGS["everything"])
    with pytest.warns(UserWarning, match="nobody collects .* and z_loss: call the model through nnx.capture"):
        nnx.eval_shape(lambda module: module(x, train=True), module)
    with pytest.warns(UserWarning, match="bias_update_rate applies in training only, and train was left out"):
        nnx.eval_shape(lambda module: nnx.capture(module, AuxiliaryLoss)(x), module)
    nnx.eval_shape(lambda module: nnx.capture(module, AuxiliaryLoss)(x), module)
    nnx.eval_shape(lambda module: module(x, train=True), module)  # once is enough


class ReturnsLosses(nnx.Module):
    """The layer for `nnx.bridge.to_linen`, which knows no `nnx.capture`."""

    def __init__(self, config, *, rngs):
        self.moe = MoE(WIDTH, config, train=True, rngs=rngs)

    def __call__(self, x):
        y, losses = nnx.capture(self.moe, AuxiliaryLoss)(x)
        return y, sum(jax.tree.leaves(losses))


def test_losses_reach_a_linen_model():
    config, x = CONFIGS["plain"], random_tokens(30)
    module = nnx.bridge.to_linen(ReturnsLosses, config)
    y, loss = jax.jit(module.apply)({"params": {"moe": random_parameters(config)}}, x)
    run = jax.jit(partial(LinenMoE(config).apply, train=True, mutable=["losses"]))
    ref, sown = run({"params": random_parameters(config)}, x)
    assert_same_bits((y, loss), (ref, *sown["losses"]["load_balancing_loss"]))


def test_train_of_numpy():
    told = MoE(WIDTH, CONFIGS["plain"], train=np.True_, rngs=nnx.Rngs(0))
    assert told.deterministic is False
    assert nnx.eval_shape(lambda module, x: module(x, train=np.False_), told, random_tokens(1)).shape == (1, WIDTH)
    with pytest.raises(ValueError, match="train=1 must be True, False or None"):
        MoE(WIDTH, CONFIGS["plain"], train=1, rngs=nnx.Rngs(0))
