"""All experts trained by every token, and a few of them used (DS-MoE); and the loss that makes these few suffice."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from blaze_jax import EMPTY_SLOT, MoEConfig, Router, moe, route
from blaze_jax.layer import skipped
from blaze_jax.layer_observer import observed_layers
from blaze_jax.oracle import dense_expert_ffn
from tests.expert_problems import apply
from tests.layers import gradients_through, layer, random_parameters, random_tokens
from tests.numerics import TOLERANCE, assert_close, assert_same_bits, scaled_error
from tests.over_devices import Way, assert_as_one_device

ROUTER = Router(train="dense", threshold=0.2)
DENSE = MoEConfig(
    num_experts=8,
    experts_per_token=3,
    expert_width=8,
    shared_width=8,
    router=ROUTER,
    load_balancing_weight=0,
    mutual_information_weight=0.1,
)
UNGATED = replace(DENSE, activation="relu2", shared_width=0, latent_width=4)
TOKENS = 30


def information(p, mask=None):
    """`mean_x H(e|x) - H(mean_x p)`."""
    p = p if mask is None else p[mask]
    mean = p.mean(0)
    return -(p * jnp.log(p)).sum(-1).mean() + (mean * jnp.log(mean)).sum()


def definition(x, params, config: MoEConfig, train: bool, mask=None):
    """By the paper: all experts weighted by their probability; in inference the K best that are at least as likely."""
    p = jax.nn.softmax(x @ params["w_router"])
    chosen = jnp.broadcast_to(jnp.arange(config.num_experts), p.shape)
    if not train:
        best, chosen = jax.lax.top_k(p, config.experts_per_token)
        chosen = jnp.where(best >= (config.router.threshold or 0), chosen, EMPTY_SLOT)
    weights = jnp.where(chosen == EMPTY_SLOT, 0, jnp.take_along_axis(p, jnp.maximum(chosen, 0), 1))
    experts = {name: value for name, value in params.items() if name[:2] in ("w_", "b_") and "router" not in name}
    w_in, w_out = experts.pop("w_latent_in", None), experts.pop("w_latent_out", None)
    y = apply(dense_expert_ffn, x if w_in is None else x @ w_in, experts, weights, chosen, activation=config.activation)
    y = y if w_out is None else y @ w_out
    if config.shared_width:
        y += (jax.nn.silu(x @ params["shared_w_gate"]) * (x @ params["shared_w_up"])) @ params["shared_w_down"]
    y = y if mask is None else jnp.where(mask[:, None], y, 0)
    return y, config.mutual_information_weight * information(p, mask)


def function(x, params, config, train, mask=None):
    y, routing = moe(x, params, config, train=train, mask=mask)
    assert set(routing.weighted_losses) == {"mutual_information_loss"}
    return y, routing.weighted_losses["mutual_information_loss"]


def both_with_gradients(config, train, mask=None, dtype="float64"):
    x, params = random_tokens(TOKENS, dtype=dtype), random_parameters(config, use_bias=True, dtype=dtype)

    def total(run, x, params):
        y, loss = run(x, params, config, train, mask)
        return jnp.sin(y).sum() + loss, (y, loss)

    grad = jax.jit(jax.value_and_grad(total, (1, 2), has_aux=True), static_argnums=0)
    return [grad(run, x, params) for run in (function, definition)]


@pytest.mark.parametrize("train", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize(
    "config",
    [DENSE, UNGATED, replace(DENSE, router=Router(train="dense"), experts_per_token=1)],
    ids=["gated", "ungated, latent", "K alone"],
)
@pytest.mark.default_cases("ungated, latent-training")
def test_output_losses_and_gradients_are_those_of_the_definition(config, train):
    with jax.enable_x64(True):
        assert_close(*both_with_gradients(config, train))
        mask = jnp.arange(TOKENS) % 3 != 1
        assert_close(*both_with_gradients(config, train, mask))
    assert_close(*both_with_gradients(config, train, dtype="float32"))


def test_narrow_types():
    x, params = random_tokens(TOKENS, dtype="bfloat16"), random_parameters(DENSE, use_bias=True)
    y, _ = layer(x, params, DENSE, train=True)
    assert y.dtype == jnp.bfloat16
    assert scaled_error(y, layer(x.astype("float32"), params, DENSE, train=True)[0]) < TOLERANCE["bfloat16"]


def test_routing_says_who_takes_what():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05], [0.26, 0.25, 0.25, 0.24], [0.7, 0.1, 0.1, 0.1]]))
    routing = route(logits, 2, train="dense", threshold=0.2)
    assert_same_bits(routing.experts, jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), (3, 4)))
    assert_close(routing.weights, jnp.exp(logits))
    assert routing.other_losses == {}
    sparse = route(logits, 2, router=Router(train="dense", threshold=0.2).for_phase(False))
    assert sparse.experts.tolist() == [[0, 1], [0, 1], [0, -1]]
    assert_close(sparse.weights, jnp.array([[0.5, 0.3], [0.26, 0.25], [0.7, 0]]))
    assert sparse.demand.tolist() == [3, 2, 1, 1]  # the second token wants four
    np.testing.assert_allclose(sparse.dropped_share, 2 / 7)
    nobody = route(logits, None, threshold=0.6, mutual_information=True)
    assert nobody.experts.tolist() == [[-1] * 4, [-1] * 4, [0, -1, -1, -1]]
    np.testing.assert_allclose(nobody.other_losses["mutual_information_loss"], information(jnp.exp(logits)), rtol=1e-5)
    best = route(logits, 2, router=Router(train="dense").for_phase(False))
    assert_close(best.weights, jnp.array([[0.5, 0.3], [0.26, 0.25], [0.7, 0.1]]))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_the_loss_sharpens_tokens_and_spreads_load(scoring):
    """Its sign is told by what descending it does to logits that begin nearly even, with a favourite."""
    logits = 0.3 * jax.random.normal(jax.random.key(0), (64, 8)) + jnp.array([1.0, *[0] * 7])
    run = jax.jit(lambda logits: route(logits, 2, scoring=scoring, mutual_information=True))
    step = jax.jit(jax.grad(lambda logits: run(logits).other_losses["mutual_information_loss"]))
    before = run(logits)
    for _ in range(300):
        logits -= 50 * step(logits)
    after = run(logits)
    losses = [r.other_losses["mutual_information_loss"] for r in (after, before)]
    assert -np.log(8) - 1e-5 <= losses[0] < losses[1] - 0.5 <= 0
    assert after.entropy < before.entropy - 0.5
    assert after.demand.std() < before.demand.std()


@pytest.mark.parametrize("door", ["linen", "nnx"])
@pytest.mark.default_cases("linen")
def test_every_form_has_the_same_numbers(door):
    params, x = random_parameters(DENSE), random_tokens(TOKENS)
    out, ref = (gradients_through(name, params, x, DENSE) for name in (door, "function"))
    assert_same_bits(out, ref)


@pytest.mark.slow
def test_under_transformations():
    params, x = random_parameters(DENSE), random_tokens(2, TOKENS)
    run = partial(moe, params=params, config=DENSE, train=True)
    expected = jnp.stack([run(one)[0] for one in x])
    assert_close(jax.vmap(lambda one: run(one)[0])(x), expected)
    assert_close(jax.lax.map(jax.checkpoint(lambda one: run(one)[0]), x), expected)
    shapes = [jax.tree.map(jnp.shape, r._replace(weighted_losses={})) for r in (run(x)[1], skipped(x, DENSE, True)[1])]
    assert shapes[0] == shapes[1]
    replayed, routing = moe(x, params, DENSE, train=True, expert_ids=jnp.zeros((2, TOKENS, 1), jnp.int32))
    assert routing.experts.shape == (2 * TOKENS, 1)  # given experts are not all
    assert scaled_error(replayed, expected) > 0.1


def test_training_is_one_product_and_inference_is_grouped():
    params, x = random_parameters(DENSE), random_tokens(TOKENS)
    with observed_layers() as layers:
        for train in (True, False):
            jax.eval_shape(lambda x, train=train: moe(x, params, DENSE, train=train), x)
    assert [traced.experts_per_token for traced in layers] == [8, 3]
    text = jax.jit(lambda x: moe(x, params, DENSE, train=True)[0]).lower(x).as_text()
    assert "while" not in text


TOGETHER = {"fsdp": 2, "expert": 2, "tensor": 2}


@pytest.mark.parametrize(
    "way",
    [
        Way({"data": 4}, "auto", None, P("data"), P()),
        Way({"data": 4}, "explicit", None, P("data"), P()),
        Way(TOGETHER, "auto", {"row_budget": 0.5}),
        Way({"data": 2, "expert": 4}, "explicit", {}),
        Way({"fsdp": 4, "tensor": 2}, "check_vma", {}),
    ],
    ids=["auto", "explicit", "roles", "roles, explicit", "roles in shard_map"],
)
@pytest.mark.default_cases("roles")
def test_over_devices_as_on_one(way):
    assert_as_one_device(way, DENSE, 8 if way.options is None else 40)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Router(train="both"), "train='both' must be sparse, or dense with scoring='softmax'"),
        (lambda: Router(train="dense", scoring="sigmoid"), "train='dense' must be sparse, or dense with"),
        (lambda: Router(threshold=1.5), "threshold=1.5 must be None, or above 0 and below 1"),
        (lambda: Router(threshold=0.1, top_p=0.5), "threshold=0.1 must be None, or .* without top_p"),
        (lambda: Router(threshold="0.1"), "threshold='0.1' must be a number"),
        (lambda: Router(train="dense", normalize_weights=True), "normalize_weights=True must be .* not True with"),
        (lambda: Router(train="dense", expert_capacity=2), "expert_capacity=2 must be None where a token has no fixed"),
        (lambda: Router(threshold=0.1, weight_norm=2), "weight_norm=2 must be None, or"),
        (
            lambda: replace(DENSE, experts_per_token=None, router=Router(train="dense")),
            "experts_per_token=None must be",
        ),
        (lambda: replace(DENSE, bias_update_rate=0.1), "bias_update_rate=0.1 must be left out"),
        (lambda: replace(DENSE, mutual_information_weight=-1), "mutual_information_weight=-1 must not be negative"),
    ],
)
@pytest.mark.default_cases("*")
def test_misuse_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
