"""What the modules of flax.linen and flax.nnx share: their parameters, and that they compute what `moe` does."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import blaze_jax
from blaze_jax import MoE, init, moe
from tests.layers import (
    CONFIGS,
    DOORS,
    WIDTH,
    created,
    gradients_through,
    random_parameters,
    random_tokens,
    unboxed,
)
from tests.numerics import assert_same_bits

MODULES = ("linen", "nnx")
over_modules = pytest.mark.parametrize("module", MODULES)


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
@over_modules
@pytest.mark.default_cases("*-plain-False", "linen-everything-True")
def test_parameters_are_those_of_the_configuration(module, name, use_bias):
    expected = CONFIGS[name].parameters(WIDTH, use_bias=use_bias)
    boxes = jax.eval_shape(partial(created, module, CONFIGS[name], use_bias=use_bias, param_dtype=jnp.bfloat16))
    axes = {name: box.names if module == "linen" else box.out_sharding for name, box in boxes.items()}
    assert axes == {name: parameter.axes for name, parameter in expected.items()}
    assert {name: p.shape for name, p in unboxed(boxes).items()} == {name: p.shape for name, p in expected.items()}
    chex.assert_type(jax.tree.leaves(boxes), jnp.bfloat16)


@over_modules
@pytest.mark.default_cases("*")
def test_initialisers_are_used(module):
    fill = {
        name: partial(lambda value, key, shape, dtype: jnp.full(shape, value, dtype), value)
        for name, value in {"router_init": 1.0, "kernel_init": 2.0, "bias_init": 3.0}.items()
    }
    params = jax.jit(lambda: unboxed(created(module, CONFIGS["everything"], use_bias=True, **fill)))()
    values = {name: np.unique(value).tolist() for name, value in params.items()}
    assert values.pop("w_router") == [1.0]
    assert values == {name: [3.0] if name.startswith("b_") else [2.0] for name in values}


def test_same_initial_distribution():
    params = [jax.jit(lambda m=m: unboxed(created(m, CONFIGS["everything"], use_bias=True)))() for m in MODULES]
    linen, own = (jax.tree.map(np.std, p) for p in params)
    assert {name for name, deviation in linen.items() if deviation == 0} == {"b_up", "b_down"}
    for name, deviation in linen.items():
        assert 0.7 * deviation <= own[name] <= 1.4 * deviation, name


@pytest.mark.parametrize(
    ("name", "leading", "dtype"),
    [
        *((name, (2, 15), None) for name in CONFIGS),
        ("everything", (2, 15), "bfloat16"),
        ("everything", (), None),
        ("everything", (0,), None),
    ],
)
@over_modules
@pytest.mark.default_cases("*-plain-*", "linen-everything-leading1-None", "nnx-everything-leading4-bfloat16")
def test_same_bits_as_the_function(module, name, leading, dtype):
    config, x = CONFIGS[name], random_tokens(*leading)
    params = random_parameters(config, use_bias=True)
    out, expected = (gradients_through(door, params, x, config, dtype) for door in (module, "function"))
    assert_same_bits(out, expected)


@pytest.mark.parametrize(
    ("dtype", "x_dtype", "param_dtype", "out"),
    [
        (None, "bfloat16", "float32", "float32"),
        (None, "bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32", "bfloat16"),
        ("float32", "bfloat16", "bfloat16", "float32"),
    ],
)
@over_modules
@pytest.mark.default_cases("*-bfloat16-bfloat16", "linen-*")
def test_dtype_of_the_computation(module, dtype, x_dtype, param_dtype, out):
    """The router may be wider, and modules may hold parameters of another dtype than they would initialise."""
    params = random_parameters(CONFIGS["plain"], dtype=param_dtype) | {"w_router": jnp.ones((WIDTH, 6))}
    run = partial(DOORS[module], config=CONFIGS["plain"], dtype=dtype)
    y, _ = jax.eval_shape(run, params, random_tokens(5, dtype=x_dtype))
    assert y.dtype == out


@pytest.mark.parametrize("name", ["dtype", "param_dtype"])
@over_modules
@pytest.mark.default_cases("*")
def test_unknown_dtypes_are_named(module, name):
    for wrong in ("bf16", jnp.int32, 3):
        with pytest.raises(ValueError, match=rf"^{name}=.*{wrong}.* must be a floating dtype or its name"):
            created(module, CONFIGS["plain"], **{name: wrong})


FORMS = {
    "function": lambda x, config: moe(x, random_parameters(CONFIGS["plain"]), config),
    "init": lambda x, config: init(jax.random.key(0), config, WIDTH),
    "linen": lambda x, config: MoE(config).init(jax.random.key(0), x),
    "nnx": lambda x, config: blaze_jax.nnx.MoE(WIDTH, config, rngs=nnx.Rngs(0))(x),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.default_cases("*")
def test_configuration_that_is_none_is_named(form):
    for config in ("plain", None, {}):
        with pytest.raises(ValueError, match=r"config=.* must be a MoEConfig"):
            FORMS[form](random_tokens(3), config)


@over_modules
@pytest.mark.default_cases("*")
def test_tokens_are_named(module):
    for x in (jnp.zeros(()), jnp.zeros((3, 0)), "tokens", None):
        with pytest.raises(ValueError, match=r"x(=.*)? must be a"):
            FORMS[module](x, CONFIGS["plain"])
