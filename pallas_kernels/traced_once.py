"""One trace for all equal calls of a kernel.

A model of many layers calls each kernel with the same types and settings many times. jax lowers to a single function
what it has traced once, and then a kernel is built and compiled for all layers together. It recognises a
function by its identity, which a kernel's closures do not keep from call to call; the functions here do.
"""

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps

import jax

from pallas_kernels.compat import INLINE_WHILE_TRACING, is_part_of_a_program
from pallas_kernels.mosaic.interpreter import is_interpreted
from pallas_kernels.tuning import tables_in_use

MOST_SURROUNDINGS = 64
"""Surroundings of a function for which traces are kept: a user changes tables rarely, a tuning program often."""


def traced_once[**P, R](
    *settings: str, inline: bool = False, surroundings: Callable[[], Hashable | None] = lambda: ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: calls with arrays of the same types and equal settings share one trace.

    Tuned parameters are looked up while tracing, so other tables have another trace. Calls inside
    `interpreted` are always traced, and so are those with a setting that has no hash, say somebody's own activation.

    Args:
      settings: keyword parameters that are not arrays.
      inline: whether the function leaves no call of itself in a program that is traced around it.
      surroundings: what else the function looks at while it is traced, and jax does not know of; None for a call that
        must be traced by itself.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @lru_cache(MOST_SURROUNDINGS)
        def shared(inlined, *_):
            @wraps(function)
            def run(*arguments, **options):  # one for each of the surroundings: to jax, another function
                return function(*arguments, **options)

            return jax.jit(run, static_argnames=settings, inline=INLINE_WHILE_TRACING if inlined else False)

        @wraps(function)
        def call(*arguments: P.args, **options: P.kwargs) -> R:
            around = None if is_interpreted() else surroundings()
            once = around is not None and _have_hashes(options.get(name) for name in settings)
            if not once:
                return function(*arguments, **options)
            # jax 0.11 inlines in the gradient of an eager call, too, and runs what is left one operation at a time.
            return shared(inline and is_part_of_a_program(), tables_in_use(), around)(*arguments, **options)

        return call

    return decorate


def _have_hashes(values) -> bool:
    try:
        hash(tuple(values))
    except TypeError:
        return False
    return True
