"""Elementwise functions of a tile, and their derivatives, inside a kernel."""

from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax.extend import core

from pallas_kernels.hopper import inline


def value(function: Callable, values: Sequence[jax.Array]) -> jax.Array:
    """`function(*values)` of float32 tiles."""
    return _run(function, values)[0]


def value_and_gradients(
    function: Callable, values: Sequence[jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """`function(*values)` of float32 tiles and its vjp at `cotangent`."""

    def run(*arguments):
        value, vjp = jax.vjp(function, *arguments[:-1])
        return value, *vjp(arguments[-1])

    value, *gradients = _run(run, (*values, cotangent))
    return value, tuple(gradients)


def _run(function: Callable, arguments: Sequence[jax.Array]) -> list:
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments]
    closed = jax.make_jaxpr(function)(*shapes)
    return _evaluate(closed.jaxpr, closed.consts, arguments)


# By name of the primitive or of the function called, what kernels cannot lower, or slowly.
_OURS = {
    "add_any": lambda a, b: a + b,  # how vjp adds cotangents
    "copy": lambda x: x,
    "erfc": lambda x: 1 - lax.erf(x),
    "exp": lambda x: lax.exp(x),  # without the accuracy that some ask for
    "exp_neg_sq": lambda x: lax.exp(-(x * x)),  # a function of jax 0.12's, in the derivative of erfc
    "logistic": lambda x: inline.sigmoid(x),
}
_CALLS = ("jit", "pjit", "custom_jvp_call", "custom_vjp_call")


def _evaluate(jaxpr, constants, arguments) -> list:
    environment = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))

    def read(variable):
        return variable.val if isinstance(variable, core.Literal) else environment[variable]

    for equation in jaxpr.eqns:
        inputs = [read(v) for v in equation.invars]
        calls = equation.primitive.name in _CALLS
        called = equation.params.get("call_jaxpr", equation.params.get("jaxpr")) if calls else None
        name = called.jaxpr.debug_info.func_name if called else equation.primitive.name
        if name in _OURS:
            outputs = [_OURS[name](*inputs)]
        elif called:
            outputs = _evaluate(called.jaxpr, called.consts, inputs)
        else:
            outputs = equation.primitive.bind(*inputs, **equation.params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        environment.update(zip(equation.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]
