"""The custom VJP of the experts: what is kept, what is computed again, and no buffer of routed tokens.

With rows r of pairs (token t, expert e), in the order of the experts, and g_r a row's routing weight:

    P = x[t] · W_up[e]      H = act(P)      y[t] = Σ_r g_r · H · W_down[e]

Kept are x, the weights, the index arrays, and P or nothing. Backward, with dy the gradient of y:

    dH = g_r · dy[t] · W_down[e]ᵀ     dP = dH · act'(P)     dg_r = ⟨H, dy[t] · W_down[e]ᵀ⟩
    dW_down[e] = Σ_r (g_r · H)ᵀ · dy[t]     dW_up[e] = Σ_r x[t]ᵀ · dP     dx[t] = Σ_r dP · W_up[e]ᵀ

(MoEBlaze, arXiv 2601.05296). The gathers x[t] and dy[t] happen inside the kernels; H is computed from P again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from blaze_jax.activations import Activation
from blaze_jax.dispatch import EMPTY_SLOT
from blaze_jax.reverse_mode import differentiated_once
from pallas_kernels.compat import vary_over, varying_axes
from pallas_kernels.contract import Kernels

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


class Indices(NamedTuple):
    """Rows by expert, and the row of every (token, slot) pair; R for an empty slot."""

    groups: Any  # the kernels' own kind of row groups
    token_index_map: Int[Array, "T K"]


@dataclass(frozen=True)
class Settings:
    """What a layer's arrays do not say."""

    activation: Activation
    save: Save
    kernels: Kernels


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def experts_output(settings: Settings, token, x, params: Parameters, weights, experts, indices: Indices):
    """The layer's output `(T, d)`; `token` raises where it is differentiated in forward mode."""
    _, hidden = _up(settings, x, params, indices, keep_pre_activations=False)
    return _down(settings, hidden, params, weights, experts, indices)


def _forward(settings, _, x, params, weights, experts, indices):
    keep = settings.save == "pre_activations"
    pre_activations, hidden = _up(settings, x, params, indices, keep_pre_activations=keep)
    names = PRE_ACTIVATION_NAMES[-len(params.up_weights) :] if keep else ()
    kept = tuple(checkpoint_name(p, name) for p, name in zip(pre_activations, names, strict=True))
    y = _down(settings, hidden, params, weights, experts, indices)
    return y, (x, params, weights, indices, kept if keep else None)


def _backward(settings, residuals, dy):
    x, params, weights, indices, pre_activations = residuals
    if pre_activations is None:
        # Without the barrier XLA would see that these were computed before, and keep them.
        x, dy = lax.optimization_barrier((x, dy))
        pre_activations, _ = _up(settings, x, params, indices, keep_pre_activations=True)
    dx, d_params, d_weights = _grads(settings, x, params, weights, indices, pre_activations, dy)
    return None, dx, d_params, d_weights, None, None


experts_output.defvjp(_forward, _backward)


def _up(settings: Settings, x, params: Parameters, indices: Indices, *, keep_pre_activations: bool):
    """Pre-activations (none unless kept, and where nobody uses them) and activation of every row."""

    def run(keep_pre_activations, x, params, indices):
        return settings.kernels.up_projection(
            x,
            params.up_weights,
            params.up_biases,
            indices.groups,
            activation=settings.activation.function,
            keep_pre_activations=keep_pre_activations,
        )

    alone, both = partial(run, False), partial(run, True)
    up = differentiated_once(both, alone) if keep_pre_activations else differentiated_once(alone)
    return up(x, params, indices)


def _down(settings: Settings, hidden, params: Parameters, weights, experts, indices: Indices):
    """The layer's output from the activation of every row."""

    @differentiated_once
    def run(hidden, params, weights, experts, indices):
        kernels = settings.kernels
        # An id out of range, E, cannot raise under tracing; it must not pass for an empty slot either.
        weights = jnp.where(experts == EMPTY_SLOT, 0, jnp.where(experts < params.w_down.shape[0], weights, jnp.nan))

        def rows(first_column, num_columns):
            return kernels.down_projection(
                hidden, params.w_down, params.b_down, indices.groups, first_column, num_columns
            )

        num_experts, n, d = params.w_down.shape
        most = kernels.column_block(hidden.shape[0], d, n, num_experts, hidden.dtype)
        return combine_columns(kernels, rows, d, most, hidden.dtype, indices, weights)

    return run(hidden, params, weights, experts, indices)


def _grads(settings: Settings, x, params: Parameters, weights, indices: Indices, pre_activations, dy):
    """Gradients of tokens, parameters and routing weights."""

    @differentiated_once
    def run(x, params, weights, indices, pre_activations, dy):
        kernels = settings.kernels
        groups, position = indices.groups, indices.token_index_map
        row_weights = jnp.zeros(groups.num_rows, weights.dtype)
        # Every row is of one pair: without that word, XLA would sort the pairs where it is asked for equal bits.
        row_weights = row_weights.at[position].set(weights, mode="drop", unique_indices=True)
        d_pre_activations, weighted_hidden, d_row_weights = kernels.down_backward(
            dy,
            params.w_down,
            params.b_down,
            pre_activations,
            row_weights,
            groups,
            activation=settings.activation.function,
        )
        d_weights = d_row_weights.at[position].get(mode="fill", fill_value=0).astype(weights.dtype)
        d_down, d_down_bias = kernels.down_weight_gradients(
            weighted_hidden,
            dy,
            row_weights,
            groups,
            dtype=params.w_down.dtype,
            bias_dtype=None if params.b_down is None else params.b_down.dtype,
        )
        d_up, d_up_biases = kernels.up_weight_gradients(
            x,
            d_pre_activations,
            groups,
            dtypes=tuple(w.dtype for w in params.up_weights),
            bias_dtypes=tuple(b.dtype for b in params.up_biases),
        )

        def rows(first_column, num_columns):
            return kernels.up_backward(d_pre_activations, params.up_weights, groups, first_column, num_columns)

        num_experts, n, d = params.w_down.shape
        most = kernels.column_block(groups.num_rows, d, n, num_experts, x.dtype)
        dx = combine_columns(kernels, rows, d, most, x.dtype, indices, None)
        return dx, Parameters(d_up, d_up_biases, d_down, d_down_bias), d_weights

    return run(x, params, weights, indices, pre_activations, dy)


def block_width(width: int, most: int) -> int:
    """Columns of a block of `most` at most, where there are `width` in all: never all of them, if they are many."""
    return min(most, -(-width // 128) * 64, width)


def combine_columns(
    kernels, rows: Callable, width: int, most: int, dtype, indices: Indices, weights
) -> Float[Array, "T width"]:
    """Combines `rows(first_column, num_columns)` a block of columns at a time: only one block of rows is ever alive."""
    block = block_width(width, most)

    def step(i, y):
        # A last narrow block reaches back over columns that are done.
        first_column = jnp.minimum(i * block, width - block)
        return kernels.combine(rows(first_column, block), indices.token_index_map, weights, y, first_column)

    y = lax.empty((indices.token_index_map.shape[0], width), dtype)  # every column is written
    y = vary_over(y, varying_axes(indices))
    return lax.fori_loop(0, -(-width // block), step, y)
