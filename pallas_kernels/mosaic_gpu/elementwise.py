"""Derivatives of elementwise functions inside a kernel."""

from collections.abc import Callable, Sequence

import jax
from jax.extend import core


def value_and_gradients(
    function: Callable, values: Sequence[jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """`function(*values)` and its vjp at `cotangent`, as plain arithmetic.

    `jax.vjp` adds cotangents with a primitive that kernels cannot lower; this writes the derivative out with `+`.
    """

    def run(*arguments):
        value, vjp = jax.vjp(function, *arguments[:-1])
        return value, *vjp(arguments[-1])

    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*values, cotangent)]
    closed = jax.make_jaxpr(run)(*shapes)
    value, *gradients = _evaluate(closed.jaxpr, closed.consts, (*values, cotangent))
    return value, tuple(gradients)


def _evaluate(jaxpr, constants, arguments) -> list:
    environment = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))

    def read(variable):
        return variable.val if isinstance(variable, core.Literal) else environment[variable]

    for equation in jaxpr.eqns:
        inputs = [read(v) for v in equation.invars]
        if equation.primitive.name == "add_any":
            outputs = [inputs[0] + inputs[1]]
        elif equation.primitive.name in ("jit", "pjit"):
            inner = equation.params["jaxpr"]
            outputs = _evaluate(inner.jaxpr, inner.consts, inputs)
        else:
            outputs = equation.primitive.bind(*inputs, **equation.params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        environment.update(zip(equation.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]
