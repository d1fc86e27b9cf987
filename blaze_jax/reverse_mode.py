"""Functions that only have first derivatives in reverse mode, and an error for all others."""

from collections.abc import Callable
from functools import partial

from jax.custom_batching import sequential_vmap

from pallas_kernels.compat import computed_if_used, undifferentiable

REVERSE_MODE_ONLY = partial(
    NotImplementedError,
    "the experts, and the router on Hopper, support reverse mode only: first derivatives by jax.grad or jax.vjp, "
    "but no jvp, linearize, jacfwd or hessian, and no gradient of a gradient",
)


def differentiated_once(function: Callable, reduced: Callable | None = None) -> Callable:
    """`function(settings, *arrays)`, part of a function with a derivative or of that derivative: it has none itself.

    Under `vmap` it is one example after another. `reduced` computes the last of its results, and takes its place where
    a program uses no others.
    """

    def call(settings, *arrays):
        run = sequential_vmap(partial(function, settings))
        if reduced:
            run = computed_if_used(run, sequential_vmap(partial(reduced, settings)))
        return run(*undifferentiable(REVERSE_MODE_ONLY, arrays))

    return call
