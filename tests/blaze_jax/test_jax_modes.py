"""The layer under what users switch on in jax: promotion rules, 64-bit types, matmul precisions, export."""

import dataclasses
import re
from contextlib import nullcontext
from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.experimental import checkify

from blaze_jax import init, moe
from tests import layers
from tests.layers import CONFIGS, WIDTH, gradients_through, layer, random_parameters, random_tokens, route
from tests.numerics import TOLERANCE, assert_close, assert_same_bits

PROMOTIONS = {
    "rank_promotion=raise": partial(jax.numpy_rank_promotion, "raise"),
    "dtype_promotion=strict": partial(jax.numpy_dtype_promotion, "strict"),
}
PRECISIONS = {
    f"matmul_precision={precision}": partial(jax.default_matmul_precision, precision)
    for precision in ("bfloat16", "tensorfloat32", "float32", "highest", "default")
}
WIDE = ("matmul_precision=tensorfloat32", "matmul_precision=highest")  # the others ask for what is done anyway
MODES = {None: nullcontext, **PROMOTIONS, **PRECISIONS, "enable_x64": partial(jax.enable_x64, True)}
DTYPES = (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"))


def arguments(config, dtype, param_dtype):
    return random_parameters(CONFIGS[config], use_bias=True, dtype=param_dtype), random_tokens(13, dtype=dtype)


@cache
def program(layer, config, dtype, param_dtype, mode):
    """Forward and backward, traced, and as they are handed to the compiler."""
    with MODES[mode]():
        traced = gradients_through.trace(layer, *arguments(config, dtype, param_dtype), CONFIGS[config])
        return traced, traced.lower().as_text()


@cache
def numbers(layer, config, dtype, param_dtype, mode):
    with MODES[mode]():
        traced, _ = program(layer, config, dtype, param_dtype, mode)
        return traced.lower().compile()(*arguments(config, dtype, param_dtype))


UNCHANGED = [
    *(
        (*case, mode)
        for mode in PROMOTIONS
        for case in [
            *(("function", "everything", *dtypes) for dtypes in DTYPES),
            *((layer, "everything", "bfloat16", "float32") for layer in ("linen", "nnx")),
            *(("function", config, "bfloat16", "float32") for config in ("plain", "rounded", "limited")),
        ]
    ),
    # on CPUs, which have one precision
    *(("function", "plain", "float32", "float32", mode) for mode in PRECISIONS),
    *(("function", "plain", "bfloat16", "float32", mode) for mode in WIDE),
    *((layer, "plain", "float32", "float32", "matmul_precision=highest") for layer in ("linen", "nnx")),
    # narrow types, where wide ones are enabled
    ("function", "everything", "bfloat16", "float32", "enable_x64"),
    ("function", "rounded", "float32", "float32", "enable_x64"),
    *((layer, "plain", "float32", "float32", "enable_x64") for layer in ("linen", "nnx")),
]


@pytest.mark.parametrize(("layer", "config", "dtype", "param_dtype", "mode"), UNCHANGED)
@pytest.mark.default_cases("*-everything-float32-float32-rank_*")
@pytest.mark.ci_cases("*-everything-bfloat16-float32-enable_x64")
def test_a_mode_changes_nothing(layer, config, dtype, param_dtype, mode):
    """The same program, or at least the same bits."""
    case = (layer, config, dtype, param_dtype)
    if program(*case, mode)[1] != program(*case, None)[1]:
        assert_same_bits(numbers(*case, mode), numbers(*case, None))


@pytest.mark.parametrize(
    ("layer", "config", "param_dtype"),
    [
        *(("function", "everything", param_dtype) for param_dtype in ("float32", "float64")),
        ("linen", "plain", "float32"),
        ("nnx", "plain", "float32"),
    ],
)
@pytest.mark.slow
def test_float64_tokens(layer, config, param_dtype):
    (_, (y, _)), (d_params, dx) = out = numbers(layer, config, "float64", param_dtype, "enable_x64")
    assert (y.dtype, dx.dtype) == ("float64", "float64")
    assert {gradient.dtype for gradient in d_params.values()} == {jnp.dtype(param_dtype)}
    assert_close(out, numbers(layer, config, "float32", "float32", None), TOLERANCE["float32"])


@pytest.mark.slow
def test_checkify():
    params, x = random_parameters(CONFIGS["plain"]), random_tokens(13)

    def with_check(params, x):
        checkify.check(jnp.all(x < 10), "a token is too large")
        return layers.loss(params, x, CONFIGS["plain"])[0]

    checked = jax.jit(checkify.checkify(jax.value_and_grad(with_check)))
    error, out = checked(params, x)
    assert error.get() is None
    (value, _), (gradient, _) = layers.step(params, x, CONFIGS["plain"])
    assert_close(out, (value, gradient))
    assert "a token is too large" in checked(params, x + 10)[0].get()


@cache
def hopper_kernels(mode) -> list[str]:
    """What the step launches: each kernel's code, or at least its name."""
    config = dataclasses.replace(CONFIGS["plain"], implementation="mosaic_gpu")
    parameters = config.parameters(16, use_bias=True)
    params = {name: jax.ShapeDtypeStruct(parameter.shape, jnp.float32) for name, parameter in parameters.items()}
    with MODES[mode]():
        traced = gradients_through.trace("function", params, jax.ShapeDtypeStruct((13, 16), jnp.bfloat16), config)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernels = [line.partition("module = ")[2] for line in text.splitlines() if "@mosaic_gpu" in line]
    numbered = jax.__version_info__ < (0, 12)  # whose kernels have a counter in their code
    return [re.findall("moe_[a-z_]+", kernel)[0] if numbered else kernel for kernel in kernels]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [*PROMOTIONS, *WIDE, "enable_x64"])
def test_hopper_kernels_are_the_same(mode):
    changed, unchanged = (hopper_kernels(m) for m in (mode, None))  # from one line: kernels have it in them
    assert len(unchanged) == 12
    assert changed == unchanged


def exported(function, *specs, vjp_order=0):
    """`function` after a journey through bytes."""
    return export.deserialize(export.export(jax.jit(function))(*specs).serialize(vjp_order=vjp_order)).call


def specs_of(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def sized(shape):
    """An array of sizes that may be names."""
    constraints = ("T >= 12",) if "T" in shape else ()
    return jax.ShapeDtypeStruct(export.symbolic_shape(shape, constraints=constraints), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "sizes", "leading"),
    [
        *((config, "T", (13,)) for config in ("everything", "rounded", "limited")),
        ("plain", "B, 4", (3, 4)),
        ("plain", "B, S", (2, 5)),
    ],
)
def test_export_of_layer(config, sizes, leading):
    config = CONFIGS[config]
    params, x = random_parameters(config, use_bias=True), random_tokens(*leading)

    def outputs(params, x):
        y, routing = layer(x, params, config, train=True)
        return y, routing.weights, routing.load_balancing_loss

    def loss(function, params, x):
        y, weights, loss = out = function(params, x)
        return jnp.square(y).sum() + jnp.square(weights).sum() + loss, out

    step = jax.value_and_grad(loss, (1, 2), has_aux=True)
    again = exported(outputs, specs_of(params), sized(f"{sizes}, {WIDTH}"), vjp_order=1)
    out, ref = (jax.jit(partial(step, function))(params, x) for function in (again, outputs))
    assert_close(out, ref)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_export_of_kernels_needs_no_gpu(dtype):
    config = dataclasses.replace(CONFIGS["plain"], implementation="mosaic_gpu")
    params, x = specs_of((init(jax.random.key(0), config, 16), jnp.zeros((13, 16), dtype)))

    def gradient(params, x):
        return jax.grad(lambda params: jnp.square(moe(x, params, config)[0].astype(jnp.float32)).sum())(params)

    saved = export.export(jax.jit(gradient), platforms=["cuda"])(params, x).serialize()
    again = export.deserialize(saved)
    assert again.platforms == ("cuda",)
    names = ("router", "up_projection", "down_projection", "down_weight_gradients", "up_weight_gradients")
    assert [name for name in names if f"moe_{name}" not in again.mlir_module()] == []


@pytest.mark.parametrize("size", ["13", "T"])
@pytest.mark.parametrize(
    "options", [{}, {"scoring": "sigmoid", "num_groups": 3, "groups_per_token": 2}, {"expert_capacity": 3}]
)
def test_export_of_router(options, size):
    def function(logits):
        return tuple(route(logits, 2, **options)[:-2])

    logits = random_tokens(13)[:, :6]
    assert_same_bits(exported(function, sized(f"{size}, 6"))(logits), function(logits))


def test_symbolic_sizes_are_named_where_they_must_be_known():
    def rounded(logits):
        return route(logits, 2, token_rounding="up", rounding_tile=4).weights

    with pytest.raises(ValueError, match=r"token_rounding='up' needs to know whether S\*2 >= 24"):
        exported(rounded, sized("S, 6"))
    config = dataclasses.replace(CONFIGS["plain"], implementation="mosaic_gpu")
    message = "'mosaic_gpu' cannot run this: the kernels need sizes that are known"
    with pytest.raises(NotImplementedError, match=message):
        exported(lambda *a: moe(*a, config)[0], sized(f"T, {WIDTH}"), specs_of(random_parameters(config)))
