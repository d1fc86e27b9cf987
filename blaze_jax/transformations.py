"""How jax transforms the layer's functions: compiled once, first derivatives in reverse mode, one example at a time.

Outside of `jax.jit`, jax compiles a loop, a conditional or a custom gradient in every call, and what it has compiled
stays in memory. Functions with the decorator `compiled_once` are compiled once, as the operations of `jax.numpy` are.
"""

from collections.abc import Callable
from functools import partial

from jax.custom_batching import sequential_vmap

from blaze_jax.gradient_sums import sums_on_offer
from blaze_jax.implementation import family_in_demand
from blaze_jax.layer_observer import are_observers
from blaze_jax.precision import is_fp8_everywhere
from pallas_kernels.compat import computed_if_used, undifferentiable
from pallas_kernels.family import Kernels
from pallas_kernels.traced_once import traced_once
from pallas_kernels.xla.loops import forced_turn


def _surroundings() -> tuple | None:
    """All that the layer looks at besides its arguments; None if it tells or takes what belongs to one call alone."""
    around = family_in_demand(), is_fp8_everywhere(), forced_turn()
    return None if are_observers() or sums_on_offer() else around


compiled_once = partial(traced_once, inline=True, surroundings=_surroundings)
"""Decorator factory: `compiled_once(*settings)`, where the settings are keyword parameters that are not arrays.

A call with arrays of the same types and equal settings runs what an earlier one compiled. In a function that jax traces
or transforms, the decorated one leaves no call, only its operations.
"""


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


def one_by_one(kernels: Kernels, function: Callable) -> Callable:
    """`function` of arrays, which under `vmap` gets one example after another unless these kernels take batches."""
    return function if kernels.transformable else sequential_vmap(function)
