"""Routers that leave it to the tokens how many experts they take, against their definitions in float64."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from blaze_jax import EMPTY_SLOT, MoEConfig, Parallelism, Router, init, moe, route
from blaze_jax.activations import get_activation
from blaze_jax.benchmark.memory import plan_of
from blaze_jax.benchmark.routers import router_layers
from blaze_jax.benchmark.sizes import Sizes, forward_and_backward
from blaze_jax.layer import skipped
from pallas_kernels.compile_only import compile_for_gpu
from tests.expert_problems import ON_GPUS, on
from tests.layers import DOORS, WIDTH, created, random_parameters, random_tokens, unboxed
from tests.numerics import assert_close, assert_same_bits
from tests.pallas_kernels.rows import needs_interpreter

TOKENS, EXPERTS = 24, 6
MASK = jnp.arange(TOKENS) % 3 != 1
_BASE = MoEConfig(
    num_experts=EXPERTS,
    experts_per_token=None,
    expert_width=8,
    activation="silu",
    router_bias=True,
    router=Router(scoring="relu"),
    load_balancing_weight=0.1,
    z_loss_weight=0.01,
)
CONFIGS = {
    "relu": _BASE,
    "rms": replace(_BASE, router=Router(scoring="relu", weight_norm="rms", weight_scale=1.5)),
    "turns": replace(_BASE, router=Router(scoring="relu", weight_norm="rms"), mean_experts=0.5),
    "rms of 2": replace(_BASE, router=Router(scoring="relu", weight_norm="rms"), experts_per_token=2),
    "top_p": replace(_BASE, router=Router(top_p=0.7)),
    "top_p of 2": replace(_BASE, router=Router(top_p=0.7, normalize_weights=True), experts_per_token=2),
}


_FIRST_SHIFT = {"relu": 1, "rms": 0, "turns": 0, "rms of 2": 2, "top_p": 1, "top_p of 2": 0}
PAIRS = [
    (name, masked, (0.0, -100.0, 100.0)[(_FIRST_SHIFT[name] + number) % 3])
    for name in CONFIGS
    for number, masked in enumerate(("some", "all", "none"))
]
"""Every two of configuration, mask and shift of the logits together: all three would be three times as many."""


def parameters(config, shift: float = 0.0, width: int = WIDTH):
    """With gains of both signs, and `shift` added to all logits."""
    params = random_parameters(config, width=width) | {"b_router": jnp.full(EXPERTS, shift)}
    return params | ({"router_gain": jnp.linspace(-1, 2, EXPERTS)} if config.router.weight_norm else {})


def defined(x, params, config, mask):
    """Loss; output, choice `(T, E)`, dropped share and losses by the definitions, every expert for every token."""
    router, real = config.router, mask[:, None]
    logits = x @ params["w_router"] + params["b_router"]
    if router.scoring == "relu":
        values = jnp.maximum(logits, 0)
        wanted = logits > 0
        probabilities = values / _or_one(values.sum(1, keepdims=True))
        weights = values
    else:
        weights = probabilities = jax.nn.softmax(logits)
        # How much more probable experts have, those of a token's own rank left out.
        more = jnp.where(logits[:, None] > logits[:, :, None], probabilities[:, None], 0).sum(2)
        wanted = more < router.top_p
    if router.weight_norm:
        weights *= params["router_gain"] / jnp.sqrt(jnp.square(weights).mean(1, keepdims=True) + 1e-5)
    wanted &= real
    rank = (logits[:, None] > logits[:, :, None]).sum(2)
    chosen = wanted & (rank < (config.experts_per_token or EXPERTS))
    weights = jnp.where(chosen, weights, 0)
    if router.normalize_weights:
        weights /= _or_one(weights.sum(1, keepdims=True))
    weights *= router.weight_scale
    hidden = get_activation(config.activation).function(jnp.einsum("td,edn->ten", x, params["w_up"]))
    y = jnp.einsum("te,ten,end->td", weights, hidden, params["w_down"])
    count = jnp.maximum(mask.sum(), 1)
    probability = jnp.where(real, probabilities, 0).sum(0) / count
    balance = EXPERTS * (wanted.sum(0) / jnp.maximum(wanted.sum(), 1) * probability).sum()
    z_loss = jnp.where(mask, jnp.square(jax.nn.logsumexp(logits, axis=1)), 0).sum() / count
    loss = jnp.square(y).sum() + config.load_balancing_weight * balance + config.z_loss_weight * z_loss
    return loss, (y, chosen, (wanted & ~chosen).sum() / jnp.maximum(wanted.sum(), 1), (balance, z_loss))


def _or_one(total):
    return jnp.where(total == 0, 1, total)


def loss(x, params, config, given, **options):
    y, routing = moe(x, params, config, train=True, **given, **options)
    return jnp.square(y).sum() + sum(routing.weighted_losses.values()), (y, routing)


step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)


def chosen_of(experts):
    return (experts[:, :, None] == jnp.arange(EXPERTS)).any(1)


@pytest.mark.parametrize(("name", "masked", "shift"), PAIRS)
@pytest.mark.default_cases("turns-none-100.0")
@pytest.mark.ci_cases("rms-some-0.0", "top_p of 2-some-0.0")
def test_outputs_and_gradients_are_those_of_the_definition(name, masked, shift):
    config, x = CONFIGS[name], random_tokens(TOKENS)
    mask = {"some": MASK, "all": MASK & False, "none": MASK | True}[masked]
    params = parameters(config, shift)
    (value, (y, routing)), gradients = step(x, params, config, {"mask": mask})
    (ref_value, (ref_y, chosen, dropped, _)), ref_gradients = by_definition(x, params, config, mask)
    assert_close((value, y, gradients), (ref_value, ref_y, ref_gradients))
    assert_same_bits(chosen_of(routing.experts), chosen)
    assert_same_bits(routing.tokens_per_expert, chosen.sum(0).astype(np.int32))
    assert_close(routing.dropped_share, dropped)
    assert (routing.weights[routing.experts == EMPTY_SLOT] == 0).all()


def by_definition(x, params, config, mask):
    """`defined` and its gradients in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), (x, params))
        run = jax.jit(jax.value_and_grad(defined, (0, 1), has_aux=True), static_argnums=2)
        return jax.tree.map(np.asarray, run(*wide, config, mask))


@pytest.mark.parametrize(("name", "masked", "shift"), PAIRS)
@on("ampere", pytest.param("hopper", marks=needs_interpreter), *ON_GPUS)
@pytest.mark.default_cases("*_on_gpu-rms-some-0.0")
def test_kernels_for_gpus_compute_what_is_defined(kernels, name, masked, shift):
    """Their products are of 16 bits; no loss or choice has a part in that."""
    config = CONFIGS[name]
    # Each kernel of each further turn is another program, which the interpreter takes seconds to compile.
    config = replace(config, mean_experts=4 if name == "turns" else config.experts_per_token or EXPERTS)
    mask = {"some": MASK, "all": MASK & False, "none": MASK | True}[masked]
    given = random_tokens(TOKENS, width=24), parameters(config, shift, width=24)
    x, params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), given)
    run = replace(config, implementation="mosaic_gpu")
    (_, (y, routing)), gradients = out = step(x, params, run, {"mask": mask})
    (_, (ref_y, chosen, dropped, losses)), ref_gradients = by_definition(x, params, config, mask)
    assert_same_bits(chosen_of(routing.experts), chosen)
    assert_close((routing.dropped_share, routing.load_balancing_loss, routing.z_loss), (dropped, *losses), 1e-5)
    assert_close((y, gradients), (ref_y, ref_gradients), 2e-2)
    assert_same_bits(step(x, params, run, {"mask": mask}), out)


@pytest.mark.slow
@pytest.mark.parametrize("save", ["pre_activations", "inputs"])
@pytest.mark.ci_cases("pre_activations")
def test_memory_follows_the_pairs_and_not_the_slots(save):
    config = MoEConfig(
        num_experts=32, experts_per_token=None, expert_width=64, activation="relu", router=_BASE.router, save=save
    )
    params, x = random_parameters(config), random_tokens(1024)

    def temporary(config):
        memory: Any = step.lower(x, params, config, {}).compile().memory_analysis()
        return memory.temp_size_in_bytes

    all_slots, few = temporary(replace(config, mean_experts=32)), temporary(replace(config, mean_experts=2))
    row = 64 * 4
    assert all_slots - few > 2 * 1024 * 28 * row  # of the activation and its gradient, at least


@pytest.mark.compile_only
@pytest.mark.slow
def test_memory_is_that_of_as_many_pairs_of_a_fixed_number():
    """The largest BlockFFN on an H200: with results, at most 1.25 times that of K experts for each token."""
    layers: Any = {}

    def arguments():
        layers.update(router_layers(Sizes(24576, 1792, 128, 56, 11), jnp.bfloat16, "mosaic_gpu"))
        return {name: arguments for name, (_, arguments, _) in layers.items()}

    def plan(name: str) -> Any:
        return plan_of(compile_for_gpu(forward_and_backward(layers[name][0]), *given[name]).memory)

    given = jax.eval_shape(arguments)
    fixed, relu = plan("K experts"), plan("ReLU, rows for K")
    assert relu.peak <= 1.25 * fixed.peak
    assert relu.temporaries <= 1.32 * fixed.temporaries


def test_slots_are_by_id_without_a_number_and_best_first_with_one():
    logits = jnp.array([[-1.0, 3, 0, 2, 4, 5], [-1, -2, -3, -4, -5, -6]])
    routing = route(logits, None, scoring="relu")
    assert_same_bits(routing.experts, jnp.array([[-1, 1, -1, 3, 4, 5], [-1] * 6], jnp.int32))
    assert_same_bits(routing.weights, jnp.maximum(logits, 0))
    routing = route(logits, 3, scoring="relu")
    assert_same_bits(routing.experts, jnp.array([[5, 4, 1], [-1] * 3], jnp.int32))
    assert_close(routing.dropped_share, np.float32(0.25))
    routing = route(logits, None, scoring="relu", expert_capacity=1, mask=jnp.array([True, True]))
    assert_same_bits(routing.tokens_per_expert, jnp.array([0, 1, 0, 1, 1, 1], jnp.int32))
    assert_same_bits(route(logits, None, top_p=0.5).experts[:, 0], jnp.array([5, 0], jnp.int32))


def test_nan_spoils_its_own_token():
    logits = jnp.zeros((3, 6)).at[1, 2].set(jnp.nan).at[2].set(jnp.arange(6.0))
    routers: list[dict[str, Any]] = [{"scoring": "relu"}, {"scoring": "relu", "weight_norm": "rms"}, {"top_p": 0.5}]
    for options in routers:
        for slots in (None, 2):
            routing = route(logits, slots, **options)
            assert jnp.isnan(routing.weights[1]).any(), options
            assert not jnp.isnan(routing.weights[jnp.array([0, 2])]).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rms", "top_p of 2"])
def test_a_replayed_choice_gives_the_same_bits(name):
    # The balance is that of what tokens want, and what was dropped is not replayed.
    config = replace(CONFIGS[name], load_balancing_weight=0.0)
    x, params = random_tokens(TOKENS), parameters(config)
    first = step(x, params, config, {"mask": MASK})
    ids = first[0][1][1].experts
    again = step(x, params, config, {"mask": MASK, "expert_ids": ids})
    assert_close((again[0][0], again[0][1][0], again[1]), (first[0][0], first[0][1][0], first[1]))
    assert_same_bits(again[0][1][1].experts, ids)
    wrong = ids.at[0].set(jnp.arange(ids.shape[1]) + EXPERTS)
    (_, (y, _)), _ = step(x, params, config, {"mask": MASK, "expert_ids": wrong})
    assert_same_bits(jnp.isnan(y).any(1), jnp.arange(TOKENS) == 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["automatic", "explicit", "parallel", "fsdp"])
@pytest.mark.parametrize("name", ["rms", "top_p of 2"])
@pytest.mark.ci_cases("rms-parallel")
def test_over_a_mesh_as_on_one_device(name, kind):
    config, x = CONFIGS[name], random_tokens(30).reshape(6, 5, -1)
    params, given = parameters(config), {"mask": (jnp.arange(30) % 3 != 1).reshape(6, 5)}
    (ref_value, (ref_y, ref)), ref_gradients = step(x, params, config, given)
    types = (jax.sharding.AxisType.Explicit if kind == "explicit" else jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4 if kind == "automatic" else 2,), ("devices",), axis_types=types)
    roles: Any = {"parallel": {"expert": "devices"}, "fsdp": {"fsdp": "devices"}}.get(kind)
    options = {"parallel": Parallelism(mesh, **roles)} if roles else {}
    with jax.set_mesh(mesh):
        x = jax.device_put(x, jax.NamedSharding(mesh, P("devices"))) if kind == "explicit" else x
        run = jax.jit(lambda *a: jax.value_and_grad(loss, (0, 1), has_aux=True)(*a[:2], config, a[2], **options))
        (value, (y, routing)), gradients = run(x, params, given)
    assert_close(jax.tree.map(np.asarray, (value, y, gradients)), (ref_value, ref_y, ref_gradients))
    assert_same_bits(np.asarray(routing.experts), np.asarray(ref.experts))
    assert_same_bits(np.asarray(routing.demand), np.asarray(ref.demand))


@pytest.mark.slow
def test_functions_and_modules_agree_under_transformations():
    config, x, params = CONFIGS["rms"], random_tokens(2, TOKENS), parameters(CONFIGS["rms"])
    expected = [DOORS["function"](params, one, config) for one in x]
    for door in ("linen", "nnx"):
        assert_close(DOORS[door](params, x[0], config), expected[0])
    outputs = jnp.stack([y for y, _ in expected])
    assert_close(jax.vmap(lambda one: moe(one, params, config)[0])(x), outputs)
    scanned = jax.lax.scan(lambda _, one: (None, jax.checkpoint(lambda one: moe(one, params, config)[0])(one)), None, x)
    assert_close(scanned[1], outputs)
    assert jax.tree.map(jnp.shape, skipped(x[0], config)[1]._replace(weighted_losses={})) == jax.tree.map(
        jnp.shape, moe(x[0], params, config)[1]._replace(weighted_losses={})
    )


def test_gains_begin_as_ones():
    config = CONFIGS["rms"]
    made = init(jax.random.key(0), config, WIDTH)
    assert_same_bits(made["router_gain"], jnp.ones(EXPERTS))
    for module in ("linen", "nnx"):
        assert_same_bits(unboxed(created(module, config))["router_gain"], jnp.ones(EXPERTS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router": Router()}, "experts_per_token=None must be an integer, unless scoring='relu' or with top_p"),
        ({"bias_update_rate": 0.1}, "bias_update_rate=0.1 must be left out"),
        ({"selection_bias": True}, "selection_bias=True must be left out"),
        ({"mean_experts": 7}, "mean_experts=7 must be None, or above 0 and at most 6, the slots of a token"),
    ],
)
def test_a_layer_that_does_not_fit_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        replace(_BASE, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 1.5}, "top_p=1.5 must be None, or above 0 and at most 1 with scoring='softmax'"),
        ({"top_p": 0.5, "scoring": "sigmoid"}, "with scoring='softmax'"),
        ({"weight_norm": "rms"}, "weight_norm='rms' must be None, or 'rms' of scoring='relu'"),
        ({"scoring": "relu", "normalize_weights": True}, "normalize_weights=True must be"),
        ({"scoring": "relu", "capacity_factor": 1.5}, "capacity_factor=1.5 must be None where a token has no fixed"),
        ({"top_p": 0.5, "token_rounding": "up"}, "token_rounding='up' must be None where"),
        ({"top_p": 0.5, "num_groups": 2}, "num_groups=2 must be 1 where"),
    ],
)
def test_an_option_that_does_not_fit_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        Router(**options)


def test_gains_and_biases_that_do_not_fit_are_named():
    logits = jnp.zeros((4, 6))
    with pytest.raises(ValueError, match=r"gain has shape \(5,\), must be \(6,\)"):
        route(logits, None, scoring="relu", weight_norm="rms", gain=jnp.ones(5))
    with pytest.raises(ValueError, match="gain must be None, because"):
        route(logits, 2, gain=jnp.ones(6))
    with pytest.raises(ValueError, match="selection_bias must be None, because"):
        route(logits, None, scoring="relu", selection_bias=jnp.ones(6))
