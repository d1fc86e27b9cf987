"""The custom VJP of the experts: what is kept, what is computed again, and no buffer of routed tokens.

With rows r of pairs (token t, expert e), in the order of the experts, and g_r a row's routing weight:

    P = x[t] · W_up[e]      H = act(P)      y[t] = Σ_r g_r · H · W_down[e]

Kept are x, the weights, the index arrays, and P or nothing. Backward, with dy the gradient of y:

    dH = g_r · dy[t] · W_down[e]ᵀ     dP = dH · act'(P)     dg_r = ⟨H, dy[t] · W_down[e]ᵀ⟩
    dW_down[e] = Σ_r (g_r · H)ᵀ · dy[t]     dW_up[e] = Σ_r x[t]ᵀ · dP     dx[t] = Σ_r dP · W_up[e]ᵀ

(MoEBlaze, arXiv 2601.05296). The gathers x[t] and dy[t] happen inside the kernels; H is computed from P again.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from blaze_jax.activations import Activation
from blaze_jax.column_blocks import combine_columns
from blaze_jax.reverse_mode import differentiated_once
from pallas_kernels.contract import EMPTY_SLOT, Dispatch, Kernels
from pallas_kernels.place_values import place_values

Save = Literal["pre_activations", "inputs"]

PRE_ACTIVATION_NAMES = ("moe_gate", "moe_up")
"""Names of the saved pre-activations, for `jax.checkpoint_policies.save_only_these_names`."""

INDEX_NAME = "moe_indices"
"""Name of the index arrays, for the same policies."""

RESIDUAL_NAMES = (*PRE_ACTIVATION_NAMES, INDEX_NAME)
"""Names of all that the experts' backward pass needs in addition to the layer's inputs."""


class Parameters(NamedTuple):
    """Weights of the experts: gate and up (or up alone) with their biases (or none), then down."""

    up_weights: tuple[Float[Array, "E d n"], ...]
    up_biases: tuple[Float[Array, "E n"], ...]
    w_down: Float[Array, "E n d"]
    b_down: Float[Array, "E d"] | None


@dataclass(frozen=True)
class Settings:
    """What a layer's arrays do not say."""

    activation: Activation
    save: Save
    kernels: Kernels


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def experts_output(settings: Settings, token, x, params: Parameters, weights, experts, dispatch: Dispatch):
    """The layer's output `(T, d)`; `token` raises where it is differentiated in forward mode."""
    _, hidden = _hidden(settings, x, params, dispatch)
    return _output(settings, hidden, params, weights, experts, dispatch)


def _forward(settings: Settings, _, x, params: Parameters, weights, experts, dispatch: Dispatch):
    kept = None
    if settings.save == "pre_activations":
        pre_activations, hidden = _pre_activations_and_hidden(settings, x, params, dispatch)
        names = PRE_ACTIVATION_NAMES[-len(pre_activations) :]
        kept = tuple(checkpoint_name(p, name) for p, name in zip(pre_activations, names, strict=True))
    else:
        _, hidden = _hidden(settings, x, params, dispatch)
    y = _output(settings, hidden, params, weights, experts, dispatch)
    return y, (x, params, weights, dispatch, kept)


def _backward(settings: Settings, residuals, dy):
    x, params, weights, dispatch, pre_activations = residuals
    if pre_activations is None:
        # Without the barrier XLA would see that these were computed before, and keep them.
        x, dy = lax.optimization_barrier((x, dy))
        pre_activations, _ = _pre_activations_and_hidden(settings, x, params, dispatch)
    dx, d_params, d_weights = _gradients(settings, x, params, weights, dispatch, pre_activations, dy)
    return None, dx, d_params, d_weights, None, None


experts_output.defvjp(_forward, _backward)


def _up_projection(keep: bool, settings: Settings, x, params: Parameters, dispatch: Dispatch):
    """`P` if it is to be kept, and `H`."""
    weights, biases, act = params.up_weights, params.up_biases, settings.activation.function
    return settings.kernels.up_projection(x, weights, biases, dispatch, activation=act, keep_pre_activations=keep)


_hidden = differentiated_once(partial(_up_projection, False))
_pre_activations_and_hidden = differentiated_once(partial(_up_projection, True), partial(_up_projection, False))


@differentiated_once
def _output(settings: Settings, hidden, params: Parameters, weights, experts, dispatch: Dispatch):
    """The output `y`, a block of columns at a time."""
    # An id out of range, E, cannot raise under tracing; it must not pass for an empty slot either.
    weights = jnp.where(experts == EMPTY_SLOT, 0, jnp.where(experts < params.w_down.shape[0], weights, jnp.nan))
    rows = partial(settings.kernels.down_projection, hidden, params.w_down, params.b_down, dispatch)
    return combine_columns(settings.kernels, rows, params.w_down, dispatch, weights, hidden.dtype)


@differentiated_once
def _gradients(settings: Settings, x, params: Parameters, weights, dispatch: Dispatch, pre_activations, dy):
    """Of the tokens, the parameters, and the routing weights."""
    kernels, token_index_map = settings.kernels, dispatch.token_index_map
    dtypes = jax.tree.map(lambda array: array.dtype, params)
    row_weights = place_values(weights, token_index_map, dispatch.num_rows)
    act = settings.activation.function
    d_pre_activations, weighted_hidden, d_row_weights = kernels.down_backward(
        dy, params.w_down, params.b_down, pre_activations, row_weights, dispatch, activation=act
    )
    d_weights = d_row_weights.at[token_index_map].get(mode="fill", fill_value=0).astype(weights.dtype)
    d_down, d_down_bias = kernels.down_weight_gradients(
        weighted_hidden, dy, row_weights, dispatch, dtype=dtypes.w_down, bias_dtype=dtypes.b_down
    )
    d_up, d_up_biases = kernels.up_weight_gradients(
        x, d_pre_activations, dispatch, dtypes=dtypes.up_weights, bias_dtypes=dtypes.up_biases
    )
    rows = partial(kernels.up_backward, d_pre_activations, params.up_weights, dispatch)
    dx = combine_columns(kernels, rows, params.w_down, dispatch, None, x.dtype)
    return dx, Parameters(d_up, d_up_biases, d_down, d_down_bias), d_weights
