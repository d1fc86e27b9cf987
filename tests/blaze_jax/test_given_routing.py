"""What a caller decides of the routing: tokens that are masked, and experts that were chosen earlier."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import P

from blaze_jax import EMPTY_SLOT, MoE, Parallelism, Router, moe, route
from blaze_jax.nnx import ChosenExperts
from blaze_jax.oracle import dense_expert_ffn
from tests.expert_problems import apply
from tests.layers import CONFIGS, nnx_module, random_parameters, random_tokens
from tests.numerics import assert_close, assert_same_bits

TOKENS = 32
MASK = jnp.arange(TOKENS) % 3 != 1


def loss_and_gradients(config, bias=None, train=True):
    """Loss, output and routing of a layer, and the gradients of tokens and parameters, compiled."""

    def loss(x, params, given):
        y, routing = moe(x, params, config, selection_bias=bias, train=train, **given)
        return jnp.square(y).sum() + sum(routing.weighted_losses.values()), (y, routing)

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.default_cases("everything")
def test_a_masked_token_is_as_if_it_were_not_there(name):
    config = replace(CONFIGS[name], load_balancing_weight=0.1)
    bias = jnp.linspace(-0.1, 0.1, config.num_experts) if config.has_selection_bias else None
    params, x = random_parameters(config, use_bias=True), random_tokens(TOKENS)
    run = loss_and_gradients(config, bias)
    # A limit on an expert's tokens follows from how many there are, masked ones too: here it is the same number.
    (value, (y, routing)), (dx, d_params) = run(jnp.where(MASK[:, None], x, jnp.nan), params, {"mask": MASK})
    if name == "limited":
        config = replace(config, router=Router(expert_capacity=6))
        run = loss_and_gradients(config, bias)
    (ref_value, (ref_y, ref)), (ref_dx, ref_d_params) = run(x[MASK], params, {})
    assert_close((value, y[MASK], dx[MASK], d_params), (ref_value, ref_y, ref_dx, ref_d_params))
    for array in (y, dx):
        assert_same_bits(array[~MASK], jnp.zeros_like(array[~MASK]))
    assert (routing.experts[~MASK] == EMPTY_SLOT).all()
    assert_same_bits((routing.demand, routing.tokens_per_expert), (ref.demand, ref.tokens_per_expert))
    losses = ("load_balancing_loss", "z_loss", "entropy", "dropped_share")
    assert_close(*([getattr(r, name) for name in losses] for r in (routing, ref)))


def test_whatever_experts_return_for_a_masked_token_is_no_output():
    config, x = CONFIGS["plain"], random_tokens(TOKENS)
    y, _ = moe(x, random_parameters(config), config, mask=MASK, experts=lambda x, *_, **__: jnp.ones_like(x))
    assert_same_bits(y, jnp.where(MASK[:, None], jnp.ones_like(x), 0))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_selected"])
@pytest.mark.default_cases("sigmoid")
def test_given_experts_are_weighed_by_todays_logits(scoring):
    config = replace(CONFIGS["plain"], router=Router(scoring=scoring), load_balancing_weight=0, z_loss_weight=0.1)
    params, x = random_parameters(config), random_tokens(TOKENS)
    logits = jnp.dot(x, params["w_router"], precision="highest")
    ids = jnp.stack([jnp.arange(TOKENS) % 5, jnp.full(TOKENS, 5)], 1).at[3, 1].set(EMPTY_SLOT).at[7].set(EMPTY_SLOT)
    given, ids = ids, jnp.where(MASK[:, None], ids, EMPTY_SLOT)

    def expected(x, params):
        logits = jnp.dot(x, params["w_router"], precision="highest")
        scores = jax.nn.sigmoid(logits) if scoring == "sigmoid" else jax.nn.softmax(logits)
        scores = jnp.where(ids == EMPTY_SLOT, 0, jnp.take_along_axis(scores, ids, 1))
        weights = scores / jnp.maximum(scores.sum(1, keepdims=True), 1e-9)
        experts = {name: value for name, value in params.items() if "router" not in name}
        y = apply(dense_expert_ffn, x, experts, weights, ids, activation=config.activation)
        routed = (ids != EMPTY_SLOT).any(1)
        z_loss = jnp.where(routed, jnp.square(jax.nn.logsumexp(logits, 1)), 0).sum() / routed.sum()
        return jnp.square(y).sum() + config.z_loss_weight * z_loss, y

    ((value, (y, routing)), gradients) = loss_and_gradients(config)(x, params, {"expert_ids": given, "mask": MASK})
    (ref_value, ref_y), ref_gradients = jax.jit(jax.value_and_grad(expected, (0, 1), has_aux=True))(x, params)
    assert_close((value, y, gradients), (ref_value, ref_y, ref_gradients))
    assert_same_bits(routing.experts, ids)
    assert_same_bits(routing.demand, jnp.bincount(jnp.where(ids < 0, 6, ids).ravel(), length=7)[:6].astype(jnp.int32))
    assert_same_bits(routing.weights, route(logits, 2, scoring=scoring, expert_ids=given, mask=MASK).weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["everything", "rounded"])
@pytest.mark.ci_cases("everything")
def test_replaying_a_choice_gives_the_same_bits(name):
    config, x = CONFIGS[name], random_tokens(TOKENS)
    bias = jnp.linspace(-0.1, 0.1, config.num_experts) if config.has_selection_bias else None
    run = loss_and_gradients(config, bias)
    first = run(x, random_parameters(config), {"mask": MASK})
    ids = first[0][1][1].experts
    again = run(x, random_parameters(config), {"mask": MASK, "expert_ids": ids})
    if name == "everything":  # rounded weights are normalised over the choice before rounding, which ids do not tell
        assert_same_bits(first, again)
    assert_same_bits(again[0][1][1].experts, ids)


def test_an_id_that_cannot_be_makes_nan_of_its_token_alone():
    ids, wrong = jnp.array([[0, 1], [0, 6], [-2, 1], [2, 2], [3, -1]]), jnp.array([0, 1, 1, 1, 0], bool)
    (_, (y, _)), _ = loss_and_gradients(CONFIGS["plain"])(
        random_tokens(5), random_parameters(CONFIGS["plain"]), {"expert_ids": ids}
    )
    assert_same_bits(jnp.isnan(y).all(1), wrong)
    assert_same_bits(jnp.isnan(y).any(1), wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "limited"])
@pytest.mark.parametrize("kind", ["automatic", "explicit", "parallel"])
@pytest.mark.ci_cases("automatic-limited", "parallel-plain")
def test_over_a_mesh_both_give_what_one_device_gives(kind, name):
    config, x = CONFIGS[name], random_tokens(30).reshape(6, 5, -1)  # four devices do not divide the tokens
    params = random_parameters(config)
    given = {"mask": (jnp.arange(30) % 3 != 1).reshape(6, 5)}
    _, chosen = moe(x, params, config, **given)
    replayed = {**given, "expert_ids": chosen.experts.reshape(6, 5, -1)}
    expected = [moe(x, params, config, **some) for some in (given, replayed)]
    types = (jax.sharding.AxisType.Explicit if kind == "explicit" else jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4 if kind == "automatic" else 2,), ("devices",), axis_types=types)
    options = {"parallel": Parallelism(expert="devices", mesh=mesh)} if kind == "parallel" else {}
    with jax.set_mesh(mesh):
        x = jax.device_put(x, jax.NamedSharding(mesh, P("devices"))) if kind == "explicit" else x
        for some, (ref_y, ref) in zip((given, replayed), expected, strict=True):
            y, routing = jax.jit(lambda x, some: moe(x, params, config, **options, **some))(x, some)
            assert_close(np.asarray(y), np.asarray(ref_y))
            assert_same_bits(np.asarray(routing.experts), np.asarray(ref.experts))
            assert_close(np.asarray(routing.z_loss), np.asarray(ref.z_loss))


@pytest.mark.slow
def test_modules_record_and_replay():
    config = replace(CONFIGS["plain"], load_balancing_weight=0)
    x, other = random_tokens(TOKENS), 2 * random_tokens(TOKENS)[::-1]
    params = random_parameters(config)
    _, routing = moe(x, params, config, mask=MASK)
    ids = routing.experts
    expected, _ = moe(other, params, config, mask=MASK, expert_ids=ids)
    module, variables = MoE(config), {"params": params}
    _, recorded = module.apply(variables, x, mask=MASK, mutable=["routing"])
    assert_same_bits(recorded, {"routing": {"experts": ids}})
    assert_same_bits(module.apply({**variables, **recorded}, other, mask=MASK), expected)
    assert "routing" not in module.init(jax.random.key(0), x)
    of_nnx = nnx_module(params, config)
    _, recorded = nnx.capture(of_nnx, ChosenExperts)(x, mask=MASK)
    assert_same_bits(jax.tree.leaves(recorded), [ids])
    assert_same_bits(of_nnx(other, mask=MASK, expert_ids=ids), expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mask": jnp.ones(4)}, r"mask has dtype float32 and shape \(4,\), must be bool of shape \(4,\)"),
        ({"mask": jnp.ones((4, 1), bool)}, r"mask has dtype bool and shape \(4, 1\), must be bool of shape \(4,\)"),
        ({"expert_ids": jnp.ones((4, 2))}, "expert_ids has dtype float32"),
        ({"expert_ids": jnp.ones((3, 2), int)}, r"must be integers of shape \(4, 'slots'\) with 1 to 6 slots"),
        ({"expert_ids": jnp.ones((4, 7), int)}, "with 1 to 6 slots"),
        ({"expert_ids": jnp.full((4, 2), 6)}, r"expert_ids\[0, 0\] = 6 must be an expert id from 0 to 5, or -1"),
    ],
)
def test_what_does_not_fit_is_named(given, message):
    config = CONFIGS["plain"]
    with pytest.raises(ValueError, match=message):
        moe(random_tokens(4), random_parameters(config), config, **given)
    with pytest.raises(ValueError, match=message):
        route(jnp.zeros((4, 6)), 2, **given)
