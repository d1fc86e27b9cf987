"""The layer as a function: its parts put together."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax import EMPTY_SLOT, MoE, MoEConfig, Router, init, moe, route
from blaze_jax.layer import auxiliary_losses, initial_value, statistics
from blaze_jax.oracle import dense_expert_ffn
from tests.expert_problems import apply
from tests.layers import CONFIGS, WIDTH, layer, random_parameters, random_tokens
from tests.numerics import TOLERANCE, assert_close, assert_same_bits

SHARED = ("shared_w_gate", "shared_w_up", "shared_w_down")


def expected(x, params, config, *, selection_bias=None, train=False):
    """Output by dense parts; the shared experts are one that every token has, at the gate's weight or one."""
    router = config.router.for_phase(train)
    logits = jnp.dot(x, params["w_router"], precision="highest") + params.get("b_router", 0)
    routing = route(logits, config.experts_per_token, router=router, selection_bias=selection_bias)
    own = {name: value for name, value in params.items() if "router" not in name and "shared" not in name}
    y = apply(dense_expert_ffn, x, own, routing.weights, routing.experts, activation=config.activation)
    if config.shared_width:
        shared = {name.removeprefix("shared_"): params[name][None] for name in SHARED if name in params}
        weight = jax.nn.sigmoid(x @ params["shared_gate"]) if config.shared_gate else jnp.ones((len(x), 1))
        everyone = weight, jnp.zeros((len(x), 1), jnp.int32)
        y += apply(dense_expert_ffn, x, shared, *everyone, activation=config.activation)
    return y, routing


@pytest.mark.parametrize(
    ("name", "use_bias", "train"),
    [*((name, True, True) for name in CONFIGS), ("everything", False, False), ("gated", False, False)],
)
@pytest.mark.default_cases("gated-False-False")
@pytest.mark.ci_cases("plain-True-True", "everything-False-False")
def test_output_and_gradients(name, use_bias, train):
    configs = CONFIGS | {"gated": replace(CONFIGS["everything"], activation="swiglu")}
    config, x = replace(configs[name], router_bias=use_bias), random_tokens(30)
    params = random_parameters(config, use_bias=use_bias)
    bias = jnp.linspace(-0.1, 0.1, config.num_experts) if config.bias_update_rate else None

    def loss(function, x, params):
        y, routing = function(x, params, config, selection_bias=bias, train=train)
        return jnp.square(y).mean() + sum(auxiliary_losses(routing, config).values()), (y, routing.experts)

    gradients = jax.jit(jax.value_and_grad(loss, argnums=(1, 2), has_aux=True), static_argnums=0)
    assert_close(*(gradients(function, x, params) for function in (moe, expected)))


@pytest.mark.parametrize("leading", [(), (2, 3), (0,), (2, 0, 3)])
@pytest.mark.slow
def test_any_leading_shape(leading):
    config = CONFIGS["everything"]
    params, x = random_parameters(config), random_tokens(*leading)
    y, routing = layer(x, params, config)
    chex.assert_shape(y, x.shape)
    chex.assert_shape(routing.experts, (x.size // WIDTH, config.experts_per_token))
    assert_same_bits(y.reshape(-1, WIDTH), layer(x.reshape(-1, WIDTH), params, config)[0])
    chex.assert_tree_all_finite((y, routing))


@pytest.mark.parametrize("param_dtype", ["bfloat16", "float32"])
def test_router_is_wide_and_experts_are_narrow(param_dtype):
    config, x = CONFIGS["everything"], random_tokens(30, dtype="bfloat16")
    params = random_parameters(config, dtype=param_dtype)
    y, routing = layer(x, params, config)
    assert y.dtype == jnp.bfloat16
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (x, params))
    ref_y, ref_routing = layer(*wide, config)
    assert_same_bits(routing, ref_routing)
    assert_close(y, ref_y, TOLERANCE["bfloat16"])


def test_dropped_token_has_no_output():
    config, x = CONFIGS["limited"], random_tokens(30)
    y, routing = layer(x, random_parameters(config, use_bias=True), config)
    dropped = np.asarray(routing.experts == EMPTY_SLOT).all(1)
    assert dropped.any()
    assert_same_bits(y[dropped], np.zeros((dropped.sum(), WIDTH), np.float32))
    assert np.asarray(y[~dropped]).any(1).all()


def test_rounding_serves_training_only():
    config, x = CONFIGS["rounded"], random_tokens(30)
    plain = MoEConfig(num_experts=6, experts_per_token=2, expert_width=8)
    params = random_parameters(config)
    assert_same_bits(layer(x, params, config), layer(x, params, plain, train=True))
    _, routing = layer(x, params, config, train=True)
    assert (routing.tokens_per_expert % 4 == 0).all()
    assert (routing.demand % 4 != 0).any()


def test_losses_carry_their_weights():
    config = replace(CONFIGS["plain"], load_balancing_weight=0.5, z_loss_weight=0.25)
    _, routing = layer(random_tokens(30), random_parameters(config), config)
    losses = auxiliary_losses(routing, config)
    assert losses == {"load_balancing_loss": 0.5 * routing.load_balancing_loss, "z_loss": 0.25 * routing.z_loss}
    assert losses == routing.weighted_losses
    assert set(statistics(routing)) == {"tokens_per_expert", "dropped_share", "entropy"}
    assert auxiliary_losses(routing, replace(config, load_balancing_weight=0, z_loss_weight=0)) == {}


def test_initial_kernels_have_the_fan_in_of_one_expert():
    parameter = MoEConfig(num_experts=16, experts_per_token=1, expert_width=64).parameters(256)["w_up"]
    value = initial_value(jax.nn.initializers.lecun_normal(), jax.random.key(0), parameter, jnp.float32)
    chex.assert_shape(value, (16, 256, 64))
    per_expert = np.asarray(value).std(axis=(1, 2)) * np.sqrt(256)
    assert (np.abs(per_expert - 1) < 0.05).all()
    assert len({expert.tobytes() for expert in np.asarray(value)}) == 16


def test_init_makes_the_parameters_of_the_configuration_for_the_layer():
    params = jax.eval_shape(lambda: init(jax.random.key(0), CONFIGS["everything"], WIDTH, dtype=jnp.bfloat16))
    chex.assert_type(list(params.values()), jnp.bfloat16)
    y, _ = layer(random_tokens(30), init(jax.random.key(0), CONFIGS["everything"], WIDTH), CONFIGS["everything"])
    chex.assert_tree_all_finite(y)


PARAMS = random_parameters(CONFIGS["plain"])


BIASED = replace(CONFIGS["plain"], bias_update_rate=0.1)
WITHOUT_UP = {name: array for name, array in PARAMS.items() if name != "w_up"}
BOXED = jax.eval_shape(MoE(replace(CONFIGS["plain"], implementation="xla")).init, jax.random.key(0), random_tokens(3))[
    "params"
]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("params", WITHOUT_UP, "params lacks w_up, which MoEConfig"),
        ("params", PARAMS | {"b_down": jnp.zeros((6, WIDTH))}, "params lacks b_gate, b_up, which"),
        ("params", PARAMS | {"shared_w_up": jnp.zeros((WIDTH, 5))}, "params has shared_w_up, which .* no use"),
        ("params", PARAMS | {"b_up": jnp.zeros((6, 8))}, "params has b_up, which .* no use for"),
        ("params", PARAMS | {"w_up": jnp.zeros((6, 10, 9))}, r"'w_up'\] has shape \(6, 10, 9\), must be \(6, 10, 8\)"),
        ("params", list(PARAMS.items()), "params=.* must be a mapping from names to arrays"),
        ("params", None, "params=None must be a mapping from names to arrays"),
        ("params", PARAMS | {"w_up": "up"}, r"params\['w_up'\]='up' must be an array"),
        ("params", PARAMS | {"w_router": jnp.ones((10, 6), int)}, r"\['w_router'\] has dtype int32, must be floating"),
        ("params", BOXED, r"params\['w_router'\] is boxed, .* give flax.linen.unbox\(params\)"),
        ("x", jnp.zeros((3, 11)), r"params\['w_router'\] has shape \(10, 6\), must be \(11, 6\)"),
        ("x", jnp.zeros((3, WIDTH), jnp.int32), r"x must be a floating array \(..., d\), got int32"),
        ("x", jnp.zeros((3, 0)), r"x must be a floating array \(..., d\) with d at least 1, got .* of shape \(3, 0\)"),
        ("x", jnp.zeros(()), r"x must be a floating array .* of shape \(\)"),
        ("x", "tokens", "x='tokens' must be an array"),
        ("x", None, "x=None must be an array"),
        ("config", BIASED, "selection_bias=None, but MoEConfig.* has one: give the checkpoint's, or jnp.zeros"),
        ("selection_bias", jnp.zeros(6), "selection_bias=Array.* must be None, because MoEConfig.* has none"),
    ],
)
@pytest.mark.default_cases("*")
def test_misuse_is_named(name, value, message):
    arguments = {"x": random_tokens(3), "params": PARAMS, "config": CONFIGS["plain"]} | {name: value}
    with pytest.raises(ValueError, match=message):
        moe(**arguments)


def test_retraces_only_for_new_shapes():
    chex.clear_trace_counter()
    traced_once = jax.jit(chex.assert_max_traces(moe, n=1), static_argnums=2)
    equal_config = MoEConfig(num_experts=6, experts_per_token=2, expert_width=8, router=Router())
    assert equal_config is not CONFIGS["plain"]
    x = random_tokens(30)
    out, ref = (traced_once(x + 1, PARAMS, config)[0] for config in (equal_config, CONFIGS["plain"]))
    assert_same_bits(out, ref)


@pytest.mark.parametrize("convert", [np.asarray, np.ndarray.tolist], ids=["numpy", "lists"])
def test_whatever_makes_an_array(convert):
    config, x = CONFIGS["plain"], random_tokens(3)
    ref = layer(x, PARAMS, config)[0]
    x, params = convert(np.asarray(x)), {name: convert(np.asarray(value)) for name, value in PARAMS.items()}
    assert_close(jax.jit(lambda: moe(x, params, config)[0])(), ref)
    assert_close(jax.jit(lambda: MoE(config).apply({"params": PARAMS}, x, train=False))(), ref)
