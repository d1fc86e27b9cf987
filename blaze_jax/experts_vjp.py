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

On one device, tokens whose H would be most of the memory are computed a range at a time, in both passes.
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
from blaze_jax.expert_blocks import Blocks, Journeys
from blaze_jax.reverse_mode import differentiated_once
from blaze_jax.token_ranges import TokenRanges
from pallas_kernels.compat import vary_over
from pallas_kernels.contract import EMPTY_SLOT, Dispatch, Kernels, accumulator_dtype
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
      dispatch: the group's pairs with experts of this device; where tokens are in ranges, each one's, stacked.
      plan: what their transport needs to know.
      most_pairs: of the device of the group with the most, None if that is not known.
    """

    x: Float[Array, "T d"]
    weights: Float[Array, "T_group K"]
    experts: Int[Array, "T_group K"]
    dispatch: Dispatch
    plan: Plan = None
    most_pairs: Int[Array, ""] | None = None


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
      ranges: of tokens; None for all at once.
    """

    activation: Activation
    save: Save
    kernels: Kernels
    transport: Transport = HERE
    row_budget: int | None = None
    ranges: TokenRanges | None = None

    def turns(self, part: Tokens) -> tuple[Rows, Int[Array, ""] | None]:
        """The rows of the budget, and how many turns take the others; None if there are never others."""
        dispatch, axes = part.dispatch, self.transport.in_step  # all take part in every transport
        if self.row_budget is None or self.row_budget >= dispatch.num_rows:
            return self._in_parts(dispatch), None
        rows = dispatch.expert_token_offsets[-1]
        if part.most_pairs is not None:
            groups = dispatch.num_experts
            rows, axes = part.most_pairs + groups * (ROW_MULTIPLE - 1), axes - set(self.transport.group)
        turns = jnp.maximum(rows - self.row_budget + self.turn_rows - 1, 0) // self.turn_rows
        if axes:
            turns = lax.pmax(vary_over(turns, axes), tuple(sorted(axes)))
        return self._in_parts(self.kernels.row_range(dispatch, 0, self.row_budget)), turns

    def rows_of_turn(self, dispatch: Dispatch, turn: Int[Array, ""] | int) -> Rows:
        """The rows that a turn takes."""
        assert self.row_budget is not None
        first = self.row_budget + turn * self.turn_rows
        return self._in_parts(self.kernels.row_range(dispatch, first, self.turn_rows))

    def _in_parts(self, dispatch: Dispatch) -> Rows:
        if self.transport.parts == 1 or self.kernels.in_parts is None:
            return Rows(dispatch, (dispatch,))
        return Rows(*self.kernels.in_parts(dispatch, self.transport.parts))

    def blocks(self, rows: Dispatch) -> tuple[Dispatch, ...]:
        """The rows by block of experts."""
        if self.transport.blocks == 1 or self.kernels.of_experts is None:
            return (rows,)
        experts = rows.num_experts // self.transport.blocks
        return tuple(self.kernels.of_experts(rows, first, experts) for first in range(0, rows.num_experts, experts))

    def pieces(self, rows: Dispatch, pieces: int) -> tuple[tuple[Dispatch, ...], ...]:
        """The same, each block but the last in so many pieces: while one is computed, one array of the next comes."""
        blocks = self.transport.blocks
        experts = rows.num_experts // blocks
        if blocks == 1 or self.kernels.of_experts is None or experts % pieces:
            return tuple((block,) for block in self.blocks(rows))
        of_experts = partial(self.kernels.of_experts, rows)
        *firsts, last = range(0, rows.num_experts, experts)
        step = experts // pieces
        cut = [
            tuple(of_experts(piece, step, counted_from=first) for piece in range(first, first + experts, step))
            for first in firsts
        ]
        return (*cut, (of_experts(last, experts),))

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
    transport = settings.transport
    if transport.fsdp:  # XLA would gather the parameters of all layers at once
        x, shards = lax.optimization_barrier((parts[0].x, shards))
        parts = (parts[0]._replace(x=x), *parts[1:])
    params = transport.parameters(shards, parts[0].x.dtype)
    compute = partial(_part_output, settings, params, up_projection)
    for part in parts:
        y, pre_activations, xs = _output_in_ranges(settings.ranges, compute, part) if settings.ranges else compute(part)
        yield y, pre_activations, (xs, params)


def _part_output(settings: Settings, params: Parameters, up_projection: Callable, part: Tokens):
    transport, x = settings.transport, part.x
    rows, turns = settings.turns(part)
    if transport.own_first:  # apart from the weights and ids, with which XLA would send few tokens
        x, _ = lax.optimization_barrier((x, part.weights))
    xs = transport.arrivals(part.plan, x)
    pre_activations, (hidden, others) = up_projection(settings, xs, params, rows)
    downs = [(params.w_down, params.b_down), *others]

    def output(further: bool):
        y = _output(settings, hidden, downs, part, rows)
        if not further:
            return y
        again = transport.arrivals(part.plan, part.x)

        def add_turn(i, y):
            rows = settings.rows_of_turn(part.dispatch, i)
            _, (hidden, others) = _hidden(settings, again, params, rows)
            return y + _output(settings, hidden, [downs[0], *others], part, rows)

        return lax.fori_loop(0, turns, add_turn, y)

    return _with_turns(turns, output), pre_activations, xs


def _output_in_ranges(ranges: TokenRanges, compute: Callable, part: Tokens):
    def step(start, dispatch):
        weights, experts = (ranges.of(array, start) for array in (part.weights, part.experts))
        y, pre_activations, _ = compute(Tokens(part.x, weights, experts, dispatch))
        return y, (), pre_activations

    y, _, pre_activations = ranges.one_by_one(step, part.x.shape[0], (), part.dispatch)
    return y, pre_activations, (part.x,)


def _backward(settings: Settings, residuals, d_outputs):
    parts, shards, kept, gathered = residuals
    transport = settings.transport
    xs = [part.x for part in parts] if gathered is None else [xs for xs, _ in gathered]
    if kept is None or gathered is None:  # XLA would see that what follows was computed before, and keep it
        xs, shards, d_outputs = lax.optimization_barrier((xs, shards, d_outputs))
    params, scatter_params = jax.vjp(lambda s: transport.parameters(s, parts[0].x.dtype), shards)
    params = params if gathered is None else gathered[0][1]
    dxs, d_params, d_weights = [], None, []
    for i, part in enumerate(parts):
        x, dy = xs[i], transport.arrivals(part.plan, d_outputs[i])
        if gathered is None and (kept is None or not transport.own_first):
            x = transport.arrivals(part.plan, lax.optimization_barrier((x, dy[-1]))[0])
        compute = partial(_part_gradients, settings, params)
        if settings.ranges:
            own = part._replace(x=x[0])
            gradients = _gradients_in_ranges(settings.ranges, compute, params, own, dy[0], kept and kept[i])
        else:
            gradients = compute(part, x, dy, kept and kept[i])
        dxs.append(gradients[0])
        d_weights.append(gradients[2])
        d_params = gradients[1] if d_params is None else _add(d_params, gradients[1])
    d_parts = tuple(Tokens(dx, dw, None, None) for dx, dw in zip(dxs, d_weights, strict=True))  # pyright: ignore[reportArgumentType]
    return None, d_parts, scatter_params(d_params)[0]


experts_output.defvjp(_forward, _backward)


def _with_turns(turns: Int[Array, ""] | None, run: Callable):
    """`run(further)`, which takes the further turns only if there are any.

    The host waits for their number here, between long kernels: after them it would fall behind the device.
    """
    return run(False) if turns is None else lax.cond(turns == 0, partial(run, False), partial(run, True))


def _part_gradients(settings: Settings, params: Parameters, part: Tokens, xs, dys, pre_activations, dtypes=None):
    """Of the part's tokens, the parameters, and the group's routing weights."""
    rows, turns = settings.turns(part)
    if pre_activations is None:
        pre_activations, _ = _pre_activations_and_hidden(settings, xs, params, rows)
    return _gradients((settings, dtypes), xs, params, part, rows, turns, pre_activations, dys)


def _gradients_in_ranges(ranges: TokenRanges, compute: Callable, params: Parameters, part: Tokens, dy, kept):
    """Those of the parameters are added up wide, and rounded once."""
    dtypes = jax.tree.map(lambda array: accumulator_dtype(array.dtype), params)

    def step(start, dispatch, kept):
        own = part._replace(weights=ranges.of(part.weights, start), dispatch=dispatch)
        dx, d_params, d_weights = compute(own, (part.x,), (dy,), kept, dtypes)
        return (dx, d_weights), d_params, ()

    sums = jax.tree.map(lambda array, dtype: jnp.zeros(array.shape, dtype), params, dtypes)
    (dx, d_weights), sums, _ = ranges.one_by_one(step, part.x.shape[0], sums, part.dispatch, kept)
    return dx, jax.tree.map(lambda total, array: total.astype(array.dtype), sums, params), d_weights


def _add(tree, other):
    return jax.tree.map(jnp.add, tree, other)


def _together(parts: tuple[Array, ...]):
    """All parts, as kernels that compute in parts take them, and others, which get one."""
    return parts[0] if len(parts) == 1 else parts


def _up_projection(keep: bool, settings: Settings, xs: tuple[Array, ...], params: Parameters, rows: Rows):
    """`P` if it is to be kept, `H`, and the down projection's parameters of other devices' blocks of experts."""
    transport = settings.transport
    options: dict[str, Any] = {"activation": settings.activation.function, "keep_pre_activations": keep}
    into: dict[str, Any] = {}
    ups, downs = Blocks(transport, _pairs(params)), Blocks(transport, [(params.w_down, params.b_down)])
    following = Journeys([*ups.journeys, *downs.journeys])
    for x, own in zip(xs, rows.parts, strict=True):
        for b, pieces in enumerate(settings.pieces(own, len(params.up_weights))):
            following.start_all((x, into), number=b * len(params.up_weights))
            for piece in pieces:
                x, into = following.start((x, into))
                weights, biases = zip(*ups[b], strict=True)
                biases = biases if params.up_biases else ()
                into = {"into": settings.kernels.up_projection(x, weights, biases, piece, **options, **into)}
    following.start_all(into)
    pre_activations, hidden = _in_place(into["into"], len(xs) * transport.blocks)
    return pre_activations, (hidden, tuple(down for (down,) in list(downs)[1:]))


def _pairs(params: Parameters) -> list[tuple[Array, Array | None]]:
    """The up projections' weights, each with its biases or None."""
    return list(zip(params.up_weights, params.up_biases or (None,) * len(params.up_weights), strict=True))


def _in_place(arrays, parts: int):
    """`arrays`, of which a kernel writes one of `parts` and trusts XLA that the other rows are there.

    For one layer of a stack, XLA would give it the stack's memory for its result alone (see `mosaic/in_place.py`).
    """
    return arrays if parts == 1 else lax.optimization_barrier(arrays)


_hidden = differentiated_once(partial(_up_projection, False))
_pre_activations_and_hidden = differentiated_once(partial(_up_projection, True), partial(_up_projection, False))


@differentiated_once
def _output(settings: Settings, hidden, downs, part: Tokens, rows: Rows):
    """The output `y` of this device's tokens, a block of columns at a time."""
    # An id out of range, E, cannot raise under tracing; it must not pass for an empty slot either.
    experts, num_experts = part.experts, sum(w_down.shape[0] for w_down, _ in downs)
    weights = jnp.where(experts == EMPTY_SLOT, 0, jnp.where(experts < num_experts, part.weights, jnp.nan))
    sums = _Sums(settings, downs[0][0], part, rows, weights, hidden.dtype)

    def down_projection(hidden, own):
        kernel = partial(settings.kernels.down_projection, hidden)
        return _by_block(
            [partial(kernel, *down, of_block) for down, of_block in zip(downs, settings.blocks(own), strict=True)]
        )

    away, hidden = sums.departing(down_projection, hidden)
    return sums.staying(down_projection, hidden, away)


def _by_block(kernels: list[Callable]) -> Callable:
    """The rows `(first_column, num_columns)` of all blocks of experts, written one block after the other."""

    def rows(first_column, num_columns):
        options: dict[str, Any] = {}
        for kernel in kernels:
            options["into"] = kernel(first_column, num_columns, **options)
        return _in_place(options["into"], len(kernels))

    return rows


@differentiated_once
def _gradients(of, xs, params: Parameters, part: Tokens, rows: Rows, turns, pre_activations, dys):
    """Of this device's tokens, its parameters, and the group's routing weights.

    `of` are the settings, and dtypes of the parameters' gradients; None for their own. `xs` come in as many parts as
    `dys`, or are this device's and have to travel again.
    """
    settings, dtypes = of
    kernels, transport = settings.kernels, settings.transport
    token_index_map, weights = rows.all.token_index_map, part.weights
    dtypes = dtypes or jax.tree.map(lambda array: array.dtype, params)
    row_weights = place_values(weights, token_index_map, rows.all.num_rows)
    ups = Blocks(transport, _pairs(params))
    following = Journeys(ups.journeys)
    operands, d_row_weights = _down_backward(settings, dys, params, row_weights, rows, pre_activations, following)
    if transport.devices > 1:
        following.start_all(d_row_weights[-1])

    def up_backward(operands, own):
        kernel = partial(kernels.up_backward, operands[0])
        blocks = zip(ups, settings.blocks(own), strict=True)
        return _by_block([partial(kernel, tuple(w for w, _ in block), of_block) for block, of_block in blocks])

    def others(further: bool):
        x = xs
        if not isinstance(x, tuple):
            x = transport.arrivals(part.plan, lax.optimization_barrier((x, d_row_weights[-1]))[0])
        sums = _Sums(settings, params.w_down, part, rows, None, x[0].dtype)
        away, results = sums.departing(up_backward, operands)
        d_params, results = _weight_gradients(
            settings, _together(x), _together(dys), row_weights, rows, dtypes, results, following
        )
        d_weights = reduce(jnp.add, d_row_weights).at[token_index_map].get(mode="fill", fill_value=0)
        gradients = sums.staying(up_backward, results, away), d_params, d_weights.astype(weights.dtype)

        def add_turn(turn, gradients):
            rows = settings.rows_of_turn(part.dispatch, turn)
            pre_activations, _ = _pre_activations_and_hidden(settings, x, params, rows)
            return _add(gradients, _gradients(of, x, params, part, rows, None, pre_activations, dys))

        return lax.fori_loop(0, turns, add_turn, gradients) if further else gradients

    return _with_turns(turns, others)


def _down_backward(
    settings: Settings, dys, params: Parameters, row_weights, rows: Rows, pre_activations, following: Journeys
):
    """`dP`, which takes the place of `P` a part at a time, `g · H`, and `dg` of each part's rows."""
    transport = settings.transport
    pre_activations = _in_place(pre_activations, len(dys) * transport.blocks)
    downs = Blocks(transport, [(params.w_down, params.b_down)])
    following.add_first(downs.journeys)
    options: dict[str, Any] = {"activation": settings.activation.function}
    d_row_weights = []
    for dy, own in zip(dys, rows.parts, strict=True):
        for ((w_down, b_down),), of_block in zip(downs, settings.blocks(own), strict=True):
            dy = following.start(dy, d_row_weights[-1:])
            pre_activations, options["into"], d_weights = settings.kernels.down_backward(
                dy, w_down, b_down, pre_activations, row_weights, of_block, **options
            )
            d_row_weights.append(d_weights)
    return (pre_activations, options["into"]), d_row_weights


def _weight_gradients(
    settings: Settings, x, dy, row_weights, rows: Rows, dtypes: Parameters, operands, journeys: Journeys
):
    """Gradients of this device's parameters, summed over the devices, and `operands` once they are computed.

    `operands` are `dP` and `g · H`. Other devices' blocks come first: their gradients leave while others are computed.
    """
    transport, kernels = settings.transport, settings.kernels
    home, arrived = [], []

    def one_at_a_time(result):
        return lax.optimization_barrier((result, operands)) if transport.blocks > 1 else (result, operands)

    def leave(block, gradients):
        def depart(after):
            arrived.append(transport.block_departs(gradients, block, after))
            return arrived[-1]

        journeys.add([depart] if block else [])

    for block, own in reversed(list(enumerate(settings.blocks(rows.all)))):
        operands = journeys.start(operands)
        d_down = kernels.down_weight_gradients(
            operands[1], dy, row_weights, own, dtype=dtypes.w_down, bias_dtype=dtypes.b_down
        )
        d_down, operands = one_at_a_time(d_down)
        leave(block, d_down)
        operands = journeys.start(operands)
        d_up, d_up_biases = kernels.up_weight_gradients(
            x, operands[0], own, dtypes=dtypes.up_weights, bias_dtypes=dtypes.up_biases
        )
        (d_up, d_up_biases), operands = one_at_a_time((d_up, d_up_biases))
        d_ups = list(zip(d_up, d_up_biases or (None,) * len(d_up), strict=True))
        for pair in d_ups:
            leave(block, pair)
        home = [d_down, *d_ups]
    operands = journeys.start(operands)
    journeys.start_all(operands)
    for i, gradients in enumerate(arrived):
        home[i % len(home)] = _add(home[i % len(home)], gradients)
    (d_down, d_down_bias), *d_ups = home
    d_up, d_up_biases = zip(*d_ups, strict=True)
    return Parameters(d_up, d_up_biases if dtypes.up_biases else (), d_down, d_down_bias), operands


class _Sums(NamedTuple):
    """The sums of the tokens' rows, a block of columns at a time; those of other devices' tokens leave for there."""

    settings: Settings
    w_down: Array
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
                options = (self.w_down, own, weights, self.dtype)
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
            combine_columns(
                self.settings.kernels,
                rows_of(operands, own),
                self.w_down,
                own,
                weights,
                self.dtype,
                at_once=self.settings.ranges is not None,
            )
            for own, weights, depart in self._parts()
            if depart is None
        ]
        return reduce(jnp.add, own_sums + away)

    def _parts(self):
        parts = len(self.rows.parts)
        departures = self.settings.transport.departures(self.part.plan, parts)
        weights = [None] * parts if self.weights is None else jnp.split(self.weights, parts)
        return zip(self.rows.parts, weights, departures, strict=True)
