"""Programs that run once, compiled fast."""

from collections.abc import Callable
from typing import Any

import jax


def jit_once[**P, R](function: Callable[P, R], out_shardings: Any = None) -> Callable[P, R]:
    """`jax.jit` for one call: a CPU compiles with little optimisation, initialisers in a sixth of the time."""
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(function, compiler_options=options, out_shardings=out_shardings)
