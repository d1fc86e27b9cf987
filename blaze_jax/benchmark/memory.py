"""Memory of a program: XLA's plan of it, and what its backward pass keeps, by name, read from the traced program."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NamedTuple

import jax

from blaze_jax.benchmark.inputs import of_floating

MIB = 2**20


class MemoryPlan(NamedTuple):
    """Bytes of a compiled program by XLA's own plan.

    Attributes:
      arguments: what the caller holds.
      outputs: results that are no argument's memory.
      temporaries: alive at some time inside.
    """

    arguments: int
    outputs: int
    temporaries: int

    @property
    def peak(self) -> int:
        """Beyond the arguments: results and temporaries."""
        return self.outputs + self.temporaries

    @property
    def total(self) -> int:
        return self.arguments + self.peak


def plan_of(analysis) -> MemoryPlan | None:
    """The plan from `compiled.memory_analysis()`, None where the platform gives none."""
    if analysis is None:
        return None
    return MemoryPlan(
        analysis.argument_size_in_bytes,
        analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        analysis.temp_size_in_bytes,
    )


_CALLS = ("remat_opt", "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")
_RECOMPUTED = ("checkpoint", "remat", "remat2")


class Residual(NamedTuple):
    """An array that the backward pass keeps.

    Attributes:
      name: its `checkpoint_name`, the argument's name if it is one, else the name of the operation that made it.
      bytes: its size.
      is_argument: whether it is an argument of the function, and takes no memory beyond it.
    """

    name: str
    bytes: int
    is_argument: bool


def saved_residuals(function: Callable, *arguments) -> list[Residual]:
    """The arrays that `jax.vjp` of `function` in its floating arguments keeps, in order; nothing is computed.

    Args:
      function: takes arrays; plain or jitted.
      arguments: arrays or `jax.ShapeDtypeStruct`s.
    """

    @wraps(function)  # which names the arguments
    def leaves(*arguments):
        return jax.tree.leaves(of_floating(function, arguments)[1])

    jaxpr = jax.make_jaxpr(leaves)(*arguments).jaxpr
    names: Any = jaxpr.debug_info.arg_names
    found, seen = [], set()
    for var in jaxpr.outvars:
        origin = _origin(jaxpr, var)
        if origin is None or origin[1] in seen:  # a constant of the program, or kept for two reasons
            continue
        seen.add(origin[1])
        kind, key = origin
        name = names[key] if kind == "argument" else kind
        found.append(Residual(name, _bytes(var.aval), kind == "argument"))
    return found


def saved_bytes(function: Callable, *arguments) -> int:
    """Bytes that the backward pass keeps in addition to the function's arguments."""
    return sum(r.bytes for r in saved_residuals(function, *arguments) if not r.is_argument)


def kept_by_name(jaxpr) -> dict[str, int]:
    """Bytes of the arrays with a `checkpoint_name` that outlive the pass that makes them, in a program that holds both.

    Args:
      jaxpr: a whole training step's, its gradients taken inside it. What a loop over layers keeps counts once per
        layer; what `jax.checkpoint` computes again does not count.
    """
    total: dict[str, int] = {}
    for name, num_bytes in _named(jaxpr, 1):
        total[name] = total.get(name, 0) + num_bytes
    return total


def _named(jaxpr, times: int) -> Iterator[tuple[str, int]]:
    used = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name" and id(eqn.outvars[0]) in used:
            yield eqn.params["name"], times * _bytes(eqn.outvars[0].aval)
        if eqn.primitive.name in _RECOMPUTED:
            continue
        length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in _inner_jaxprs(eqn):
            yield from _named(inner, times * length)


def _bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize


def _inner_jaxprs(eqn) -> Iterator[Any]:
    for value in eqn.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(part, "jaxpr") and hasattr(part.jaxpr, "eqns"):
                yield part.jaxpr
            elif hasattr(part, "eqns"):
                yield part


def _origin(jaxpr, var) -> tuple[str, Any] | None:
    """("argument", its position) or (a name, something that tells this array from others); None for a constant."""
    positions = {id(v): i for i, v in enumerate(jaxpr.invars)}
    if id(var) in positions:
        return "argument", positions[id(var)]
    makers = {id(out): eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    eqn = makers.get(id(var))
    if eqn is None:
        return None
    if eqn.primitive.name == "name":
        return eqn.params["name"], id(var)
    inner = next(_inner_jaxprs(eqn), None) if eqn.primitive.name in _CALLS else None
    if inner is not None and len(inner.outvars) == len(eqn.outvars):
        index = next(i for i, out in enumerate(eqn.outvars) if out is var)
        origin = _origin(inner, inner.outvars[index])
        if origin is not None and origin[0] == "argument":
            return _origin(jaxpr, eqn.invars[origin[1]])
        return origin and (origin[0], id(var))
    return eqn.primitive.name, id(var)
