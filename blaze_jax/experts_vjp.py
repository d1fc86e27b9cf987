"""The experts and their gradient: six kernels, what is kept, what is computed again, and no buffer of routed tokens.

With rows r of pairs (token t, expert e), in the order of the experts, and g_r a row's routing weight:

    P = x[t] · W_up[e]      H = act(P)      y[t] = Σ_r g_r · H · W_down[e]

Kept are x, the weights, the index arrays, and P or nothing. Backward, with dy the gradient of y:

    dH = g_r · dy[t] · W_down[e]ᵀ     dP = dH · act'(P)     dg_r = ⟨H, dy[t] · W_down[e]ᵀ⟩
    dW_down[e] = Σ_r (g_r · H)ᵀ · dy[t]     dW_up[e] = Σ_r x[t]ᵀ · dP     dx[t] = Σ_r dP · W_up[e]ᵀ

(MoEBlaze, arXiv 2601.05296). The gathers x[t] and dy[t] happen inside the kernels; H is computed from P again.

`plan.py` says in which cuts the rows are computed, `schedule.py` what waits and travels. Over devices, x and dy are
gathered and y and dx scattered, each by the transpose of the other, and so are the weights and their gradients. With a
budget of rows, P is kept of as many rows, and that of the others is computed again.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import batched
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from blaze_jax import low_rank
from blaze_jax.gradient_sums import NO_SUMS, GradientSums, one_example
from blaze_jax.plan import Parameters, Plan, Projection, Rows, TokenRanges, Tokens, weights_and_biases, with_frozen
from blaze_jax.precision import hidden_bound
from blaze_jax.schedule import Journeys, after, in_place, to_come, token_sums, with_turns
from blaze_jax.transformations import differentiated_once
from pallas_kernels.codings import numbers_of
from pallas_kernels.contract import EMPTY_SLOT, Dispatch, Quantized, Sums, accumulator_dtype, place_values
from pallas_kernels.xla.loops import empty

PRE_ACTIVATION_NAMES = ("moe_gate", "moe_up")
"""Names of the saved pre-activations, for `jax.checkpoint_policies.save_only_these_names`."""

INDEX_NAME = "moe_indices"
"""Name of the index arrays, for the same policies."""

RESIDUAL_NAMES = (*PRE_ACTIVATION_NAMES, INDEX_NAME)
"""Names of all that the experts' backward pass needs in addition to the layer's inputs."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def experts_output(
    plan: Plan, token, chunks: tuple[Tokens, ...], shards: Parameters, sums: GradientSums = NO_SUMS
) -> tuple[tuple[Array, ...], Parameters | None]:
    """The layer's output `(T, d)` for each chunk; `token` raises where it is differentiated in forward mode.

    And the arrays of `sums` as they are: to their gradients, which are running sums, those of the weights are added in
    place, and the weights' own are zero.
    """
    return tuple(y for y, *_ in _outputs(plan, chunks, shards, _hidden_only)), sums.arrays


def _forward(plan: Plan, _, chunks: tuple[Tokens, ...], shards: Parameters, sums: GradientSums = NO_SUMS):
    up_projection = _hidden_only if plan.save == "inputs" else _pre_activations_and_hidden
    outputs, pre_activations, gathered = zip(*_outputs(plan, chunks, shards, up_projection), strict=True)
    kept = None
    if plan.save != "inputs":
        names = PRE_ACTIVATION_NAMES[-len(shards.ups) :]
        # Or both passes would mix where dy does not depend on y.
        if plan.ranges or (plan.transport.keep and plan.transport.group):
            outputs, pre_activations = lax.optimization_barrier((outputs, pre_activations))

        def named(arrays):
            return tuple(map(checkpoint_name, arrays, names))

        kept = tuple(tuple(map(named, p)) if plan.ranges else named(p) for p in pre_activations)
    chunks = tuple(chunk._replace(experts=None) for chunk in chunks)  # pyright: ignore[reportArgumentType]  (of no use)
    residuals = chunks, shards, kept, gathered if plan.keep else None, sums.first
    return (outputs, sums.arrays), residuals


def _outputs(plan: Plan, chunks: tuple[Tokens, ...], shards: Parameters, up_projection: Callable):
    """Yields each chunk's output, pre-activations of the first turn's rows, and what was gathered."""
    if plan.transport.fsdp:  # or XLA would gather the parameters of all layers at once
        x, shards = lax.optimization_barrier((chunks[0].x, shards))
        chunks = (chunks[0]._replace(x=x), *chunks[1:])
    params = plan.parameters(shards, chunks[0].x.dtype)
    for chunk in chunks:
        compute = partial(_output_in_ranges, plan.ranges) if plan.ranges else _output
        y, pre_activations, xs = compute(plan, params, up_projection, chunk)
        yield y, pre_activations, (xs, params)


def _backward(plan: Plan, residuals, gradients):
    (chunks, shards, kept, gathered, first), (d_outputs, sums) = residuals, gradients
    if sums is not None:
        d_outputs, sums = one_example((d_outputs, sums))
    transport = plan.transport
    xs = [chunk.x for chunk in chunks] if gathered is None else [xs for xs, _ in gathered]
    if plan.quantized:  # as below, but for what is decoded anew in any case
        xs, d_outputs = lax.optimization_barrier((xs, d_outputs))
    elif kept is None or gathered is None:  # or XLA would see that what follows was computed before, and keep it
        read = shards if shards.down.cast is None else shards.without("weight")  # which then need not even exist
        xs, read, d_outputs = lax.optimization_barrier((xs, read, d_outputs))
        shards = shards.map(lambda p, own: own if own.weight is not None else own._replace(weight=p.weight), read)

    def arrive(own):
        params = plan.parameters(with_frozen(own, shards), chunks[0].x.dtype)
        return plan.trained(params), params

    _, scatter_params, params = jax.vjp(arrive, plan.trained(shards), has_aux=True)
    params = params if gathered is None else gathered[0][1]
    dxs, d_params, d_weights = [], None, []
    for i, chunk in enumerate(chunks):
        x, dy = xs[i], transport.arrivals(chunk.trips, d_outputs[i])
        if gathered is None and (kept is None or not transport.own_first):
            x = transport.arrivals(chunk.trips, after(x, dy[-1]))  # or both would travel, and take memory, at once
        gradients_of = partial(_gradients_in_ranges, plan.ranges) if plan.ranges else _gradients
        dx, d_params_here, d_weights_here = gradients_of(
            plan, params, chunk, x, dy, kept and kept[i], GradientSums(sums, first)
        )
        dxs.append(dx)
        d_weights.append(d_weights_here)
        d_params = d_params_here if d_params is None else _sum(d_params, d_params_here)
    d_chunks = tuple(Tokens(dx, dw, None, None) for dx, dw in zip(dxs, d_weights, strict=True))  # pyright: ignore[reportArgumentType]
    if sums is None:
        return None, d_chunks, scatter_params(d_params)[0], NO_SUMS
    assert d_params is not None  # of one device, which is all that there are sums for
    return None, d_chunks, d_params.without("weight"), GradientSums(d_params.without("bias"), None)


experts_output.defvjp(_forward, _backward)


# Forward


def _output(plan: Plan, params: Parameters, up_projection: Callable, tokens: Tokens, out: Array | None = None):
    """The output of a chunk of tokens, the pre-activations of the first turn's rows, and the tokens as they arrived.

    The output is written to `out`, if there is one.
    """
    transport, x = plan.transport, tokens.x
    rows, turns = plan.turns(tokens)
    if transport.own_first:  # or XLA would send few tokens together with their weights and ids
        x = after(x, tokens.weights)
    xs = transport.arrivals(tokens.trips, x)
    pre_activations, (hidden, downs) = up_projection(plan, xs, params, rows)
    weights = _weights_of_parts(tokens, params.down.weight.shape[0] * transport.blocks, len(rows.parts))

    def begin():
        y = _down_projection(plan, hidden, (params.down, *downs), tokens, rows, weights, out)
        return y, partial(further, y)

    def further(y):
        xs = transport.arrivals(tokens.trips, after(tokens.x, y))  # or they would arrive, and take memory, long before

        def turn(number, y):
            rows = plan.turn(tokens, number)
            _, (hidden, downs) = _hidden_only(plan, xs, params, rows)
            return _down_projection(plan, hidden, (params.down, *downs), tokens, rows, weights, None, y)

        return turn

    return with_turns(turns, begin), pre_activations, xs


def _output_in_ranges(ranges: TokenRanges, plan: Plan, params: Parameters, up_projection: Callable, tokens: Tokens):
    """`_output`, a range of the tokens at a time; pre-activations are a tuple of each range's."""
    y, kept = empty(tokens.x.shape, tokens.x.dtype, tokens), []
    for own in ranges.tokens(tokens):
        own = own._replace(x=after(own.x, y))  # or XLA would compute the activations of several ranges, and keep them
        y, pre_activations, _ = _output(plan, params, up_projection, own, y)
        kept.append(pre_activations)
    return y, tuple(kept), (tokens.x,)


def _up_projection(keep: bool, plan: Plan, xs: tuple[Array, ...], params: Parameters, rows: Rows):
    """`P` if it is to be kept, `H`, and the down projections of other devices' blocks of experts."""
    transport, ups = plan.transport, params.ups
    journeys = Journeys((*to_come(transport, ups), *to_come(transport, [params.down])))
    options: dict[str, Any] = {"activation": plan.activation.function, "keep_pre_activations": keep}
    if low_rank.has_adapters(ups):
        in_turn = plan.decoded if plan.decodes_before(ups, xs[0].dtype) else None
        ups = ups if in_turn else plan.decoded(ups, xs[0].dtype)
        pre_activations, hidden = low_rank.up_projection(plan.kernels, xs[0], ups, rows.all, **options, in_turn=in_turn)
        return pre_activations, (hidden, ())
    ups = plan.decoded(ups, xs[0].dtype, xs)
    options["quantize"] = keep and plan.save == "int8"
    if plan.kernels.down_operands:
        adapted = low_rank.has_adapters([params.down])
        options["bound"] = hidden_bound(plan.activation, xs[0].shape[1], plan.save, adapted)
    into: dict[str, Any] = {}
    for x, part in zip(xs, rows.parts, strict=True):
        for block, pieces in enumerate(plan.pieces(part, len(ups))):
            journeys = journeys.start_all((x, into), number=block * len(ups))
            weights, biases = weights_and_biases((*ups, *journeys.arrived)[block * len(ups) :][: len(ups)])
            for piece in pieces:
                (x, into), journeys = journeys.start((x, into))
                into = {"into": plan.kernels.up_projection(x, weights, biases, piece, **options, **into)}
    arrived = journeys.start_all(into).arrived
    pre_activations, hidden = in_place(into["into"], len(xs) * transport.blocks)
    return pre_activations, (hidden, arrived[len(arrived) - transport.blocks + 1 :])


_hidden_only = differentiated_once(partial(_up_projection, False))
_pre_activations_and_hidden = differentiated_once(partial(_up_projection, True), partial(_up_projection, False))


@differentiated_once
def _down_projection(
    plan: Plan, hidden, downs, tokens: Tokens, rows: Rows, weights: tuple[Array, ...], out, before=None
):
    """The output `y` of this device's tokens, a block of columns at a time, in `out` or added to that of `before`."""
    dtype = tokens.x.dtype
    downs = plan.decoded(downs, dtype, hidden)

    def rows_of(operands, part: int):
        hidden, z = operands
        of_weights = [(weight, down.bias) for weight, down in zip(of_experts, downs, strict=True)]
        of_rows = _by_block(partial(plan.kernels.down_projection, hidden), of_weights, rows.units[part])
        if z is None or (b := downs[0].b) is None:
            return of_rows
        return low_rank.plus(of_rows, partial(plan.kernels.down_projection, z, b, None, rows.all))

    sizes = {"w_down": downs[0].weight, "dtype": dtype}
    z, of_experts = low_rank.reduced_hidden(plan.kernels, hidden, downs[0], rows.all), [down.weight for down in downs]
    if plan.kernels.down_operands:  # which may write over the rows
        hidden, of_experts = plan.kernels.down_operands(hidden if z is None else after(hidden, z), of_experts)
    operands = hidden, z
    return token_sums(plan, tokens, rows, weights, rows_of, operands, out, before, **sizes)[0]


def _weights_of_parts(tokens: Tokens, num_experts: int, parts: int) -> tuple[Array, ...]:
    """The routing weights of each part of the tokens, as they are summed with.

    They are made before the conditional on further turns, after which the device waits for every launch of the host.
    """
    # An id out of range, E, cannot raise under tracing; it must not pass for an empty slot either.
    known = jnp.where(tokens.experts < num_experts, tokens.weights, jnp.nan)
    weights = jnp.where(tokens.experts == EMPTY_SLOT, 0, known).astype(accumulator_dtype(tokens.x.dtype))
    return tuple(jnp.split(weights, parts))


# Backward


def _gradients(plan: Plan, params: Parameters, tokens: Tokens, xs, dys, pre_activations, sums: GradientSums, out=None):
    """Gradients of a chunk of tokens, of the parameters, added to `sums`, and of the group's routing weights.

    `xs` come in as many parts as `dys`, or are this device's tokens and have to travel again. The tokens' gradients are
    written to `out`, if there is one.
    """
    rows, turns = plan.turns(tokens)
    if pre_activations is None:
        pre_activations, _ = _pre_activations_and_hidden(plan, xs, params, rows)
    return _gradients_of_turns(plan, xs, params, tokens, rows, turns, pre_activations, dys, sums, out)


def _gradients_in_ranges(ranges: TokenRanges, plan: Plan, params: Parameters, tokens: Tokens, xs, dys, kept, given):
    """`_gradients`, a range of the tokens at a time. The sums of the parameters, unless `given`, are rounded once."""
    dx, d_params, d_weights = empty(tokens.x.shape, tokens.x.dtype, (tokens, dys)), given.arrays, []
    for i, own in enumerate(ranges.tokens(tokens)):
        # Or XLA would compute several ranges, and keep what they make.
        operands = after((xs, dys, kept and kept[i]), dx)
        sums = GradientSums(d_params, given.first)
        dx, d_params, d_own = _gradients(plan, params, own, *operands, sums, dx)
        d_weights.append(d_own)
    if given.arrays is None:
        d_params = jax.tree.map(lambda total, array: total.astype(array.dtype), d_params, plan.trained(params))
    return dx, d_params, jnp.concatenate(d_weights)


def _dtypes(plan: Plan, params: Parameters) -> Parameters:
    """The dtypes of the parameters' gradients: their own, and wide ones where those of ranges are added up."""
    return jax.tree.map(lambda array: accumulator_dtype(array.dtype) if plan.ranges else array.dtype, params)


@differentiated_once
def _gradients_of_turns(
    plan: Plan, xs, params: Parameters, tokens: Tokens, rows: Rows, turns, pre_activations, dys, sums: GradientSums, out
):
    down = _down_backward(plan, dys, params, tokens.weights, rows, pre_activations)

    def begin():
        x = xs
        if not isinstance(x, tuple):  # or x and dy would travel, and take memory, at once
            x = plan.transport.arrivals(tokens.trips, after(x, down.d_row_weights[-1]))
        before = None, sums, None
        return _other_gradients(plan, x, params, tokens, rows, dys, down, before, out), partial(further, x)

    def further(xs):
        def turn(number, gradients):
            rows = plan.turn(tokens, number)
            pre_activations, _ = _pre_activations_and_hidden(plan, xs, params, rows)
            down = _down_backward(plan, dys, params, tokens.weights, rows, pre_activations, further=True)
            dx, d_params, d_weights = gradients
            before = dx, GradientSums(d_params, sums.first), d_weights
            return _other_gradients(plan, xs, params, tokens, rows, dys, down, before)

        return turn

    return with_turns(turns, begin)


class _Down(NamedTuple):
    """Results of the down projection's backward pass, which the other kernels take.

    Attributes:
      d_pre_activations: `dP`, in the place of `P` unless that is `Quantized`.
      weighted_hidden: `g · H`.
      row_weights: `g` of each row.
      d_row_weights: `dg` of each unit's rows, zero elsewhere.
      v: `V` of the adapter of the down projection, see `low_rank`; None without one.
      journeys: parameters of the up projections of other blocks, some of which may still have to travel.
    """

    d_pre_activations: tuple[Array, ...]
    weighted_hidden: Array
    row_weights: Array
    d_row_weights: list[Array]
    journeys: Journeys
    v: Array | None = None


def _down_backward(
    plan: Plan, dys, params: Parameters, weights, rows: Rows, pre_activations, *, further: bool = False
) -> _Down:
    transport = plan.transport
    row_weights = place_values(weights, rows.all.token_index_map, rows.all.num_rows)
    pre_activations = in_place(pre_activations, len(dys) * transport.blocks)
    journeys = Journeys((*to_come(transport, [params.down]), *to_come(transport, params.ups)))
    options: dict[str, Any] = {"activation": plan.activation.function}
    d_row_weights: list[Array] = []
    d_pre: Any = None
    hidden: Any = None
    v, added = low_rank.reduced_gradient(plan.kernels, dys[0], params.down, rows.all), None
    if v is not None:
        of_rows = params.down, pre_activations, row_weights, rows.all
        added, d_weights = low_rank.down_backward(plan.kernels, v, *of_rows, activation=plan.activation.function)
        d_row_weights.append(d_weights)
        pre_activations = after(pre_activations, added)  # or XLA would keep a copy of what the kernel writes over
    (own,) = plan.decoded([params.down], dys[0].dtype, pre_activations)
    for dy, units in zip(dys, rows.units, strict=True):
        for block, unit in enumerate(units):
            w_down, b_down, *_ = (own, *journeys.arrived)[block]
            dy, journeys = journeys.start(dy, d_row_weights[-1:])
            d_pre, hidden, d_weights = plan.kernels.down_backward(
                dy, w_down, b_down, pre_activations, row_weights, unit, **options
            )
            if isinstance(pre_activations[0], Quantized):
                options["into"] = d_pre, hidden
            else:
                pre_activations, options["into"] = d_pre, hidden
            d_row_weights.append(d_weights)
    # Token sums, and not weight gradients, may come next, and take all parameters.
    if transport.devices > 1 or further or plan.frozen:
        journeys = journeys.start_all(d_row_weights[-1])
    if added is not None:
        d_pre = _sum(d_pre, added)
    return _Down(d_pre, hidden, row_weights, d_row_weights, journeys, v)


def _other_gradients(
    plan: Plan, xs, params: Parameters, tokens: Tokens, rows: Rows, dys, down: _Down, before: tuple, out=None
):
    """Gradients of the tokens, in `out`, the parameters and the routing weights, added to those of `before`."""
    dx, sums, d_weights = before
    token_index_map, blocks = rows.all.token_index_map, plan.transport.blocks
    of_slots = reduce(jnp.add, down.d_row_weights).at[token_index_map].get(mode="fill", fill_value=0)
    of_slots = of_slots.astype(tokens.weights.dtype)
    d_weights = of_slots if d_weights is None else d_weights + of_slots

    dzs = low_rank.reduced_gradients(plan.kernels, down.d_pre_activations, params.ups, rows.all)
    adapted = [(dz, up.a) for dz, up in zip(dzs, params.ups, strict=True) if dz is not None]

    decodes_before = plan.decodes_before(params.ups, xs[0].dtype)

    def of_products(operands):
        d_pre_activations, _, arrived = operands[:3]
        ups = plan.decoded(params.ups, xs[0].dtype, d_pre_activations)
        return d_pre_activations, [weights_and_biases(of)[0] for of in batched((*ups, *arrived), len(ups))]

    def prepared(operands, last_use: bool):
        """With what the products of rows take of them in the fourth place, if that is something else."""
        if plan.kernels.up_operands is None:
            return operands
        made = plan.kernels.up_operands(*of_products(operands), last_use)
        return (None, None, (), made) if last_use else (*operands, made)

    def decoded_rows(ups, d_pre_activations, first_column, num_columns):
        weights = tuple(numbers_of(up.weight, first_column, num_columns, xs[0].dtype, axis=1) for up in ups)
        return plan.kernels.up_backward(d_pre_activations, weights, rows.all, 0, num_columns)

    def rows_of(operands, part: int):
        if decodes_before and not operands[3:]:  # a block of columns at a time, so that less is decoded together
            of_rows = partial(decoded_rows, plan.delayed(params.ups, operands[0]), operands[0])
        else:
            operand, of_experts = operands[3] if operands[3:] else of_products(operands)
            of_rows = _by_block(partial(plan.kernels.up_backward, operand), list(zip(of_experts)), rows.units[part])
        if not adapted:
            return of_rows
        return low_rank.plus(of_rows, partial(plan.kernels.up_backward, *zip(*adapted, strict=True), rows.all))

    def weight_gradients(operands):
        if plan.frozen:
            of_ups, of_down = (xs[0], operands[0], dzs), (operands[1], dys[0], down.row_weights, down.v)
            dtypes = _dtypes(plan, plan.trained(params))
            gradients = low_rank.gradients(plan.kernels, params, dtypes, rows.all, of_ups, of_down)
            gradients = gradients if sums.arrays is None else _sum(gradients, sums.arrays)
            return gradients, after(operands, gradients) if decodes_before else operands  # which then may be decoded
        made = operands[3:]
        d_params_here, operands, arrived = _weight_gradients(plan, params, xs, dys, rows, operands[:2], down, sums)
        return d_params_here, (*operands, arrived[blocks - 1 :][: (blocks - 1) * len(params.ups)], *made)

    operands = down.d_pre_activations, down.weighted_hidden, down.journeys.arrived[blocks - 1 :]
    options = {"w_down": params.down.weight, "dtype": xs[0].dtype, "meanwhile": weight_gradients, "prepared": prepared}
    dx, d_params = token_sums(plan, tokens, rows, None, rows_of, operands, out, dx, **options)
    return dx, d_params, d_weights


def _weight_gradients(plan: Plan, params: Parameters, xs, dys, rows: Rows, operands, down: _Down, before: GradientSums):
    """Gradients of this device's parameters, `operands` once they are computed, and all arrays that have travelled.

    `operands` are `dP` and `g · H`. Other devices' blocks come first: their gradients leave while others are computed.
    The kernels add the own matrices to those of `before`, which may have no biases.
    """
    transport, kernels, journeys = plan.transport, plan.kernels, down.journeys
    dtypes = _dtypes(plan, plan.trained(params))
    known = None if before.arrays is None else in_place(before.arrays, 2)  # or XLA might hand over one of a stack
    x, dy = _joined(xs), _joined(dys)

    def added(projections: Sequence[Projection]) -> dict[str, Sums]:
        return {"sums": Sums(weights_and_biases(projections)[0], before.first)}

    def of_down(operands, rows: Dispatch, known: Parameters | None) -> list[Projection]:
        options = {"dtype": dtypes.down.weight, "bias_dtype": dtypes.down.bias}
        options |= added([known.down]) if known else {}
        return [Projection(*kernels.down_weight_gradients(operands[1], dy, down.row_weights, rows, **options))]

    def of_ups(operands, rows: Dispatch, known: Parameters | None) -> list[Projection]:
        of_weights, of_biases = weights_and_biases(dtypes.ups)
        options = {"dtypes": of_weights, "bias_dtypes": of_biases, **(added(known.ups) if known else {})}
        gradients, biases = kernels.up_weight_gradients(x, operands[0], rows, **options)
        return list(map(Projection, gradients, biases or (None,) * len(gradients)))

    own: list[Projection] = []
    for block, of_block in reversed(list(enumerate(rows.blocks))):
        own = []
        for matrices in (of_down, of_ups):
            operands, journeys = journeys.start(operands)
            gradients = matrices(operands, of_block, None if block else known)
            if known and block == 0:
                others = [known.down, *known.ups][len(own) :][: len(gradients)]
                gradients = [g.with_bias_added(other) for g, other in zip(gradients, others, strict=True)]
            # Or XLA would compute several at a time, or make operands of 8 bits before, and keep both.
            if known or transport.blocks > 1 or kernels.up_operands:
                gradients, operands = lax.optimization_barrier((gradients, operands))
            if block:
                leave = (partial(transport.block_departs, pair, block) for pair in gradients)
                journeys = journeys._replace(waiting=(*journeys.waiting, *leave))
            own += gradients
    operands, journeys = journeys.start(operands)
    arrived = journeys.start_all(operands).arrived
    others = arrived[len(arrived) - (transport.blocks - 1) * len(own) :]
    for i, gradients in enumerate(others):
        own[i % len(own)] = _sum(own[i % len(own)], gradients)
    return Parameters(tuple(own[1:]), own[0]), operands, arrived


def _by_block(kernel: Callable, weights: Sequence[tuple], units: tuple[Dispatch, ...]) -> Callable:
    """The rows `(first_column, num_columns)` of all blocks of experts, written one block after the other."""

    def rows(first_column, num_columns):
        options: dict[str, Any] = {}
        for of_block, unit in zip(weights, units, strict=True):
            options["into"] = kernel(*of_block, unit, first_column, num_columns, **options)
        return in_place(options["into"], len(units))

    return rows


def _sum(tree, other):
    return jax.tree.map(jnp.add, tree, other)


def _joined(parts: tuple[Array, ...]):
    """All parts, as kernels that compute in parts take them, and others, which get one."""
    return parts[0] if len(parts) == 1 else parts
