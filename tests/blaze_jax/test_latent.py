"""Experts in a narrower space between two shared projections (LatentMoE), and the dense layer of equal arithmetic."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import P

from blaze_jax import MoEConfig, Router, checkpoints, moe
from blaze_jax.oracle import dense_expert_ffn
from tests.expert_problems import apply
from tests.layers import DOORS, WIDTH, gradients_through, layer, random_parameters, random_tokens
from tests.numerics import TOLERANCE, assert_close, assert_same_bits, scaled_error
from tests.over_devices import Way, assert_as_one_device

LATENT = MoEConfig(
    num_experts=8, experts_per_token=3, expert_width=8, latent_width=4, shared_width=8, z_loss_weight=0.1
)
UNGATED = replace(LATENT, activation="relu2", shared_width=0, router=Router(scoring="sigmoid", weight_scale=2.5))


def definition(x, params, config: MoEConfig):
    """Router and shared experts see the tokens, and the routed experts `x · W_in`; their sum goes through `W_out`."""
    logits = x @ params["w_router"]
    scores = jax.nn.sigmoid(logits) if config.router.scoring == "sigmoid" else jax.nn.softmax(logits)
    chosen = jax.lax.top_k(logits, config.experts_per_token)[1]
    weights = jnp.take_along_axis(scores, chosen, 1)
    weights = config.router.weight_scale * weights / weights.sum(1, keepdims=True)
    experts = {name: value for name, value in params.items() if name[:2] in ("w_", "b_") and "router" not in name}
    w_in, w_out = experts.pop("w_latent_in"), experts.pop("w_latent_out")
    y = apply(dense_expert_ffn, x @ w_in, experts, weights, chosen, activation=config.activation) @ w_out
    if config.shared_width:
        y += (jax.nn.silu(x @ params["shared_w_gate"]) * (x @ params["shared_w_up"])) @ params["shared_w_down"]
    return y


def loss_of(run, x, params):
    y = run(x, params)
    return jnp.sin(y).sum(), y


@pytest.mark.parametrize("config", [LATENT, UNGATED], ids=["gated", "ungated"])
@pytest.mark.default_cases("gated")
@pytest.mark.ci_cases("ungated")
def test_output_and_gradients_are_those_of_the_definition(config):
    with jax.enable_x64(True):
        x = random_tokens(30, dtype="float64")
        params = random_parameters(config, use_bias=True, dtype="float64")
        assert params["w_latent_in"].shape == (WIDTH, 4)
        assert params["b_down"].shape == (8, 4)
        both = (lambda x, params: moe(x, params, config)[0], partial(definition, config=config))
        grad = jax.jit(jax.value_and_grad(loss_of, (1, 2), has_aux=True), static_argnums=0)
        out, ref = (grad(run, x, params) for run in both)
    assert_close(out, ref)


@pytest.mark.slow
@pytest.mark.parametrize("door", ["linen", "nnx"])
def test_every_form_has_the_same_numbers(door):
    params, x = random_parameters(LATENT), random_tokens(30)
    out, ref = (gradients_through(name, params, x, LATENT) for name in (door, "function"))
    assert_same_bits(out, ref)
    remat = jax.jit(jax.value_and_grad(lambda p: jax.checkpoint(partial(DOORS[door], config=LATENT))(p, x)[0].sum()))
    plain = jax.value_and_grad(lambda p: DOORS[door](p, x, LATENT)[0].sum())
    assert_close(remat(params), plain(params))


@pytest.mark.slow
def test_narrow_types():
    x, params = random_tokens(30, dtype="bfloat16"), random_parameters(LATENT)
    y, _ = layer(x, params, LATENT)
    assert y.dtype == jnp.bfloat16
    assert scaled_error(y, layer(x.astype("float32"), params, LATENT)[0]) < TOLERANCE["bfloat16"]


TOGETHER, FSDP = {"fsdp": 2, "expert": 2, "tensor": 2}, {"fsdp": 2, "expert": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        Way({"data": 4}, "auto", None, P("data"), P()),
        Way({"data": 4}, "explicit", None, P("data"), P()),
        Way(TOGETHER, "auto", {"row_budget": 0.5}),
        Way(FSDP, "explicit", {}),  # where fsdp does not divide the experts, it splits the latent space
        Way(TOGETHER, "check_vma", {}),
    ],
    ids=["auto", "explicit", "roles", "roles, explicit", "roles in shard_map"],
)
@pytest.mark.ci_cases("roles in shard_map")
def test_over_devices_as_on_one(way):
    config = replace(LATENT, num_experts=4) if way.axes == FSDP else LATENT
    assert_as_one_device(way, config, 8 if way.options is None else 40)


def test_a_checkpoint_without_the_projections_is_refused(tmp_path):
    plain = replace(LATENT, latent_width=0, shared_width=0)
    checkpoints.save(tmp_path, {0: checkpoints.Layer(random_parameters(plain))}, plain)
    latent = replace(plain, latent_width=WIDTH)
    with pytest.raises(ValueError, match="layer 0: the layout 'by_expert' has no w_latent_in"):
        checkpoints.load(tmp_path, 0, latent)
    with pytest.raises(ValueError, match=r"the layout 'by_expert' does not fit a layer with .*: w_latent_in"):
        checkpoints.save(tmp_path, {1: checkpoints.Layer(random_parameters(latent))}, latent)


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({"latent_width": 0}, 3 * 8 + 8),
        ({"latent_width": 0, "activation": "relu2", "shared_width": 0}, 24),
        ({}, round(24 * 4 / 10 + 8 + 2 * 4 / 3)),
        ({"activation": "relu2"}, round(24 * 4 / 10 + 8 + 2 * 4 / 2)),
    ],
)
@pytest.mark.default_cases("*")
def test_dense_twin_has_the_same_active_arithmetic(changes, width):
    config = replace(LATENT, **changes)
    twin = config.dense_twin(WIDTH)
    assert twin == (width, config.activation)
    matrices = 2 if config.activation == "relu2" else 3
    active = sum(  # multiplications of a token
        parameter.shape[-2] * parameter.shape[-1] * (config.experts_per_token if len(parameter.shape) == 3 else 1)
        for name, parameter in config.parameters(WIDTH).items()
        if name != "w_router"
    )
    assert abs(matrices * WIDTH * twin.width - active) <= matrices * WIDTH / 2
    with pytest.raises(ValueError, match="model_width=0 must be at least 1"):
        config.dense_twin(0)
