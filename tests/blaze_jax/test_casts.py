"""Weights cast to 8 bits once: the same bits as with casts in each pass, through every door, and from float8."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from blaze_jax import (
    CastWeight,
    LoRA,
    MoEConfig,
    Parallelism,
    cast_experts,
    expert_ffn,
    moe,
    quantize_experts,
    with_casts,
)
from blaze_jax.experts import compute_experts
from blaze_jax.linen import MoE
from blaze_jax.precision import fp8_everywhere
from blaze_jax.quantized import decoded
from pallas_kernels import hopper
from pallas_kernels.compile_only import compile_for_gpu
from tests.expert_problems import Problem, make_problem, results
from tests.layers import nnx_module, random_parameters, random_tokens
from tests.numerics import assert_close, assert_same_bits, scaled_error
from tests.routings import random_experts

CONFIG = MoEConfig(num_experts=6, experts_per_token=2, expert_width=48, precision="fp8", load_balancing_weight=0.0)


@pytest.fixture(autouse=True)
def small_sizes():
    with fp8_everywhere():
        yield


def on_cast_weights(x, weights, experts, **options):
    """`expert_ffn` of weights that were cast before."""
    params = {n: options.pop(n) for n in ("w_gate", "w_up", "w_down") if options.get(n) is not None}
    options.pop("w_gate", None)
    of_layer = {n: options[n] for n in ("activation", "save", "precision", "implementation") if n in options}
    config = replace(CONFIG, num_experts=params["w_up"].shape[0], expert_width=params["w_up"].shape[2], **of_layer)
    return expert_ffn(x, **{"w_gate": None} | cast_experts(params, config), weights=weights, experts=experts, **options)


@pytest.mark.parametrize(
    ("options", "interpreted"),
    [
        ({}, False),
        ({"save": "int8"}, False),
        ({"activation": "gelu", "save": "inputs"}, False),
        pytest.param({}, True, marks=pytest.mark.slow),
        pytest.param({"activation": "gelu", "save": "int8"}, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.default_cases("options0-False")
@pytest.mark.ci_cases("options1-False", "options2-False")
def test_no_bit_changes(options, interpreted):
    activation = options.get("activation", "swiglu")
    experts = random_experts(40, 2, range(3))
    problem = make_problem(experts, 3, d=48, n=144, activation=activation, dtype="bfloat16")
    options = options | {"precision": "fp8", "implementation": "mosaic_gpu" if interpreted else "xla"}
    with hopper.interpreted():
        found, expected = (results(partial(f), problem, **options) for f in (on_cast_weights, expert_ffn))
    assert_same_bits(found, expected)
    assert found["w_up"].dtype == jnp.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"save": "int8"}, {"activation": "gelu", "save": "inputs"}])
def test_no_bit_changes_on_a_gpu(options):
    activation = options.get("activation", "swiglu")
    problem = make_problem(random_experts(2000, 2, range(6)), 6, d=512, n=320, activation=activation, dtype="bfloat16")
    found, expected = (results(partial(f), problem, precision="fp8", **options) for f in (on_cast_weights, expert_ffn))
    assert_same_bits(found, expected)


def total(y):
    return (y.astype(jnp.float32) ** 2).sum()


@pytest.mark.slow
def test_casts_of_a_stack_serve_all_microbatches_of_a_linen_layer():
    """Casts of two layers are made at once, and one layer's are used by two microbatches."""
    module = MoE(CONFIG, dtype=jnp.bfloat16)
    batches = random_tokens(2, 3, 8, dtype="bfloat16", width=32)
    layers = [random_parameters(replace(CONFIG, precision=None), width=32, dtype="bfloat16") for _ in range(2)]
    stack = jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)

    @jax.jit
    def cast_once(stack):
        casts = jax.tree.map(lambda array: array[1], cast_experts(stack, CONFIG))
        params = jax.tree.map(lambda array: array[1], stack)

        def gradients(sums, x):
            return jax.tree.map(jnp.add, sums, jax.grad(lambda p: of(with_casts(p, casts), x))(params)), None

        return jax.lax.scan(gradients, jax.tree.map(jnp.zeros_like, params), batches)[0]

    def of(params, x):
        return total(module.apply({"params": params}, x))

    params = layers[1]
    expected = jax.jit(lambda p: jax.tree.map(jnp.add, *(jax.grad(of)(p, x) for x in batches)))(params)
    assert_same_bits(cast_once(stack), expected)


def test_of_float32_masters_the_working_copy_is_what_has_gradients():
    masters = random_parameters(CONFIG, width=32)
    copy = jax.tree.map(lambda array: array.astype(jnp.bfloat16), masters)
    x = random_tokens(24, dtype="bfloat16", width=32)

    def loss(params, casts):
        return total(moe(x, with_casts(params, casts), CONFIG)[0])

    of_copy, of_masters = (cast_experts(p, CONFIG, jnp.bfloat16) for p in (copy, masters))
    gradients = jax.jit(jax.grad(loss))(copy, of_masters)
    assert_same_bits(gradients, jax.jit(jax.grad(loss))(copy, of_copy))
    assert_same_bits(gradients, jax.jit(jax.grad(loss))(copy, copy))
    assert {array.dtype for array in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
def test_an_nnx_layer_takes_them():
    params, x = random_parameters(CONFIG, width=32, dtype="bfloat16"), random_tokens(24, dtype="bfloat16", width=32)
    module = nnx_module(params, CONFIG)
    plain = module(x)
    for name, weight in cast_experts(params, CONFIG).items():
        getattr(module, name).set_value(weight)
    assert_same_bits(module(x), plain)
    assert isinstance(nnx.state(module)["w_up"].get_value(), CastWeight)


@pytest.mark.slow
def test_tokens_may_be_split_over_devices():
    params, x = random_parameters(CONFIG, width=32, dtype="bfloat16"), random_tokens(24, dtype="bfloat16", width=32)
    casts = cast_experts(params, CONFIG)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def gradients(params, parallel):
        return jax.value_and_grad(lambda p: total(moe(x, with_casts(p, casts), CONFIG, parallel=parallel)[0]))(params)

    run = jax.jit(gradients, static_argnums=1)
    assert_close(run(params, Parallelism(mesh, data="d")), run(params, None))


def test_where_8_bits_do_not_pay_the_layer_multiplies_the_weights_themselves():
    params, x = random_parameters(CONFIG, width=32, dtype="bfloat16"), random_tokens(24, dtype="bfloat16", width=32)
    cast = cast_experts(params, CONFIG)
    assert all(isinstance(cast[name], CastWeight) for name in ("w_gate", "w_up", "w_down"))
    with fp8_everywhere(False):
        with pytest.warns(UserWarning, match="is left out"):
            y = jax.jit(lambda p: moe(x, p, CONFIG)[0])(cast)
        assert cast_experts(params, CONFIG) == params
    assert_same_bits(y, jax.jit(lambda p: moe(x, p, replace(CONFIG, precision=None))[0])(params))


def frozen_problem(interpreted: bool):
    """Output and gradient of tokens of a float8 base, with an adapter of rank 16, as a function of the base."""
    experts, n = random_experts(40, 2, range(3)), 144
    problem = make_problem(experts, 3, d=256, n=n, biases=False, dtype="bfloat16")
    plain = {name: w for name, w in problem.params.items() if w is not None}
    scale = jnp.exp(jax.random.normal(jax.random.key(1), (3, 1, n)))  # blocks of columns differ in size
    plain["w_up"] = plain["w_up"] * scale.astype(jnp.bfloat16)
    a, b = jax.random.normal(jax.random.key(2), (3, 256, 16)), jax.random.normal(jax.random.key(3), (3, 16, n))
    adapter = {"w_up_lora_a": a.astype(jnp.bfloat16) / 16, "w_up_lora_b": b.astype(jnp.bfloat16) / 8}
    options = {"activation": "swiglu", "save": "pre_activations", "frozen": True}
    options["implementation"] = "mosaic_gpu" if interpreted else "xla"

    def run(base, precision="fp8"):
        def of(x, adapter):
            y = compute_experts(x, base | adapter, problem.weights, experts, precision=precision, **options)
            return total(y), y

        gradients, y = jax.grad(of, (0, 1), has_aux=True)(problem.x, adapter)
        return {"y": y, "x": gradients[0], **gradients[1]}

    return quantize_experts(plain, "float8"), jax.jit(run, static_argnums=1)


@pytest.mark.slow
def test_a_float8_base_is_cast_as_the_numbers_that_it_holds():
    base, run = frozen_problem(False)
    found, exact = run(base), run(decoded(base), None)
    errors = {name: scaled_error(found[name], exact[name]) for name in exact}
    assert 0.02 < errors["y"] < 0.08, errors
    assert max(errors.values()) < 0.12, errors
    adapter = LoRA(rank=16, targets=("up",))
    config = replace(CONFIG, num_experts=3, expert_width=144, implementation="xla", adapter=adapter)
    assert_same_bits(run(cast_experts(base, config, jnp.bfloat16)), found)


@pytest.mark.slow
def test_hoppers_kernels_cast_a_float8_base_to_the_same_numbers():
    base, run = frozen_problem(True)
    with hopper.interpreted():
        found = run(base)
    assert_close(found, frozen_problem(False)[1](base))


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda p: p | {"w_up": p["w_up"].weight}, {}, "some of the experts' weights are CastWeights, all must be or"),
        (dict, {"save": "int8"}, "were cast for another layer than one with activation 'swiglu', save='int8'"),
    ],
)
@pytest.mark.default_cases("*")
def test_casts_that_do_not_fit_are_refused(change, options, message):
    params, x = random_parameters(CONFIG, width=32, dtype="bfloat16"), random_tokens(24, dtype="bfloat16", width=32)
    with pytest.raises(ValueError, match=message):
        moe(x, change(cast_experts(params, CONFIG)), replace(CONFIG, **options))


def test_what_cannot_be_cast_is_refused():
    params, x = random_parameters(CONFIG, width=32, dtype="bfloat16"), random_tokens(24, dtype="bfloat16", width=32)
    with pytest.raises(ValueError, match="must be or have a layer's w_up and w_down, of 6 experts of width 48"):
        cast_experts({"w_router": params["w_router"]}, CONFIG)
    cast = cast_experts(params, CONFIG)
    with pytest.raises(ValueError, match=r"params\['w_gate'\] is cast already"):
        cast_experts(cast, CONFIG)
    mesh = jax.make_mesh((2,), ("e",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(ValueError, match="splits parameters, which a CastWeight among them cannot be"):
        moe(x, cast, CONFIG, parallel=Parallelism(mesh, expert="e"))
    assert cast_experts(params, replace(CONFIG, precision=None)) == params


@pytest.mark.compile_only
def test_a_program_with_casts_reads_no_weights_and_has_the_temporaries_of_16_bits():
    T, d, n, E, K = 32768, 4096, 1024, 128, 8
    array, tokens = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((T, d), jnp.bfloat16)
    shapes = {"w_gate": (E, d, n), "w_up": (E, d, n), "w_down": (E, n, d)}
    params = {name: array(shape, jnp.bfloat16) for name, shape in shapes.items()}
    problem = Problem(tokens, params, array((T, K), jnp.float32), array((T, K), jnp.int32), tokens)
    config = replace(CONFIG, num_experts=E, expert_width=n, implementation="mosaic_gpu")
    casts = jax.eval_shape(partial(cast_experts, config=config), problem.params)

    def run(problem, casts):
        cast = partial(
            lambda x, casts, **o: expert_ffn(x, **with_casts({n: o.pop(n) for n in casts}, casts), **o), casts=casts
        )
        return results(cast, problem, precision="fp8", implementation="mosaic_gpu")

    compiled = compile_for_gpu(run, problem, casts)
    names = {kernel.name for kernel in compiled.kernels}
    assert "moe_quantize_columns" not in names
    assert "moe_quantize" in names
    assert compiled.spill_bytes == {}
    kept = 2 * T * K * n * 2  # both pre-activations; beside them, with 16 bits, 23 MiB of numbers for each row
    assert compiled.memory.temp_size_in_bytes <= kept + 32 * 2**20
    base = jax.eval_shape(partial(quantize_experts, form="float8"), problem.params)
    made = compile_for_gpu(partial(cast_experts, config=config, dtype=jnp.bfloat16), base)
    assert made.spill_bytes == {}
    text = made.executable.as_text()
    assert text
    assert not [line for line in text.splitlines() if f"bf16[{E},{d},{n}]" in line or f"bf16[{E},{n},{d}]" in line]
