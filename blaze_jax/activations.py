"""Activations of an expert: elementwise functions of its pre-activations."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array


@dataclass(frozen=True)
class Activation:
    """An elementwise function from pre-activations to the activation.

    Attributes:
      name: how it is asked for.
      function: of `(gate, up)` if gated, of `(up)` alone if not. It sees the float32 pre-activations; its derivative is
        taken by jax.
      gated: whether the expert has a gate projection beside the up projection.
    """

    name: str
    function: Callable[..., Array]
    gated: bool


def _relu(x: Array) -> Array:
    return jnp.where(x > 0, x, 0)  # derivative 0 at 0, as everywhere in the field


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def _gelu_tanh(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)


def clamped_swiglu(alpha: float = 1.702, limit: float = 7.0) -> Activation:
    """SwiGLU of gpt-oss: `gate · sigmoid(alpha · gate) · (up + 1)`, gate clamped to ≤ limit and up to ±limit."""

    def function(gate: Array, up: Array) -> Array:
        # By comparisons: minimum and clip have derivatives of many instructions, for ties.
        gate = jnp.where(gate > limit, limit, gate)
        up = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
        return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)

    return Activation("clamped_swiglu", function, gated=True)


_ACTIVATIONS = {
    a.name: a
    for a in (
        Activation("swiglu", lambda gate, up: jax.nn.silu(gate) * up, gated=True),
        Activation("geglu", lambda gate, up: _gelu(gate) * up, gated=True),
        Activation("geglu_tanh", lambda gate, up: _gelu_tanh(gate) * up, gated=True),
        Activation("reglu", lambda gate, up: _relu(gate) * up, gated=True),
        clamped_swiglu(),
        Activation("silu", jax.nn.silu, gated=False),
        Activation("gelu", _gelu, gated=False),
        Activation("gelu_tanh", _gelu_tanh, gated=False),
        Activation("relu", _relu, gated=False),
        Activation("relu2", lambda up: jnp.square(_relu(up)), gated=False),
    )
}

ACTIVATION_NAMES = tuple(_ACTIVATIONS)


def get_activation(activation: str | Activation) -> Activation:
    """The activation of that name, or `activation` itself.

    Raises:
      ValueError: no activation has that name.
    """
    if isinstance(activation, Activation):
        return activation
    if activation not in _ACTIVATIONS:
        raise ValueError(f"{activation=} must be an Activation or one of {', '.join(ACTIVATION_NAMES)}")
    return _ACTIVATIONS[activation]
