"""Activations against their formulas."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest

from blaze_jax import ACTIVATION_NAMES, Activation, clamped_swiglu
from blaze_jax.activations import get_activation
from tests.numerics import TOLERANCE, assert_close

X = np.linspace(-9, 9, 41)
UP = np.linspace(8, -8, 41)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def gelu_tanh(x):
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def clamped(gate, up, alpha=1.702, limit=7.0):
    gate = np.minimum(gate, limit)
    return gate * sigmoid(alpha * gate) * (np.clip(up, -limit, limit) + 1)


FORMULAS = {
    "swiglu": lambda gate, up: gate * sigmoid(gate) * up,
    "geglu": lambda gate, up: gelu(gate) * up,
    "geglu_tanh": lambda gate, up: gelu_tanh(gate) * up,
    "reglu": lambda gate, up: np.maximum(gate, 0) * up,
    "clamped_swiglu": clamped,
    "silu": lambda up: up * sigmoid(up),
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": lambda up: np.maximum(up, 0),
    "relu2": lambda up: np.maximum(up, 0) ** 2,
}


def arguments(activation):
    return (X, UP) if activation.gated else (X,)


def test_every_name_has_a_formula():
    assert set(ACTIVATION_NAMES) == set(FORMULAS)


@pytest.mark.parametrize(
    ("activation", "formula"),
    [*FORMULAS.items(), (clamped_swiglu(alpha=1.0, limit=3.0), partial(clamped, alpha=1.0, limit=3.0))],
    ids=[*FORMULAS, "with_own_constants"],
)
@pytest.mark.default_cases("swiglu", "with_own_constants")
def test_formula(activation, formula):
    found = get_activation(activation)
    assert activation in (found, found.name)
    out = found.function(*(jnp.asarray(a, jnp.float32) for a in arguments(found)))
    assert_close(out, formula(*arguments(found)), TOLERANCE["float32"])


@pytest.mark.parametrize("name", ["relu", "relu2", "reglu"])
def test_derivative_of_relu_at_zero_is_zero(name):
    activation = get_activation(name)
    at_zero = (0.0, 1.0) if activation.gated else (0.0,)
    assert jax.grad(activation.function)(*at_zero) == 0


def test_derivative_of_silu():
    """Ours, and not jax's."""
    silu = get_activation("silu").function
    exact = sigmoid(X) + X * sigmoid(X) * (1 - sigmoid(X))
    assert_close(jax.vmap(jax.grad(silu))(jnp.asarray(X, jnp.float32)), exact, TOLERANCE["float32"])
    jax.test_util.check_grads(silu, (0.7,), order=2)


def test_clamped_swiglu_is_equal_by_value():
    assert clamped_swiglu() == clamped_swiglu() == get_activation("clamped_swiglu")
    assert hash(clamped_swiglu(2.0)) == hash(clamped_swiglu(2.0))
    assert clamped_swiglu(2.0) != clamped_swiglu()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (lambda n=name: get_activation(n), f"activation='{name}' must be an Activation or one of swiglu, geglu")
            for name in ("tanh", "SwiGLU", "")
        ),
        (lambda: clamped_swiglu(alpha="1"), "alpha='1' must be a number"),
        (lambda: clamped_swiglu(alpha=math.nan), "alpha=nan must be finite"),
        (lambda: clamped_swiglu(limit=-1.0), "limit=-1.0 must be positive"),
        (lambda: clamped_swiglu(limit=math.nan), "limit=nan must be positive"),
        (lambda: clamped_swiglu(limit=True), "limit=True must be a number"),
        (lambda: Activation("own", "tanh", gated=False), "function='tanh' must be a function"),
        (lambda: Activation("own", jnp.tanh, gated="no"), "gated='no' must be True or False"),
        (lambda: Activation(jnp.tanh, "own", gated=False), "name=.* must be a string"),
    ],
)
@pytest.mark.default_cases("*")
def test_misuse_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
