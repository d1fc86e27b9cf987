"""One trace for all equal calls of a kernel.

A model of many layers calls each kernel with the same types and settings many times. jax lowers to a single function
what it has traced once, and then a kernel is built and compiled for all layers together. It recognises a
function by its identity, which a kernel's closures do not keep from call to call; the functions here do.
"""

from collections.abc import Callable
from functools import cache, wraps

import jax

from pallas_kernels.mosaic.interpreter import is_interpreted
from pallas_kernels.tuning.parameters import tables_in_use


def traced_once[**P, R](*settings: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: calls with arrays of the same types and equal settings share one trace.

    Tuned parameters are looked up while tracing, so other tables have another trace. Calls inside
    `interpreted` are always traced, and so are those with a setting that has no hash, say somebody's own activation.

    Args:
      settings: keyword parameters that are not arrays.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @cache
        def shared(tables):
            @wraps(function)
            def run(*arguments, **options):  # one for each `tables`: to jax, another function
                return function(*arguments, **options)

            return jax.jit(run, static_argnames=settings)

        @wraps(function)
        def call(*arguments: P.args, **options: P.kwargs) -> R:
            once = not is_interpreted() and _have_hashes(options.get(name) for name in settings)
            return (shared(tables_in_use()) if once else function)(*arguments, **options)

        return call

    return decorate


def _have_hashes(values) -> bool:
    try:
        hash(tuple(values))
    except TypeError:
        return False
    return True
