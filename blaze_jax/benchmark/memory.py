"""Memory of a program: XLA's plan of it, and what its backward pass keeps, by name, read from the traced program."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, NamedTuple

import jax

from blaze_jax.benchmark.sizes import of_floating

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
    origins = zip(_origins(jaxpr, [(name, True) for name in names]), jaxpr.outvars, strict=True)
    # one for an array that is kept for two reasons, none for a constant of the program
    found = {id(origin): Residual(origin[0], _bytes(var.aval), origin[1]) for origin, var in origins if origin}
    return list(found.values())


def saved_bytes(function: Callable, *arguments) -> int:
    """Bytes that the backward pass keeps in addition to the function's arguments."""
    return sum(r.bytes for r in saved_residuals(function, *arguments) if not r.is_argument)


type _Origin = tuple[str, bool]
"""What made an array, an argument or an operation, and whether it is an argument: one object for each array."""


def _origins(jaxpr, of_inputs: Sequence[_Origin | None]) -> list[_Origin | None]:
    """The origin of each result; None for a constant."""
    known = dict(zip(map(id, jaxpr.invars), of_inputs, strict=False))
    for eqn in jaxpr.eqns:
        name = eqn.params["name"] if eqn.primitive.name == "name" else eqn.primitive.name
        origins: list[_Origin | None] = [(name, False) for _ in eqn.outvars]
        inner = next(_inner_jaxprs(eqn), None) if eqn.primitive.name in _CALLS else None
        if inner is not None and len(inner.outvars) == len(eqn.outvars):
            origins = _origins(inner, [known.get(id(v)) for v in eqn.invars])
        known |= zip(map(id, eqn.outvars), origins, strict=True)
    return [known.get(id(v)) for v in jaxpr.outvars]


def kept_by_name(jaxpr) -> dict[str, int]:
    """Bytes of the arrays with a `checkpoint_name` that outlive the pass that makes them, in a program that holds both.

    Args:
      jaxpr: a whole training step's, its gradients taken inside it. What a loop over layers keeps counts once per
        layer; what `jax.checkpoint` computes again does not count.
    """
    total: dict[str, int] = Counter()
    used = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name" and id(eqn.outvars[0]) in used:
            total[eqn.params["name"]] += _bytes(eqn.outvars[0].aval)
        if eqn.primitive.name not in _RECOMPUTED:
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            for inner in _inner_jaxprs(eqn):
                for name, num_bytes in kept_by_name(inner).items():
                    total[name] += times * num_bytes
    return dict(total)


def _bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize


def _inner_jaxprs(eqn) -> Iterator[Any]:
    for value in eqn.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(inner := getattr(part, "jaxpr", part), "eqns"):
                yield inner
