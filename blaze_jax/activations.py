"""Activations of an expert: elementwise functions of its pre-activations."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import mul

import jax
import jax.numpy as jnp
from jaxtyping import Array

from blaze_jax.checks import check_booleans, check_numbers


@dataclass(frozen=True)
class Activation:
    """An elementwise function from pre-activations to the activation.

    Attributes:
      name: how it is asked for.
      function: takes `(gate, up)` if gated, else of `(up)`. It sees the float32 pre-activations, and jax takes its
        derivative. It closes over constants, not over traced arrays. Activations are equal if their functions
        are, so a new function compiles everything again.
      gated: whether the expert has a gate projection in addition to the up projection.
      bound: what the magnitude of the function is at most, by what those of the pre-activations are at most: a product
        of at most two of them. With it `precision="fp8"` writes activations in 8 bits at once; None where it is not
        known.

    Raises:
      ValueError: a field does not fit.
    """

    name: str
    function: Callable[..., Array]
    gated: bool
    bound: Callable[..., Array] | None = None

    def __post_init__(self):
        if not isinstance(self.name, str):
            raise ValueError(f"name={self.name!r} must be a string")
        if not callable(self.function):
            raise ValueError(f"function={self.function!r} must be a function of the pre-activations")
        check_booleans(gated=self.gated)
        if self.bound is not None and not callable(self.bound):
            raise ValueError(f"bound={self.bound!r} must be None or a function of the pre-activations' magnitudes")


def _relu(x: Array) -> Array:
    return jnp.where(x > 0, x, 0)  # derivative 0 at 0, as everywhere in the field


def _relu2(x: Array) -> Array:
    return jnp.square(_relu(x))


# Functions of this module, which pickle and compare by name; jax.nn's are jitted, and do not.
def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def _gelu_tanh(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)


def _silu(x: Array) -> Array:
    return _silu_with_derivative(x)


@jax.custom_jvp
def _silu_with_derivative(x: Array) -> Array:
    return jax.nn.silu(x)


@_silu_with_derivative.defjvp
def _silu_jvp(primals, tangents):
    """`s + silu · (1 - s)` for a sigmoid s: two operations less than jax's own, of which a backward pass has many."""
    (x,), (dx,) = primals, tangents
    sigmoid = jax.nn.sigmoid(x)
    silu = x * sigmoid
    return silu, dx * (sigmoid + silu * (1 - sigmoid))


@dataclass(frozen=True)
class Gated:
    """`function(gate) · up`."""

    function: Callable[[Array], Array]

    def __call__(self, gate: Array, up: Array) -> Array:
        return self.function(gate) * up


@dataclass(frozen=True)
class _ClampedSwiGLU:
    alpha: float
    limit: float

    def __call__(self, gate: Array, up: Array) -> Array:
        # By comparisons: minimum and clip have derivatives of many instructions, for ties.
        gate = jnp.where(gate > self.limit, self.limit, gate)
        up = jnp.where(up > self.limit, self.limit, jnp.where(up < -self.limit, -self.limit, up))
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


def _itself(magnitude: Array) -> Array:
    return magnitude


def _squared(magnitude: Array) -> Array:
    return magnitude * magnitude


@dataclass(frozen=True)
class _ClampedBound:
    """`gate · sigmoid(alpha · gate)` is at most the gate, the limit where that is positive, and 1 / alpha elsewhere."""

    alpha: float
    limit: float

    def __call__(self, gate: Array, up: Array) -> Array:
        if self.alpha > 0:
            most = max(self.limit, 1 / self.alpha)
            gate = jnp.where(gate > most, most, gate)
        return gate * (jnp.where(up > self.limit, self.limit, up) + 1)


def clamped_swiglu(alpha: float = 1.702, limit: float = 7.0) -> Activation:
    """SwiGLU of gpt-oss: `gate · sigmoid(alpha · gate) · (up + 1)`, gate clamped to ≤ limit and up to ±limit.

    Two of the same numbers are equal: a function compiled for one serves the other.

    Raises:
      ValueError: `alpha` is not a finite number, or `limit` not a positive one.
    """
    check_numbers(alpha=alpha, limit=limit)
    if not math.isfinite(alpha):
        raise ValueError(f"{alpha=} must be finite")
    if not limit > 0:
        raise ValueError(f"{limit=} must be positive")
    return Activation("clamped_swiglu", _ClampedSwiGLU(alpha, limit), True, _ClampedBound(alpha, limit))


_ACTIVATIONS = {
    a.name: a
    for a in (
        Activation("swiglu", Gated(_silu), True, mul),
        Activation("geglu", Gated(_gelu), True, mul),
        Activation("geglu_tanh", Gated(_gelu_tanh), True, mul),
        Activation("reglu", Gated(_relu), True, mul),
        clamped_swiglu(),
        Activation("silu", _silu, False, _itself),
        Activation("gelu", _gelu, False, _itself),
        Activation("gelu_tanh", _gelu_tanh, False, _itself),
        Activation("relu", _relu, False, _itself),
        Activation("relu2", _relu2, False, _squared),
    )
}

ACTIVATION_NAMES = tuple(_ACTIVATIONS)
"""swiglu, geglu, geglu_tanh, reglu and clamped_swiglu have a gate; silu, gelu, gelu_tanh, relu and relu2 have none."""


def get_activation(activation: str | Activation) -> Activation:
    """The activation of that name, or `activation` itself.

    Raises:
      ValueError: no activation has that name.
    """
    if isinstance(activation, Activation):
        return activation
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise ValueError(f"{activation=} must be an Activation or one of {', '.join(ACTIVATION_NAMES)}")
    return _ACTIVATIONS[activation]
