"""Elementwise functions and their derivatives, written in jax, of one number per thread."""

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import numpy as np

from pallas_kernels.mosaic.jaxprs import evaluate, traced
from pallas_kernels.simt.values import Bool, Float, Int, exp2, log2, machine, maximum, reciprocal, select


def value(function: Callable, arguments: Sequence[Float]) -> Float:
    """`function(*arguments)`.

    Raises:
      NotImplementedError: the function uses a primitive of jax that these kernels have no code for.
    """
    shapes = [jax.ShapeDtypeStruct((), np.float32)] * len(arguments)
    return evaluate(traced(function, shapes), arguments, _ours, _others)[0]


def with_gradients(function: Callable, arguments: int) -> Callable[[Sequence[Float], Float], tuple[Float, list[Float]]]:
    """`(numbers, cotangent)` to `function(*numbers)` and its vjp at the cotangent, traced once for all.

    Raises:
      NotImplementedError: when called, as `value` does.
    """

    def run(cotangent, *numbers):
        out, vjp = jax.vjp(function, *numbers)
        return out, *vjp(cotangent)

    jaxpr = traced(run, [jax.ShapeDtypeStruct((), np.float32)] * (1 + arguments))

    def call(numbers, cotangent):
        out, *gradients = evaluate(jaxpr, [cotangent, *numbers], _ours, _others)
        return _constant(out), [_constant(g) for g in gradients]

    return call


def _ours(name: str, inputs: Sequence) -> Any:
    operation = partial(_of_machine, name) if name in _OF_MACHINES else _OPERATIONS.get(name)
    return operation and operation(*map(_constant, inputs))


def _others(equation, inputs: Sequence) -> list:
    name = equation.primitive.name
    if name == "integer_pow":
        return [_power(_constant(inputs[0]), equation.params["y"])]
    raise NotImplementedError(f"an activation uses {name}, which the kernels have no code for")


def _constant(x) -> Any:
    if isinstance(x, Bool | Float | Int):
        return x
    kind = np.asarray(x).dtype.kind
    return Bool(bool(x)) if kind == "b" else Float(float(x)) if kind == "f" else Int(int(x))


def _power(x: Float, exponent: int) -> Float:
    product = reduce(operator.mul, [x] * abs(exponent)) if exponent else Float(1.0)
    return product if exponent >= 0 else reciprocal(product)


def _exp(x: Float) -> Float:
    return exp2(x * math.log2(math.e))


def _at_least(a: Float, b: Float) -> Bool:
    return (a > b) | a.equals(b)


def _negative(x: Float) -> Float:
    return x * -1.0


def _of_machine(name: str, x: Float) -> Float:
    return Float(machine().function(name, x.value))


def _itself(x):
    return x


def _to_float(x):
    return x if isinstance(x, Float) else select(x, Float(1.0), Float(0.0)) if isinstance(x, Bool) else x.to_float()


_OF_MACHINES = ("cos", "erf", "expm1", "log1p", "rsqrt", "sin", "sqrt", "tanh")

_OPERATIONS: dict[str, Callable] = {
    "abs": lambda x: maximum(x, _negative(x)),
    "add": operator.add,
    "add_any": operator.add,
    "and": operator.and_,
    "broadcast_in_dim": _itself,
    "clamp": lambda low, x, high: _negative(maximum(_negative(maximum(x, low)), _negative(high))),
    "convert_element_type": _to_float,
    "copy": _itself,
    "div": lambda a, b: a * reciprocal(b),
    "eq": lambda a, b: a.equals(b),
    "erfc": lambda x: Float(1.0) - _of_machine("erf", x),
    "exp": _exp,
    "exp2": exp2,
    "exp_neg_sq": lambda x: _exp(_negative(x * x)),
    "ge": _at_least,
    "gt": operator.gt,
    "le": lambda a, b: _at_least(b, a),
    "log": lambda x: log2(x) * math.log(2),
    "logistic": lambda x: reciprocal(_exp(_negative(x)) + 1.0),
    "lt": lambda a, b: b > a,
    "max": maximum,
    "min": lambda a, b: _negative(maximum(_negative(a), _negative(b))),
    "mul": operator.mul,
    "ne": lambda a, b: ~a.equals(b),
    "neg": _negative,
    "not": operator.invert,
    "one_minus_square": lambda x: (x * -1.0 + 1.0) * (x + 1.0),
    "or": operator.or_,
    "pow": lambda a, b: exp2(log2(a) * b),
    "select_n": lambda which, a, b: select(which, b, a),
    "sign": lambda x: select(x > 0.0, Float(1.0), select(Float(0.0) > x, Float(-1.0), x)),
    "square": lambda x: x * x,
    "stop_gradient": _itself,
    "sub": operator.sub,
}
