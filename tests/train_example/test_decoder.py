"""The model: sizes, causality, stacked blocks, recomputation."""

from dataclasses import replace
from functools import lru_cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train_example.small import FULL_MODEL, MODEL, decoder, initial_variables, windows
from train_example.program.model import make_model
from train_example.program.presets import PRESETS

COLLECTIONS = ["losses", "intermediates", "router_state"]


def test_presets_have_as_many_parameters_as_their_names_say():
    expected_sizes = {
        "100m": 100e6,
        "1b": 1e9,
        "olmoe": 6.72e9,
        "qwen3-30b-a3b-layers": 11 / 48 * 29.9e9,
        "7b-a1b": 7e9,
    }
    for name, expected in expected_sizes.items():
        model, sizes = make_model(PRESETS[name]), PRESETS[name].model
        shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
        total = sum(leaf.size for leaf in jax.tree.leaves(shapes))
        assert total == pytest.approx(expected, rel=0.03)
    idle = sizes.num_layers * (sizes.num_experts - sizes.experts_per_token) * 3 * sizes.width * sizes.expert_width
    assert total - idle == pytest.approx(1e9, rel=0.05)  # what a token passes through


@pytest.mark.parametrize("config", [MODEL, FULL_MODEL])
@pytest.mark.slow
def test_logits_depend_on_no_later_byte(config):
    model, tokens = decoder(config), windows(2, 12)
    variables, apply = initial_variables(config), jax.jit(model.apply)
    changed = tokens.copy()
    changed[:, 7] += 1
    logits, other = apply(variables, tokens), apply(variables, changed)
    assert logits.shape == (2, 12, 256)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits[:, :7], other[:, :7], atol=1e-5)
    assert (abs(logits - other)[:, 7:].max(-1) > 1e-3).all()


@pytest.mark.slow
def test_variables_are_stacked_by_kind_of_block_and_every_layer_starts_from_its_own_numbers():
    model, tokens = decoder(FULL_MODEL), windows(2, 12)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    params = variables["params"]
    assert params["moe_blocks"]["moe"]["w_up"].names == ("layers", "expert", "embed", "expert_mlp")
    assert nn.unbox(params)["moe_blocks"]["moe"]["w_up"].shape == (2, 8, 32, 16)
    assert params["dense_blocks"]["feed_forward"]["up"]["kernel"].shape == (1, 32, 24)
    _, sown = jax.eval_shape(partial(model.apply, train=True, mutable=COLLECTIONS), variables, tokens)
    layer = {name: jax.tree.map(jnp.shape, sown[name]["moe_blocks"]["moe"]) for name in COLLECTIONS}
    assert layer["losses"] == {"load_balancing_loss": ((2,),), "z_loss": ((2,),)}
    assert layer["intermediates"]["tokens_per_expert"] == ((2, 8),)
    assert layer["router_state"] == {"selection_bias": (2, 8)}
    weights = initial_variables()["params"]["moe_blocks"]["moe"]["w_up"]
    assert abs(weights[0] - weights[1]).max() > 0.01


def test_the_program_does_not_grow_with_depth():
    def size(layers):
        model = decoder(replace(MODEL, num_layers=layers))
        variables = jax.eval_shape(model.init, jax.random.key(0), windows(2, 12))
        return len(jax.jit(model.apply).lower(variables, windows(2, 12)).as_text().splitlines())

    assert size(2) == size(8)


@lru_cache
def gradients(save, remat, unroll=False):
    model, tokens = decoder(save=save, remat=remat, unroll=unroll), windows(2, 12)

    def loss(variables):
        return jnp.square(model.apply(variables, tokens, train=True, mutable=["losses"])[0]).mean()

    return jax.jit(jax.value_and_grad(loss))(initial_variables())


@pytest.mark.parametrize(
    "others",
    [("pre_activations", "except-experts"), ("inputs", "full"), ("inputs", "none", True), ("inputs", "full", True)],
)
@pytest.mark.slow
def test_neither_recomputation_nor_unrolled_blocks_change_a_gradient(others):
    (loss, grads), (expected_loss, expected) = gradients(*others), gradients("pre_activations", "none")
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, expected)


def saved_bytes(remat):
    """Bytes of the stacked residuals that the loop over blocks hands from the forward to the backward pass."""
    model, tokens = decoder(remat=remat), windows(4, 64)
    params = initial_variables()["params"]

    def forward(params):
        return jax.vjp(lambda p: model.apply({"params": p}, tokens), params)[1]

    layers = MODEL.num_layers
    residuals = jax.tree.leaves(jax.eval_shape(forward, params))
    own = [leaf.shape for leaf in jax.tree.leaves(params)]
    kept = [r for r in residuals if r.shape[:1] == (layers,) and r.shape not in own]
    return sum(r.size * r.dtype.itemsize for r in kept)


def test_recomputation_saves_memory():
    none, except_experts, full = (saved_bytes(remat) for remat in ("none", "except-experts", "full"))
    pairs = 4 * 64 * MODEL.experts_per_token
    pre_activations = MODEL.num_layers * 2 * pairs * MODEL.expert_width * 4
    assert full < except_experts < none / 2
    assert except_experts - full >= pre_activations


@pytest.mark.slow
def test_the_selection_bias_moves_in_training_only():
    model, tokens = decoder(FULL_MODEL), windows(2, 12)
    variables = initial_variables(FULL_MODEL)
    apply = jax.jit(partial(model.apply, mutable=["losses", "router_state"]), static_argnames="train")
    _, trained = apply(variables, tokens, train=True)
    _, evaluated = apply(variables, tokens)
    assert abs(jax.tree.leaves(trained["router_state"])[0]).max() == pytest.approx(FULL_MODEL.bias_update_rate)
    assert not jax.tree.leaves(evaluated["router_state"])[0].any()
