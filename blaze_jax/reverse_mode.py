"""Errors for derivatives that there are none of."""

from collections.abc import Callable
from functools import partial

import jax

REVERSE_MODE_ONLY = partial(
    NotImplementedError,
    "the experts, and the router on Hopper, support reverse mode only: first derivatives by jax.grad or jax.vjp, "
    "but no jvp, linearize, jacfwd or hessian, and no gradient of a gradient",
)


def undifferentiable(function: Callable, error: Callable[[], Exception] = REVERSE_MODE_ONLY) -> Callable:
    """`function`, which raises `error()` where it is differentiated, in whatever mode."""
    guarded = jax.custom_jvp(function)

    @guarded.defjvp
    def _(primals, tangents):
        raise error()

    return guarded
