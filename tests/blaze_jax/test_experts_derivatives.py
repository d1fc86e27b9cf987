"""Derivatives that there are none of are refused in words, and so are activations that would need one."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax import Activation, expert_ffn, moe
from tests.expert_problems import apply, make_problem
from tests.layers import CONFIGS
from tests.routings import random_experts

IMPLEMENTATIONS = {"xla": "float32", "mosaic_gpu": "bfloat16"}


def scalar(function):
    return lambda x: jnp.square(function(x)).sum().astype(jnp.float32)


def twice(function):
    """The gradient of a gradient."""
    return jax.grad(scalar(jax.grad(scalar(function))))


def scanned(function):
    return lambda x: jax.lax.scan(lambda y, _: (y + function(y), None), x, None, length=2)[0]


DERIVATIVES = {
    "jvp": lambda function, x: jax.jvp(function, (x,), (x,)),
    "linearize": lambda function, x: jax.linearize(function, x)[1](x),
    "jacfwd": lambda function, x: jax.jacfwd(function)(x),
    "jvp of jit": lambda function, x: jax.jvp(jax.jit(function), (x,), (x,)),
    "jvp of vmap": lambda function, x: jax.jvp(jax.vmap(function), (x[None],), (x[None],)),
    "jvp of scan": lambda function, x: jax.jvp(scanned(function), (x,), (x,)),
    "jvp of checkpoint": lambda function, x: jax.jvp(jax.checkpoint(function), (x,), (x,)),
    "hessian": lambda function, x: jax.hessian(scalar(function))(x),
    "jvp of grad": lambda function, x: jax.jvp(jax.grad(scalar(function)), (x,), (x,)),
    "grad of grad": lambda function, x: twice(function)(x),
    "grad of grad of scan": lambda function, x: twice(scanned(function))(x),
    "grad in the cotangent": lambda function, x: jax.grad(scalar(lambda dy: jax.vjp(function, x)[1](dy)[0]))(x),
}


def small_problem(**options):
    return make_problem(random_experts(6, 2, range(3)), 3, d=8, n=8, biases=False, **options)


def of_experts(implementation, weighted=None):
    """The experts as a function of the tokens, or of the sum of what their routing weights are multiplied by."""
    x, params, weights, experts, _ = small_problem(dtype=IMPLEMENTATIONS[implementation])
    run = partial(apply, expert_ffn, implementation=implementation)
    if weighted:
        return lambda z: run(x, params, weights * z.sum(), experts), x
    return lambda x: run(x, params, weights, experts), x


def of_layer(implementation):
    config = dataclasses.replace(CONFIGS["plain"], implementation=implementation)
    dtype = IMPLEMENTATIONS[implementation]
    params = {name: jnp.ones(parameter.shape, dtype) for name, parameter in config.parameters(16).items()}
    return lambda x: moe(x, params, config)[0], jnp.ones((6, 16), dtype)


PROBLEMS = {"experts": of_experts, "routing_weights": partial(of_experts, weighted=True), "layer": of_layer}


@pytest.mark.parametrize(("implementation", "platform"), [("xla", "cpu"), ("xla", None), ("mosaic_gpu", "cuda")])
@pytest.mark.parametrize(
    ("problem", "name"),
    [
        *(("experts", name) for name in DERIVATIVES),
        *((problem, name) for problem in ("routing_weights", "layer") for name in ("jvp", "grad of grad")),
    ],
)
@pytest.mark.default_cases("experts-jvp-*")
def test_refused(implementation, platform, problem, name):
    function, x = PROBLEMS[problem](implementation)
    derivative = partial(DERIVATIVES[name], function)

    def lowered(x):
        return jax.jit(derivative).trace(x).lower(lowering_platforms=(platform,))

    with pytest.raises(NotImplementedError, match=r"the experts.* support reverse mode only: first derivatives by"):
        (lowered if platform else derivative)(x)


def test_derivatives_of_what_is_around_the_experts():
    function, x = of_experts("xla")
    scale = jnp.float32(2)
    assert jnp.isfinite(jax.jit(lambda: jax.jvp(lambda s: s * function(x), (scale,), (scale,))[1])()).all()
    second = jax.jit(jax.grad(jax.grad(lambda s: s**2 * function(x).sum())))
    np.testing.assert_allclose(second(scale), 2 * jax.jit(function)(x).sum(), rtol=1e-5)


def leaky(slope):
    return Activation("leaky", lambda up: jnp.where(up > 0, up, slope * up), gated=False)


def loss(slope, x):
    _, params, weights, experts, _ = small_problem(activation="relu")
    return apply(expert_ffn, x, params, weights, experts, activation=leaky(slope)).sum()


X = jnp.ones((6, 8))
LEARNED = {
    "grad": lambda slope: jax.grad(loss)(slope, X),
    "grad of jit": lambda slope: jax.grad(jax.jit(loss))(slope, X),
    "jit of grad": lambda slope: jax.jit(jax.grad(loss))(slope, X),
    "jvp": lambda slope: jax.jvp(partial(loss, x=X), (slope,), (slope,)),
    "grad of checkpoint": lambda slope: jax.grad(jax.checkpoint(loss))(slope, X),
    "grad in x of jit": lambda slope: jax.grad(jax.jit(loss), 1)(slope, X),
    "vmap": lambda slope: jax.vmap(partial(loss, x=X))(slope[None]),
}


@pytest.mark.parametrize("transformed", LEARNED.values(), ids=LEARNED)
def test_activation_that_closes_over_what_is_traced(transformed):
    message = "activation 'leaky' closes over a traced array: its values must be constants, neither learned nor"
    with pytest.raises(ValueError, match=message):
        transformed(jnp.float32(0.1))


@pytest.mark.parametrize("slope", [0.1, jnp.float32(0.1)], ids=["number", "array"])
def test_activation_that_closes_over_a_constant(slope):
    gradient = jax.jit(jax.grad(partial(loss, slope)))(X)
    assert jnp.isfinite(gradient).all()
    assert gradient.any()
