"""Elementwise functions of a tile, and their derivatives, inside a kernel."""

# pyright: reportCallIssue=false, reportAbstractUsage=false, reportArgumentType=false

import math
from collections.abc import Callable, Sequence

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_kernels.hopper import inline_interpreter as forms
from pallas_kernels.mosaic.interpreter import in_interpreter
from pallas_kernels.mosaic.jaxprs import evaluate


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
    return evaluate(function, shapes, arguments, _ours, _as_it_is)


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


@in_interpreter(forms.sigmoid)
def sigmoid(x):
    """`1 / (1 + exp(-x))` of a float32 tile, in 4 instructions an element; Pallas's own division takes 4 more."""
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)
    def run(ctx, x):
        f32 = ir.F32Type.get()
        minus_log2_e = mgpu.c(-math.log2(math.e), f32)
        one_and_exp = (x * minus_log2_e).exp2(approx=True) + mgpu.c(1.0, f32)
        return one_and_exp._pointwise(one_and_exp._lift_fast_instr("rcp.approx.ftz.f32"))

    return run(x)
