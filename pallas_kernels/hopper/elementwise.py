"""Elementwise functions of a tile, and their derivatives, inside a kernel."""

from collections.abc import Callable, Sequence

import jax
from jax import lax

from pallas_kernels.hopper.inline import sigmoid
from pallas_kernels.mosaic.jaxprs import evaluate, traced


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
    return evaluate(traced(function, shapes), arguments, _ours, _as_it_is)


def _as_it_is(equation, inputs) -> list:
    outputs = equation.primitive.bind(*inputs, **equation.params)
    return outputs if equation.primitive.multiple_results else [outputs]


def _ours(name: str, inputs: Sequence) -> jax.Array | None:
    """Results that kernels cannot lower, or slowly, by name of the primitive or function; None for the others."""
    match name, *inputs:
        case "add_any", a, b:  # how vjp adds cotangents
            return a + b
        case "copy", x:
            return x
        case "erfc", x:
            return 1 - lax.erf(x)
        case "exp", x:  # without the accuracy that some ask for
            return lax.exp(x)
        case "exp_neg_sq", x:  # a function of jax 0.12's, in the derivative of erfc
            return lax.exp(-(x * x))
        case "logistic", x:
            return sigmoid(x)
    return None
