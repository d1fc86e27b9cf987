"""Adapters of low rank: against their definition, in every family and form, over devices, and what they cost."""

import re
from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import P

import blaze_jax
from blaze_jax import (
    LoRA,
    MoE,
    MoEConfig,
    Router,
    adapter_mask,
    init_adapters,
    join_adapters,
    merge,
    moe,
    quantize_experts,
    split_adapters,
)
from blaze_jax.adapters import added, with_dropout
from blaze_jax.experts import compute_experts
from blaze_jax.oracle import dense_expert_ffn
from blaze_jax.plan import TokenRanges
from pallas_kernels.compile_only import compile_for_gpu
from tests.expert_problems import apply, each_on_gpus, make_problem
from tests.layers import (
    WIDTH,
    created,
    gradients_through,
    layer,
    losses_of_nnx_adapters,
    random_parameters,
    random_tokens,
    unboxed,
)
from tests.numerics import assert_close, assert_same_bits
from tests.over_devices import Way, assert_as_one_device
from tests.pallas_kernels.rows import needs_interpreter
from tests.routings import random_experts

BASE = MoEConfig(num_experts=6, experts_per_token=2, expert_width=8, shared_width=8, z_loss_weight=0.1)
CONFIGS = {
    "rank16": replace(BASE, adapter=LoRA(rank=16, alpha=8, targets=("gate", "up", "down", "router"))),
    "rank4_inputs": replace(BASE, adapter=LoRA(rank=4, alpha=2), save="inputs"),
    "shared": replace(BASE, adapter=LoRA(rank=8, alpha=4, shared=True)),
    "up": replace(BASE, adapter=LoRA(rank=8, alpha=4, targets=["up"])),
    "down_router": replace(BASE, adapter=LoRA(rank=8, alpha=4, targets=("down", "router"))),
    "router": replace(BASE, adapter=LoRA(rank=8, alpha=4, targets=("router",))),
    "ungated_latent": replace(BASE, activation="relu2", latent_width=4, adapter=LoRA(rank=128, alpha=64)),
    "dense": replace(BASE, router=Router(train="dense", threshold=0.5), adapter=LoRA(rank=8, alpha=4)),
}


def loss_of(adapters, x, others, config, train=True):
    return _loss(x, join_adapters(adapters, others), config, train)


def _loss(x, params, config, train=True):
    y, routing = moe(x, params, config, train=train)
    return jnp.sin(y).sum() + sum(routing.weighted_losses.values()), (y, routing.experts)


def definition(adapters, x, others, config):
    """The layer without adapters, whose weights are sums."""
    params = join_adapters(adapters, others)
    if config.adapter.shared:
        shared = [name for name in params if name.endswith("_lora_a") and "router" not in name]
        params |= {name: jnp.broadcast_to(params[name], (config.num_experts, *params[name].shape)) for name in shared}
    return _loss(x, added(params, config.adapter), replace(config, adapter=None))


step = jax.jit(jax.value_and_grad(loss_of, (0, 1), has_aux=True), static_argnums=(3, 4))
reference = jax.jit(jax.value_and_grad(definition, (0, 1), has_aux=True), static_argnums=3)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.default_cases("rank16")
def test_output_and_gradients_are_those_of_summed_weights(config):
    with jax.enable_x64(True):
        params = random_parameters(config, use_bias=True, dtype="float64")
        x = random_tokens(30, dtype="float64")
        adapters, others = split_adapters(params)
        ref = reference(adapters, x, others, config)
        assert_close(step(adapters, x, others, config), ref, 1e-11)
        out = step(*jax.tree.map(lambda a: a.astype("float32"), (adapters, x, others)), config)
    assert_close(out[1], ref[1], 1e-5)


@pytest.mark.parametrize(
    ("kernels", "rank", "dtype"),
    [
        ("ampere", 8, "bfloat16"),
        ("ampere", 16, "float32"),
        ("xla", 128, "bfloat16"),
        ("xla_batched", 16, "float32"),
        pytest.param("hopper", 128, "bfloat16", marks=needs_interpreter),
        *each_on_gpus((8, "bfloat16"), (16, "float32"), (128, "bfloat16")),
    ],
    indirect=["kernels"],
)
@pytest.mark.default_cases("*_on_gpu-*-bfloat16")
@pytest.mark.ci_cases("ampere-8-*", "xla-*")
def test_every_family_of_kernels_computes_them(kernels, rank, dtype):
    """Beside weights of its own dtype, adapters in float32. Rows of the experts are ragged, and one has none."""
    num_experts, sizes = 5, {"d": 24, "n": 40, "biases": True} | kernels.suits
    d, n = sizes["d"], sizes["n"]
    implementation = kernels.function.keywords["implementation"]
    problem = make_problem(random_experts(37, 2, range(4)), num_experts, **{**sizes, "dtype": dtype})
    rng = np.random.default_rng(3)
    widths = {"w_gate": (d, n), "w_up": (d, n), "w_down": (n, d)}
    adapters = {}
    for name, (inputs, outputs) in widths.items():
        for end, shape in (("_lora_a", (inputs, rank)), ("_lora_b", (rank, outputs))):
            values = rng.standard_normal((num_experts, *shape)) / np.sqrt(shape[0])
            adapters[name + end] = jnp.asarray(values, "float32")
    options = {"activation": "swiglu", "save": "pre_activations", "implementation": implementation, "frozen": True}

    @jax.jit
    def out(adapters, x, weights):
        return compute_experts(x, problem.params | adapters, weights, problem.experts, **options)

    def definition(adapters, x, weights):
        params = added(problem.cast(jnp.float32).params | adapters, LoRA(rank=rank, alpha=rank))
        return apply(dense_expert_ffn, x, params, weights, problem.experts, activation="swiglu")

    def both(function, problem):
        with jax.default_matmul_precision("highest"):
            y, vjp = jax.vjp(function, adapters, problem.x, problem.weights)
            return y, vjp(problem.dy)

    assert_close(both(out, problem), both(definition, problem.cast(jnp.float32)), kernels.tolerance[dtype])


TOGETHER = {"fsdp": 2, "expert": 2, "tensor": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "config"),
    [
        (Way({"data": 4}, "auto", None, P("data"), P()), "rank16"),
        (Way({"data": 4}, "explicit", None, P("data"), P()), "shared"),
        (Way(TOGETHER, "auto", {"row_budget": 0.5}), "rank16"),
        (Way({"fsdp": 4}, "auto", {}), "router"),
        (Way({"fsdp": 2, "expert": 2}, "explicit", {"keep_gathered": True}), "ungated_latent"),
        (Way({"expert": 2, "tensor": 2}, "shard_map", {"exchange": "permute", "chunks": 2}), "rank4_inputs"),
        (Way(TOGETHER, "check_vma", {}), "shared"),
        (Way({"fsdp": 2, "expert": 2}, "auto", {}), "dense"),
    ],
)
@pytest.mark.ci_cases("way6-*")
def test_over_devices_as_on_one(way, config):
    """Experts are split with their adapters; the gradients of frozen parameters are zeros on both sides."""
    assert_as_one_device(way, replace(CONFIGS[config], num_experts=4 if way.axes == {"fsdp": 4} else 6), 40)


@pytest.mark.slow
@pytest.mark.usefixtures("traced_anew")
def test_turns_and_ranges_of_tokens_add_up_gradients_of_adapters(monkeypatch):
    config, x = replace(CONFIGS["rank16"], save="inputs"), random_tokens(200)
    adapters, others = split_adapters(random_parameters(config, use_bias=True))

    def run(config):
        grad = jax.value_and_grad(partial(loss_of, config=config), (0, 1), has_aux=True)
        text = str(jax.make_jaxpr(grad)(adapters, x, others))
        return jax.jit(grad)(adapters, x, others)[1], text.count("while[") + text.count("scan[")

    expected, loops = run(config)
    in_turns, with_turns = run(replace(config, mean_experts=1.2))
    monkeypatch.setattr("blaze_jax.experts.token_ranges", lambda *_: TokenRanges(200, 70))
    in_ranges, with_ranges = run(config)
    assert with_turns > loops
    assert with_ranges > loops
    for gradients in (in_turns, in_ranges):
        assert_close(gradients, expected, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("door", ["linen", "nnx"])
def test_every_form_has_the_same_numbers(door):
    config, x = CONFIGS["rank16"], random_tokens(30)
    params = random_parameters(config)
    out, ref = (gradients_through(name, params, x, config) for name in (door, "function"))
    assert_same_bits(out, ref)
    new = unboxed(created(door, replace(config, adapter=LoRA(rank=4)), param_dtype="bfloat16"))
    assert {name: (a.shape, a.dtype.name) for name, a in new.items() if "lora" in name or name == "w_up"} == {
        "w_up": ((6, WIDTH, 8), "bfloat16"),
        **{f"w_{name}_lora_a": ((6, WIDTH, 4), "float32") for name in ("gate", "up")},
        **{f"w_{name}_lora_b": ((6, 4, 8), "float32") for name in ("gate", "up")},
        "w_down_lora_a": ((6, 8, 4), "float32"),
        "w_down_lora_b": ((6, 4, WIDTH), "float32"),
    }
    assert not np.any(new["w_up_lora_b"])
    assert 0.2 < np.abs(new["w_up_lora_a"]).max() <= WIDTH**-0.5  # as a linear layer of PyTorch begins


@pytest.mark.slow
def test_linen_trains_adapters_alone():
    """With an optimizer's state for them only, or for all parameters and a mask."""
    config, x = replace(BASE, adapter=LoRA(rank=4, shared=True, targets=("up", "down", "router"))), random_tokens(30)
    module = MoE(config, train=False)
    params = nn.unbox(module.init(jax.random.key(0), x)["params"])
    adapters, others = split_adapters({"layer": params})
    optimizer = optax.adam(1e-2)
    state = optimizer.init(adapters)
    assert sum(a.size for a in jax.tree.leaves(state)) == 1 + 2 * sum(a.size for a in jax.tree.leaves(adapters))

    def loss(params):
        return jnp.square(module.apply({"params": params["layer"]}, x) - 1).mean()

    @jax.jit
    def step(adapters, state):
        value, gradients = jax.value_and_grad(lambda own: loss(join_adapters(own, others)))(adapters)
        updates, state = optimizer.update(gradients, state, adapters)
        return optax.apply_updates(adapters, updates), state, value

    values = []
    for _ in range(8):
        adapters, state, value = step(adapters, state)
        values.append(value)
    assert values[-1] < 0.9 * values[0]

    masked = optax.partition({True: optax.adam(1e-2), False: optax.set_to_zero()}, adapter_mask)
    everything = {"layer": params}
    state = masked.init(everything)
    for _ in range(2):
        updates, state = masked.update(jax.grad(loss)(everything), state, everything)
        everything = optax.apply_updates(everything, updates)
    changed = {name for name, a in everything["layer"].items() if np.any(a != params[name])}
    assert changed == set(config.adapter_names)


@pytest.mark.slow
def test_nnx_trains_adapters_alone():
    config, x = replace(BASE, adapter=LoRA(rank=4)), random_tokens(30)
    model = blaze_jax.nnx.MoE(WIDTH, config, train=False, rngs=nnx.Rngs(0))
    before = {name: np.asarray(getattr(model, name)[...]) for name in model.parameter_names}
    values = losses_of_nnx_adapters(model, x)
    assert values[-1] < 0.9 * values[0]
    changed = {name for name, value in before.items() if np.any(value != getattr(model, name)[...])}
    assert changed == set(config.adapter_names)


@pytest.mark.compile_only
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
def test_frozen_weights_have_no_gradients_on_an_h200(implementation):
    """Arrays of their shapes are arguments alone, and no array has a row of the model's width for each pair."""
    num_experts, d, n, tokens = 16, 256, 128, 512
    adapter = LoRA(rank=8, targets=("gate", "up", "down", "router"))
    sizes = {"num_experts": num_experts, "experts_per_token": 4, "expert_width": n}
    config = MoEConfig(**sizes, adapter=adapter, implementation=implementation)
    params = {
        name: jax.ShapeDtypeStruct(p.shape, "float32" if "lora" in name else "bfloat16")
        for name, p in config.parameters(d).items()
    }
    adapters, others = split_adapters(params)
    x = jax.ShapeDtypeStruct((tokens, d), jnp.bfloat16)
    compiled = compile_for_gpu(jax.grad(partial(loss_of, config=config), (0, 1), has_aux=True), adapters, x, others)
    shapes = {tuple(p.shape) for name, p in others.items() if p is not None and len(p.shape) == 3}
    seen = set()
    for line in compiled.executable.as_text().splitlines():
        if found := re.search(r"= (?:\()?\w+\[([\d,]+)\]\S* (\S+?)\(", line):
            shape, operation = tuple(map(int, found[1].split(","))), found[2]
            seen.add(shape)
            assert shape not in shapes or operation in ("parameter", "get-tuple-element"), line
            assert len(shape) != 2 or shape[0] < 4 * tokens or shape[1] < d, line
    assert shapes <= seen
    assert not compiled.spill_bytes


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIGS["shared"], CONFIGS["rank16"]], ids=["shared", "rank16"])
@pytest.mark.ci_cases("*")
def test_merged_parameters_are_those_of_a_layer_without_adapters(config):
    plain, x = replace(config, adapter=None), random_tokens(30)
    params = random_parameters(config, use_bias=True)
    merged = merge(params, config)
    assert {name: p.shape for name, p in merged.items()} == {
        name: p.shape for name, p in plain.parameters(WIDTH, use_bias=True).items()
    }
    assert_close(layer(x, merged, plain)[0], layer(x, params, config)[0])
    base = {name: a for name, a in params.items() if "lora" not in name}
    gradient = jax.grad(lambda params: layer(x, params, config)[0].sum())(params)
    assert {name for name, d in gradient.items() if np.any(d)} == set(config.adapter_names)
    assert_close(layer(x, base | init_adapters(jax.random.key(0), config, WIDTH), config)[0], layer(x, base, plain)[0])


@pytest.mark.slow
def test_dropout_leaves_out_inputs_of_adapters_in_training():
    config, x = replace(BASE, adapter=LoRA(rank=4, dropout=0.25)), random_tokens(30)
    params, whole = random_parameters(config), replace(config, adapter=LoRA(rank=4))
    run = jax.jit(moe, static_argnames=("config", "train"))
    key = jax.random.key(3)
    y = run(x, params, config=config, train=True, key=key)[0]
    assert_same_bits(run(x, params, config=config)[0], run(x, params, config=whole)[0])
    assert_same_bits(run(x, params, config=config, train=True, key=key)[0], y)
    a = with_dropout(params, config.adapter, jax.random.fold_in(key, 1))
    assert_close(run(x, a, config=whole)[0], y)
    left_out = np.all(np.asarray(a["w_up_lora_a"]) == 0, axis=-1)
    assert 0.1 < left_out.mean() < 0.4
    stays = a["w_up_lora_a"][~left_out]
    assert_close(stays, params["w_up_lora_a"][~left_out] / 0.75)
    with pytest.raises(ValueError, match=r"key=None must be a key of jax.random, because .* has dropout in training"):
        moe(x, params, config, train=True)
    variables, module = {"params": params}, MoE(config, train=True)
    assert np.any(module.apply(variables, x, rngs={"dropout": key}, mutable=["losses"])[0] != y)


@pytest.mark.parametrize("form", [None, "nf4"])
@pytest.mark.ci_cases("nf4")
def test_a_layer_without_targets_is_frozen_and_computes_as_it_did(form):
    plain = MoEConfig(num_experts=4, experts_per_token=2, expert_width=64)
    config, x = replace(plain, adapter=LoRA(targets=())), random_tokens(20, width=64)
    assert init_adapters(jax.random.key(0), config, 64) == {}
    base = random_parameters(plain, width=64)
    params = base if form is None else quantize_experts(base, form)
    decoded = merge(params, config)

    def loss(x, params, config):
        return jnp.sin(moe(x, params, config)[0]).sum()

    ours, theirs = (jax.value_and_grad(loss)(x, *of) for of in ((params, config), (decoded, plain)))
    assert_close(ours, theirs, 1e-6 if form is None else 1e-2)
    if form is None:
        assert not any(np.any(g) for g in jax.grad(loss, argnums=1)(x, params, config).values())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LoRA(rank=0), "rank=0 must be at least 1"),
        (lambda: LoRA(rank=1.5), "rank=1.5 must be an integer"),
        (lambda: LoRA(alpha=0), "alpha=0 must be above 0 and finite"),
        (lambda: LoRA(dropout=1), "dropout=1 must be from 0 to below 1"),
        (lambda: LoRA(shared=1), "shared=1 must be True or False"),
        (lambda: LoRA(dtype=int), "must be a floating dtype"),
        (
            lambda: LoRA(targets=("q",)),
            "targets=('q',) must be None, or a tuple of different ones of gate, up, down, r",
        ),
        (lambda: LoRA(targets="up"), "targets='up' must be None, or a tuple of"),
        (lambda: LoRA(targets=("up", "up")), "targets=('up', 'up') must be None, or a tuple of different ones"),
        (lambda: LoRA(targets=4), "targets=4 must be None, or a tuple of"),
        (lambda: replace(BASE, adapter=16), "adapter=16 must be a LoRA or None"),
        (
            lambda: replace(BASE, activation="gelu", adapter=LoRA(targets=("gate",))),
            "targets=('gate',) has 'gate', which an ungated activation does not have",
        ),
        (lambda: merge({}, BASE), "config.adapter=None has nothing to merge"),
        (lambda: merge({}, CONFIGS["up"]), "params lacks w_up_lora_a, which LoRA(rank=8"),
        (lambda: split_adapters({"w_up": jnp.zeros(1)}), "params has no adapters, and nothing would be trained"),
        (
            lambda: moe(random_tokens(4), random_parameters(BASE), CONFIGS["up"]),
            "params lacks w_up_lora_a, w_up_lora_b",
        ),
        (lambda: moe(random_tokens(4), random_parameters(CONFIGS["up"]), BASE), "params has w_up_lora_a, w_up_lora_b"),
        (
            lambda: moe(random_tokens(4), random_parameters(CONFIGS["rank4_inputs"]), CONFIGS["up"]),
            "params has w_down_lora_a",
        ),
    ],
)
@pytest.mark.default_cases("*")
def test_misuse_is_named(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
