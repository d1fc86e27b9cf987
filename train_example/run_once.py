"""Compiling what runs once."""

from collections.abc import Callable

import jax


def jit_once[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """`jax.jit` for one call: a CPU compiles with little optimisation, initialisers in a sixth of the time."""
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(function, compiler_options=options)
