"""One compiled program for all equal eager calls.

Outside of `jax.jit`, jax compiles a loop, a conditional or a custom gradient in every call, and what it has compiled
stays in memory. Functions with the decorator here are compiled once, as the operations of `jax.numpy` are.
"""

from functools import partial

from blaze_jax.implementation import family_in_demand
from blaze_jax.layer_observer import are_observers
from pallas_kernels.traced_once import traced_once
from pallas_kernels.xla.loops import forced_turn


def _surroundings() -> tuple | None:
    """All that the layer looks at besides its arguments; None under observers, who have to be told of each call."""
    return None if are_observers() else (family_in_demand(), forced_turn())


compiled_once = partial(traced_once, inline=True, surroundings=_surroundings)
"""Decorator factory: `compiled_once(*settings)`, where the settings are keyword parameters that are not arrays.

A call with arrays of the same types and equal settings runs what an earlier one compiled. In a function that jax traces
or transforms, the decorated one leaves no call, only its operations.
"""
