"""The router and its gradient, which kernels that jax cannot differentiate bring along, in reverse mode alone."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from blaze_jax.reverse_mode import REVERSE_MODE_ONLY, differentiated_once
from pallas_kernels.compat import reverse_mode_token
from pallas_kernels.contract import Kernels, Routed, Rule


def differentiable_router(
    kernels: Kernels, logits: Float[Array, "T E"], bias: Float[Array, " E"] | None, rule: Rule
) -> Routed:
    """What the router of these kernels returns; its weights, losses and probability have a gradient."""
    if kernels.transformable:
        return kernels.router(logits, bias, rule)
    return _with_gradient((kernels, rule), reverse_mode_token(REVERSE_MODE_ONLY, logits), logits, bias)


@differentiated_once
def _router(settings: tuple[Kernels, Rule], logits, bias) -> Routed:
    kernels, rule = settings
    return kernels.router(logits, bias, rule)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient(settings: tuple[Kernels, Rule], token, logits, bias) -> Routed:
    return _router(settings, logits, bias)


def _forward(settings: tuple[Kernels, Rule], _, logits, bias):
    routed = _router(settings, logits, bias)
    return routed, (logits, bias, routed.experts, routed.demand)


def _backward(settings: tuple[Kernels, Rule], residuals, d: Routed):
    (kernels, rule), (logits, bias, experts, demand) = settings, residuals
    d_logits = kernels.router_backward(logits, experts, demand, d.weights, d.losses, d.probability, rule)
    return None, d_logits, None if bias is None else jnp.zeros_like(bias)


_with_gradient.defvjp(_forward, _backward)
