"""Compressed frozen weights: computed with as if they were decoded, by every door and family, and never trained."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import blaze_jax
from blaze_jax import (
    LoRA,
    MoE,
    MoEConfig,
    QuantizedWeight,
    join_adapters,
    merge,
    moe,
    quantize,
    quantize_experts,
    split_adapters,
)
from blaze_jax.benchmark.memory import plan_of
from blaze_jax.experts import compute_experts
from blaze_jax.implementation import demanded_family
from blaze_jax.quantized import WEIGHTS, decoded
from pallas_kernels import xla
from pallas_kernels.codings import is_quantized
from pallas_kernels.compile_only import compile_for_gpu
from pallas_kernels.contract import nothing_compressed
from tests.expert_problems import FAMILIES, each_on_gpus
from tests.layers import DOORS, losses_of_nnx_adapters
from tests.numerics import assert_close, assert_same_bits
from tests.pallas_kernels.rows import needs_interpreter

FORMS = ["float8", "mxfp4", "nf4"]
D, N, E = 192, 64, 3
PLAIN = MoEConfig(num_experts=E, experts_per_token=2, expert_width=N, shared_width=8, z_loss_weight=0.1)
ADAPTED = replace(PLAIN, adapter=LoRA(rank=8, alpha=4, targets=("gate", "up", "down", "router")))


def parameters(config=ADAPTED, dtype="float32"):
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.standard_normal(p.shape) / np.sqrt(p.shape[-2]), dtype)
        for name, p in config.parameters(D).items()
    }


def tokens(dtype="float32"):
    return jnp.asarray(np.random.default_rng(1).standard_normal((40, D)), dtype)


def loss(adapters, x, others, config, door="function"):
    y, losses = DOORS[door](join_adapters(adapters, others), x, config)
    return jnp.square(y.astype(jnp.float32)).sum() + sum(losses.values()), y


run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=(3, 4))


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("form", "save"), [(form, "inputs") for form in FORMS] + [("nf4", "pre_activations")])
@pytest.mark.ci_cases("nf4-inputs-function")
def test_a_layer_computes_as_with_decoded_weights(form, door, save):
    """To the bit: output, and gradients of adapters and tokens, of which nothing of the base has any."""
    config, x = replace(ADAPTED, save=save, implementation="xla"), tokens()
    adapters, others = split_adapters(parameters())
    compressed = quantize_experts({name: p for name, p in others.items() if p is not None}, form)
    assert {name for name, p in compressed.items() if is_quantized(p)} == set(WEIGHTS)
    out = run(adapters, x, others | compressed, config, door)
    plain = others | decoded(compressed, jnp.float32)
    assert_same_bits(out, run(adapters, x, plain, config, "function"))
    assert {name for name, p in out[1][0].items() if p is not None} == set(config.adapter_names)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow
def test_gradients_are_those_of_float64(form):
    """Of adapters and tokens, by the weights that the compressed ones stand for."""
    adapters, others = split_adapters(parameters())
    others = {name: p for name, p in others.items() if p is not None}
    compressed = quantize_experts(others, form)
    none = dict.fromkeys(adapters.keys() - others.keys())
    config = replace(ADAPTED, implementation="xla")
    out = run(adapters, tokens(), none | compressed, config, "function")
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: a.astype("float64"), (adapters, tokens(), decoded(compressed, jnp.float32)))
        ref = run(*wide[:2], none | wide[2], config, "function")
    assert_close(out, ref, 1e-5)


@pytest.mark.parametrize(
    ("kernels", "form"),
    [
        ("xla", "float8"),
        ("xla_batched", "mxfp4"),
        ("ampere", "nf4"),
        pytest.param("hopper", "mxfp4", marks=needs_interpreter),
        *each_on_gpus(*((form,) for form in FORMS)),
    ],
    indirect=["kernels"],
)
@pytest.mark.default_cases("*_on_gpu-*")
def test_every_family_of_kernels_takes_them(kernels, form):
    """In bfloat16, as near to float32 as with weights that were decoded before."""
    rng, rank = np.random.default_rng(3), 8
    x = jnp.asarray(rng.standard_normal((37, D)), jnp.bfloat16)
    shapes = {"w_gate": (D, N), "w_up": (D, N), "w_down": (N, D)}
    weights = {n: rng.standard_normal((E, *shape)) / np.sqrt(shape[0]) for n, shape in shapes.items()}
    base = quantize_experts({name: jnp.asarray(w, jnp.float32) for name, w in weights.items()}, form)
    ranks = {
        name + end: jnp.asarray(rng.standard_normal((E, *shape)) / np.sqrt(shape[0]), jnp.float32)
        for name, (inputs, outputs) in shapes.items()
        for end, shape in (("_lora_a", (inputs, rank)), ("_lora_b", (rank, outputs)))
    }
    experts = jnp.asarray(rng.integers(0, E, (37, 2)), jnp.int32)
    of_slots = jnp.asarray(rng.uniform(0.1, 1, (37, 2)), jnp.float32)
    implementation = kernels.function.keywords["implementation"]
    options = {"activation": "swiglu", "save": "inputs", "implementation": implementation, "frozen": True}

    @jax.jit
    def of(ranks, x, base):
        def loss(ranks, x):
            y = compute_experts(x, base | ranks, of_slots, experts, **options).astype(jnp.float32)
            return jnp.sin(y).sum(), y

        return jax.grad(loss, (0, 1), has_aux=True)(ranks, x)

    assert_same_bits(of(ranks, x, base), of(ranks, x, decoded(base)))
    if kernels is not FAMILIES["xla"]:
        options["implementation"] = "xla"
        assert_close(of(ranks, x, base), jax.jit(of.__wrapped__)(ranks, x.astype("float32"), decoded(base)), 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.ci_cases("nf4-True", "nf4-False")
def test_of_few_tokens_the_experts_are_decoded_that_they_use(form, by_kernels, monkeypatch):
    """By kernels that take compressed weights, or before; ids out of range still make NaN, and empty slots nothing."""
    if not by_kernels:
        monkeypatch.setattr(xla, "decodes", nothing_compressed)
    E = 40 if by_kernels else 41  # or what was traced once would serve
    config = replace(ADAPTED, num_experts=E)
    params, x = parameters(config), tokens()[:3]
    adapters, others = split_adapters(params | quantize_experts(params, form))
    plain = others | decoded({name: p for name, p in others.items() if p is not None}, jnp.float32)
    assert_close(*(run(adapters, x, base, config, "function") for base in (others, plain)), 1e-6)

    experts = jnp.array([[39, 0], [0, -1], [7, E]], jnp.int32)
    options = {"activation": "swiglu", "save": "inputs", "implementation": "xla", "frozen": True}

    @jax.jit
    def of(weights, experts):
        return compute_experts(x, {name: weights[name] for name in WEIGHTS}, jnp.ones((3, 2)), experts, **options)

    y = of(others, experts)
    assert_close(y[:2], of(plain, experts)[:2], 1e-6)
    assert np.isnan(y[2]).all()
    text = str(jax.make_jaxpr(of)(others, experts))
    assert (f"32[6,{D},{N}]" in text) != by_kernels
    assert f"[{E},{D},{N}]" not in text.replace(f"f8_e4m3fn[{E},{D},{N}]", "")


@pytest.mark.parametrize("form", FORMS)
def test_the_portable_form_decodes_no_layer(form):
    """Neither forward nor for the gradient of tokens: a batch of experts at a time."""
    config = replace(ADAPTED, num_experts=40)
    _, others = split_adapters(quantize_experts(parameters(config), form))
    experts = jnp.arange(80).reshape(40, 2) % 40
    options = {"activation": "swiglu", "save": "pre_activations", "implementation": "xla", "frozen": True}

    def loss(x, weights):
        return compute_experts(x, weights, jnp.ones((40, 2)), experts, **options).sum()

    weights = {name: others[name] for name in WEIGHTS}
    text = str(jax.make_jaxpr(jax.grad(loss))(jnp.ones((40, D)), weights))
    assert not re.search(rf"(f32|bf16)\[40,({D},{N}|{N},{D})\]", text)
    plain = jax.make_jaxpr(jax.grad(loss))(jnp.ones((40, D)), decoded(weights, jnp.float32))
    assert re.search(rf"f32\[40,{D},{N}\]", str(plain))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_merged_parameters_are_decoded(form):
    params = quantize_experts(parameters(dtype="bfloat16"), form)
    merged = merge(params, ADAPTED)
    assert merged["w_up"].dtype == jnp.bfloat16
    assert not any(map(is_quantized, merged.values()))
    assert_close(moe(tokens(), merged, PLAIN)[0], moe(tokens(), params, ADAPTED)[0], 2e-2)
    router = replace(PLAIN, adapter=LoRA(rank=8, targets=("router",)))
    of_router = {name: p for name, p in params.items() if name in router.parameters(D)}
    assert_same_bits(merge(of_router, router)["w_down"], params["w_down"].astype(jnp.bfloat16))


@pytest.mark.slow
def test_nnx_trains_adapters_beside_a_compressed_base():
    config, x = replace(ADAPTED, save="inputs"), tokens("bfloat16")
    model = blaze_jax.nnx.MoE(D, config, dtype=jnp.bfloat16, train=False, rngs=nnx.Rngs(0))
    base = {name: quantize(getattr(model, name)[...], "nf4") for name in WEIGHTS}
    for name, weight in base.items():
        getattr(model, name).set_value(weight)
    values = losses_of_nnx_adapters(model, x)
    assert values[-1] < 0.9 * values[0]
    assert_same_bits({name: getattr(model, name).get_value() for name in WEIGHTS}, base)


@pytest.mark.compile_only
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("family", "dtype"), [("hopper", "bfloat16"), ("ampere", "bfloat16"), ("ampere", "float16")])
@pytest.mark.default_cases("ampere-bfloat16-mxfp4", "ampere-float16-nf4")
def test_one_layer_at_a_time_is_decoded_on_an_h200(family, dtype, form):
    """Temporaries, with up to two matrices among them where kernels decode nothing, hardly grow with layers."""
    sizes = {"num_experts": 16, "experts_per_token": 4, "expert_width": 512}
    config = MoEConfig(**sizes, adapter=LoRA(rank=8), save="inputs", implementation="mosaic_gpu")
    width, rows = 1024, 512

    def temporaries(layers: int) -> int:
        like = {
            name: jax.ShapeDtypeStruct((layers, *p.shape), "float32" if "lora" in name else "bfloat16")
            for name, p in config.parameters(width).items()
        }
        like = jax.eval_shape(lambda params: quantize_experts(params, form), like)
        adapters, others = split_adapters(like)

        def loss(adapters, others, x):
            layer = jax.checkpoint(lambda x, params: (x + moe(x, params, config)[0], None))
            return jax.lax.scan(layer, x, join_adapters(adapters, others))[0].astype(jnp.float32).sum()

        x = jax.ShapeDtypeStruct((rows, width), dtype)
        with demanded_family(family):
            return plan_of(compile_for_gpu(jax.grad(loss), adapters, others, x).memory).temporaries

    two, four = temporaries(2), temporaries(4)
    matrix = 2 * 16 * 512 * 1024
    most = {"bfloat16": (3, 2.6), "float16": (5, 3.5)}[dtype][form != "float8"]  # decoded for dx, both whole
    assert two < most * matrix
    assert four - two < matrix // 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: (p, PLAIN),
            "params['w_gate'] is a QuantizedWeight (nf4), which cannot be trained: give the layer adapters",
        ),
        (
            lambda p: (p | {"shared_w_up": quantize(parameters()["shared_w_up"], "nf4")}, ADAPTED),
            "params['shared_w_up'] is a QuantizedWeight, must be an array: w_gate, w_up, w_down may be one",
        ),
        (
            lambda p: (p | {"w_up": replace(p["w_up"], scales=p["w_up"].scales[:, :1])}, ADAPTED),
            "params['w_up'] (nf4) has values and scales uint8(3, 96, 64) and bfloat16(3, 1, 64), must have "
            "uint8(3, 96, 64) and bfloat16(3, 3, 64)",
        ),
        (
            lambda p: (p | {"w_up": replace(p["w_up"], form="nf3")}, ADAPTED),
            "form='nf3' must be one of float8, mxfp4, nf4",
        ),
        (
            lambda p: (p | {"w_up": quantize(jnp.ones((E, D, 2 * N)), "mxfp4")}, ADAPTED),
            "params['w_up'] has shape (3, 192, 128), must be (3, 192, 64)",
        ),
        (lambda p: quantize(jnp.ones((E, 65, 2)), "nf4"), "weights of shape (3, 65, 2) must have inputs"),
        (lambda p: quantize(jnp.ones((64, 2)), "int4"), "form='int4' must be one of float8, mxfp4, nf4"),
    ],
)
@pytest.mark.default_cases("*")
def test_misuse_is_named(change, message):
    base = quantize_experts(parameters(), "nf4")
    if "trained" in message:
        base = {name: p for name, p in base.items() if "lora" not in name}

    def compute():
        params, config = change(base)
        moe(tokens(), params, config)

    with pytest.raises(ValueError, match=re.escape(message)):
        compute()


@pytest.mark.slow
@pytest.mark.parametrize("through", ["linen", "function"])
def test_a_base_that_is_asked_to_train_is_named(through):
    params = quantize_experts(parameters(), "float8")

    def loss(params):
        if through == "function":
            return moe(tokens(), params, ADAPTED)[0].sum()
        return MoE(ADAPTED, train=False).apply({"params": params}, tokens()).sum()

    message = "params['w_gate'] is a QuantizedWeight (float8), which is frozen and has no gradient"
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.grad(jax.checkpoint(loss))(params)
    adapters, others = split_adapters(params)
    gradient = jax.jit(jax.grad(lambda own: loss(join_adapters(own, others))))(adapters)
    assert {name for name, d in gradient.items() if d is not None} == set(ADAPTED.adapter_names)


def test_a_quantized_weight_is_a_tree_of_its_arrays():
    weight = quantize(parameters()["w_down"], "mxfp4")
    assert (weight.shape, weight.ndim, weight.dtype) == ((E, N, D), 3, jnp.bfloat16)
    assert [leaf.dtype for leaf in jax.tree.leaves(weight)] == ["uint8", "uint8"]
    assert isinstance(jax.tree.map(jnp.stack, [weight] * 1)[0], QuantizedWeight)
