"""Functions written in jax, evaluated by other means: how kernels get their elementwise functions."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

_NO_MESH = jax.sharding.AbstractMesh((), ())
_CALLS = ("jit", "pjit", "custom_jvp_call", "custom_vjp_call")


def traced(function: Callable, shapes: Sequence[jax.ShapeDtypeStruct]) -> Any:
    """`function` as jax sees it where no mesh is set: with one, sums over no axes and changes of sharding come in."""
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        return jax.make_jaxpr(function)(*shapes)


def evaluate(closed: Any, arguments: Sequence, ours: Callable, otherwise: Callable) -> list:
    """Results at `arguments` of a function that was traced.

    Args:
      closed: what `traced` gave.
      arguments: what it is evaluated at.
      ours: `(name, inputs)`, the result of the primitive or of the called function of that name, None for others.
      otherwise: `(equation, inputs)`, the results of a primitive that `ours` does not have.
    """

    def run(jaxpr, constants, arguments) -> list:
        environment = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))

        def read(variable):
            return variable.val if isinstance(variable, core.Literal) else environment[variable]

        for equation in jaxpr.eqns:
            inputs = [read(v) for v in equation.invars]
            calls = equation.primitive.name in _CALLS
            called = equation.params.get("call_jaxpr", equation.params.get("jaxpr")) if calls else None
            name = called.jaxpr.debug_info.func_name if called else equation.primitive.name
            result = ours(name, inputs)
            if result is not None:
                outputs = [result]
            elif called:
                outputs = run(called.jaxpr, called.consts, inputs)
            else:
                outputs = otherwise(equation, inputs)
            environment.update(zip(equation.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    return run(closed.jaxpr, closed.consts, arguments)
