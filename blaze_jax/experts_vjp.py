"""The custom VJP of the experts: what is kept, what is computed again, and no buffer of routed tokens.

With rows r of pairs (token t, expert e), in the order of the experts, and g_r a row's routing weight:

    P = x[t] · W_up[e]      H = act(P)      y[t] = Σ_r g_r · H · W_down[e]

Kept are x, the weights, the index arrays, and P or nothing. Backward, with dy the gradient of y:

    dH = g_r · dy[t] · W_down[e]ᵀ     dP = dH · act'(P)     dg_r = ⟨H, dy[t] · W_down[e]ᵀ⟩
    dW_down[e] = Σ_r (g_r · H)ᵀ · dy[t]     dW_up[e] = Σ_r x[t]ᵀ · dP     dx[t] = Σ_r dP · W_up[e]ᵀ

(MoEBlaze, arXiv 2601.05296). The gathers x[t] and dy[t] happen inside the kernels; H is computed from P again.

Over devices, x and dy are gathered and y and dx scattered, each by the transpose of the other, and so are the weights
and their gradients. Tokens may come in parts: their rows are computed as they arrive, into the same P, and those sums
that leave come before those that stay. With a budget of rows, P is kept of as many rows, and the others are computed in
further turns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from blaze_jax.activations import Activation
from blaze_jax.column_blocks import combine_columns, departing_columns
from blaze_jax.exchange import HERE, Plan, Transport
from blaze_jax.reverse_mode import differentiated_once
from pallas_kernels.compat import vary_over
from pallas_kernels.contract import EMPTY_SLOT, Dispatch, Kernels
from pallas_kernels.place_values import place_values

ROW_MULTIPLE = 8
"""Budgets of rows are multiples of it, as groups of rows are in every family of kernels."""

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


class Tokens(NamedTuple):
    """Tokens of this device, or those that travel at a time, and their pairs on all devices of the group.

    Attributes:
      x: `(T, d)`, this device's.
      weights: `(T_group, K)`, the group's.
      experts: `(T_group, K)`, ids of experts of this device, -1 for those of others.
      dispatch: the group's pairs with experts of this device.
      plan: what their transport needs to know.
    """

    x: Float[Array, "T d"]
    weights: Float[Array, "T_group K"]
    experts: Int[Array, "T_group K"]
    dispatch: Dispatch
    plan: Plan = None


class Rows(NamedTuple):
    """Rows to compute: all, and those of each part of the tokens."""

    all: Dispatch
    parts: tuple[Dispatch, ...]


@dataclass(frozen=True)
class Settings:
    """What a layer's arrays do not say.

    Attributes:
      activation, save: see `expert_ffn`.
      kernels: that compute.
      transport: of tokens and parameters.
      row_budget: rows of a buffer; None for as many as there may be.
    """

    activation: Activation
    save: Save
    kernels: Kernels
    transport: Transport = HERE
    row_budget: int | None = None

    def turns(self, dispatch: Dispatch) -> tuple[Rows, Int[Array, ""] | None]:
        """The rows of the budget, and how many turns take the others; None if there are never others."""
        if self.row_budget is None or self.row_budget >= dispatch.num_rows:
            return self._in_parts(dispatch), None
        others = dispatch.expert_token_offsets[-1] - self.row_budget
        turns = jnp.maximum(others + self.turn_rows - 1, 0) // self.turn_rows
        if axes := self.transport.in_step:  # all take part in every transport
            turns = lax.pmax(vary_over(turns, axes), tuple(sorted(axes)))
        return self._in_parts(self.kernels.row_range(dispatch, 0, self.row_budget)), turns

    def rows_of_turn(self, dispatch: Dispatch, turn: Int[Array, ""] | int) -> Rows:
        """The rows that a turn takes, all at once."""
        assert self.row_budget is not None
        rows = self._in_parts(self.kernels.row_range(dispatch, self.row_budget + turn * self.turn_rows, self.turn_rows))
        return Rows(rows.all, (rows.all,))

    def _in_parts(self, dispatch: Dispatch) -> Rows:
        if self.transport.parts == 1 or self.kernels.in_parts is None:
            return Rows(dispatch, (dispatch,))
        return Rows(*self.kernels.in_parts(dispatch, self.transport.parts))

    @property
    def turn_rows(self) -> int:
        """Rows of a turn: fewer than the budget, for a turn adds to gradients and so has those of the weights twice."""
        assert self.row_budget is not None
        return -(-self.row_budget // (4 * ROW_MULTIPLE)) * ROW_MULTIPLE


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def experts_output(settings: Settings, token, parts: tuple[Tokens, ...], shards: Parameters) -> tuple[Array, ...]:
    """The layer's output `(T, d)` for each part; `token` raises where it is differentiated in forward mode."""
    return tuple(y for y, *_ in _outputs(settings, parts, shards, _hidden))


def _forward(settings: Settings, _, parts: tuple[Tokens, ...], shards: Parameters):
    up_projection = _pre_activations_and_hidden if settings.save == "pre_activations" else _hidden
    outputs, pre_activations, gathered = zip(*_outputs(settings, parts, shards, up_projection), strict=True)
    if settings.save == "pre_activations":
        names = PRE_ACTIVATION_NAMES[-len(pre_activations[0]) :]
        kept = tuple(tuple(map(checkpoint_name, p, names)) for p in pre_activations)
    else:
        kept = None
    parts = tuple(part._replace(experts=None) for part in parts)  # pyright: ignore[reportArgumentType]  (of no use)
    return outputs, (parts, shards, kept, gathered if settings.transport.keep else None)


def _outputs(settings: Settings, parts: tuple[Tokens, ...], shards: Parameters, up_projection: Callable):
    """Of each part: the output, pre-activations of the first turn's rows, and what was gathered."""
    params = settings.transport.parameters(shards, parts[0].x.dtype)
    for part in parts:
        x = part.x
        if settings.transport.own_first:  # apart from the weights and ids, with which XLA would send few tokens
            x, _ = lax.optimization_barrier((x, part.weights))
        xs = settings.transport.arrivals(part.plan, x)
        first, turns = settings.turns(part.dispatch)
        pre_activations, hidden = up_projection(settings, xs, params, first)
        y = _output(settings, hidden, params, part, first)

        def add_turn(i, y, part=part, xs=xs):
            rows = settings.rows_of_turn(part.dispatch, i)
            _, hidden = _hidden(settings, (_joined(xs),), params, rows)
            return y + _output(settings, hidden, params, part, rows)

        yield y if turns is None else lax.fori_loop(0, turns, add_turn, y), pre_activations, (xs, params)


def _backward(settings: Settings, residuals, d_outputs):
    parts, shards, kept, gathered = residuals
    transport = settings.transport
    xs = [part.x for part in parts] if gathered is None else [xs for xs, _ in gathered]
    # Without the barriers XLA would see that what follows was computed before, and keep it.
    if kept is None or gathered is None:
        xs, d_outputs = lax.optimization_barrier((xs, d_outputs))
    if gathered is None:
        shards = lax.optimization_barrier(shards)
    params, scatter_params = jax.vjp(lambda s: transport.parameters(s, parts[0].x.dtype), shards)
    params = params if gathered is None else gathered[0][1]
    dxs, d_params, d_weights = [], None, []
    for i, part in enumerate(parts):
        x, dy = xs[i], transport.arrivals(part.plan, d_outputs[i])
        if gathered is None:  # the gradients are needed first
            x = transport.arrivals(part.plan, lax.optimization_barrier((x, dy[-1]))[0])
        first, turns = settings.turns(part.dispatch)
        pre_activations = kept[i] if kept else _pre_activations_and_hidden(settings, x, params, first)[0]
        gradients = _gradients(settings, x, params, part, first, pre_activations, dy)

        def add_turn(turn, gradients, part=part, x=x, dy=dy):
            rows, x, dy = settings.rows_of_turn(part.dispatch, turn), (_joined(x),), (_joined(dy),)
            pre_activations, _ = _pre_activations_and_hidden(settings, x, params, rows)
            return _add(gradients, _gradients(settings, x, params, part, rows, pre_activations, dy))

        if turns is not None:
            gradients = lax.fori_loop(0, turns, add_turn, gradients)
        dxs.append(gradients[0])
        d_weights.append(gradients[2])
        d_params = gradients[1] if d_params is None else _add(d_params, gradients[1])
    d_parts = tuple(Tokens(dx, dw, None, None, None) for dx, dw in zip(dxs, d_weights, strict=True))  # pyright: ignore[reportArgumentType]
    return None, d_parts, scatter_params(d_params)[0]


experts_output.defvjp(_forward, _backward)


def _add(tree, other):
    return jax.tree.map(jnp.add, tree, other)


def _joined(parts: tuple[Array, ...]) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _up_projection(keep: bool, settings: Settings, xs: tuple[Array, ...], params: Parameters, rows: Rows):
    """`P` if it is to be kept, and `H`."""
    options: dict[str, Any] = {"activation": settings.activation.function, "keep_pre_activations": keep}
    for x, own in zip(xs, rows.parts, strict=True):
        options["into"] = settings.kernels.up_projection(x, params.up_weights, params.up_biases, own, **options)
    return options["into"] if len(xs) == 1 else _in_place(options["into"])


def _in_place(arrays):
    """`arrays`, of which a kernel writes a part of the rows and trusts XLA that the others are there.

    For one layer of a stack, XLA would give it the stack's memory for its result alone (see `mosaic/in_place.py`).
    """
    return lax.optimization_barrier(arrays)


_hidden = differentiated_once(partial(_up_projection, False))
_pre_activations_and_hidden = differentiated_once(partial(_up_projection, True), partial(_up_projection, False))


@differentiated_once
def _output(settings: Settings, hidden, params: Parameters, part: Tokens, rows: Rows):
    """The output `y` of this device's tokens, a block of columns at a time."""
    # An id out of range, E, cannot raise under tracing; it must not pass for an empty slot either.
    experts, num_experts = part.experts, params.w_down.shape[0]
    weights = jnp.where(experts == EMPTY_SLOT, 0, jnp.where(experts < num_experts, part.weights, jnp.nan))
    sums = _Sums(settings, params, part, rows, weights, hidden.dtype)

    def down_projection(hidden, own):
        return partial(settings.kernels.down_projection, hidden, params.w_down, params.b_down, own)

    away, hidden = sums.departing(down_projection, hidden)
    return sums.staying(down_projection, hidden, away)


@differentiated_once
def _gradients(settings: Settings, xs, params: Parameters, part: Tokens, rows: Rows, pre_activations, dys):
    """Of this device's tokens, the parameters, and the group's routing weights."""
    kernels, token_index_map, weights = settings.kernels, rows.all.token_index_map, part.weights
    dtypes = jax.tree.map(lambda array: array.dtype, params)
    row_weights = place_values(weights, token_index_map, rows.all.num_rows)
    d_pre_activations, weighted_hidden, d_row_weights = _down_backward(
        settings, dys, params, row_weights, rows, pre_activations
    )
    d_weights = d_row_weights.at[token_index_map].get(mode="fill", fill_value=0).astype(weights.dtype)
    sums = _Sums(settings, params, part, rows, None, xs[0].dtype)

    def up_backward(d_pre_activations, own):
        return partial(kernels.up_backward, d_pre_activations, params.up_weights, own)

    away, (d_pre_activations, weighted_hidden) = sums.departing(
        lambda results, own: up_backward(results[0], own), (d_pre_activations, weighted_hidden)
    )
    d_down, d_down_bias = kernels.down_weight_gradients(
        weighted_hidden, _joined(dys), row_weights, rows.all, dtype=dtypes.w_down, bias_dtype=dtypes.b_down
    )
    d_up, d_up_biases = kernels.up_weight_gradients(
        _joined(xs), d_pre_activations, rows.all, dtypes=dtypes.up_weights, bias_dtypes=dtypes.up_biases
    )
    dx = sums.staying(up_backward, d_pre_activations, away)
    return dx, Parameters(d_up, d_up_biases, d_down, d_down_bias), d_weights


def _down_backward(settings: Settings, dys, params: Parameters, row_weights, rows: Rows, pre_activations):
    """`dP`, which takes the place of `P` a part at a time, `g · H`, and `dg` of every row."""
    if len(rows.parts) > 1:
        pre_activations = _in_place(pre_activations)
    options: dict[str, Any] = {"activation": settings.activation.function}
    d_row_weights = []
    for dy, own in zip(dys, rows.parts, strict=True):
        pre_activations, options["into"], d_weights = settings.kernels.down_backward(
            dy, params.w_down, params.b_down, pre_activations, row_weights, own, **options
        )
        d_row_weights.append(d_weights)
    return pre_activations, options["into"], reduce(jnp.add, d_row_weights)


class _Sums(NamedTuple):
    """The sums of the tokens' rows, a block of columns at a time; those of other devices' tokens leave for there."""

    settings: Settings
    params: Parameters
    part: Tokens
    rows: Rows
    weights: Array | None
    dtype: Any

    def departing(self, rows_of: Callable, operands):
        """Sums on their way to other devices, or from there, and `operands` as they are once those were computed.

        `rows_of(operands, dispatch)` is as for `combine_columns`.
        """
        away = []
        for own, weights, depart in self._parts():
            if depart is not None:
                rows = rows_of(operands, own)
                options = (self.params.w_down, own, weights, self.dtype)
                if self.settings.transport.own_first:
                    last = combine_columns(self.settings.kernels, rows, *options)
                    y = depart(last)
                else:
                    y, last = departing_columns(self.settings.kernels, rows, *options, depart)
                operands, _ = lax.optimization_barrier((operands, last))
                away.append(y)
        return away, operands

    def staying(self, rows_of: Callable, operands, away: list[Array]) -> Array:
        """The sums of this device's tokens, to which those from `away` are added."""
        own_sums = [
            combine_columns(self.settings.kernels, rows_of(operands, own), self.params.w_down, own, weights, self.dtype)
            for own, weights, depart in self._parts()
            if depart is None
        ]
        return reduce(jnp.add, own_sums + away)

    def _parts(self):
        parts = len(self.rows.parts)
        departures = self.settings.transport.departures(self.part.plan, parts)
        weights = [None] * parts if self.weights is None else jnp.split(self.weights, parts)
        return zip(self.rows.parts, weights, departures, strict=True)
