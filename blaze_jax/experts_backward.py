"""The experts' backward pass: gradients of a device's tokens, of its parameters, and of the group's routing weights."""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from blaze_jax.expert_blocks import Blocks, Journeys
from blaze_jax.expert_rows import Parameters, Rows, Settings, Tokens, in_place, with_turns
from blaze_jax.experts_forward import pre_activations_and_hidden, up_parameters
from blaze_jax.reverse_mode import differentiated_once
from blaze_jax.token_ranges import TokenRanges
from blaze_jax.token_sums import TokenSums, by_block
from pallas_kernels.contract import accumulator_dtype
from pallas_kernels.place_values import place_values


def part_gradients(settings: Settings, params: Parameters, part: Tokens, xs, dys, pre_activations, dtypes=None):
    """Of the part's tokens, the parameters, and the group's routing weights."""
    rows, turns = settings.turns(part)
    if pre_activations is None:
        pre_activations, _ = pre_activations_and_hidden(settings, xs, params, rows)
    return _gradients((settings, dtypes), xs, params, part, rows, turns, pre_activations, dys)


def gradients_in_ranges(ranges: TokenRanges, compute: Callable, params: Parameters, part: Tokens, dy, kept):
    """The same, by `compute` of a range of the tokens at a time. Parameters' sums are wide, and rounded once."""
    dtypes = jax.tree.map(lambda array: accumulator_dtype(array.dtype), params)

    def step(start, dispatch, kept):
        own = part._replace(weights=ranges.of(part.weights, start), dispatch=dispatch)
        dx, d_params, d_weights = compute(own, (part.x,), (dy,), kept, dtypes)
        return (dx, d_weights), d_params, ()

    sums = jax.tree.map(lambda array, dtype: jnp.zeros(array.shape, dtype), params, dtypes)
    (dx, d_weights), sums, _ = ranges.one_by_one(step, sums, part.dispatch, kept)
    return dx, jax.tree.map(lambda total, array: total.astype(array.dtype), sums, params), d_weights


@differentiated_once
def _gradients(
    of, xs, params: Parameters, part: Tokens, rows: Rows, turns, pre_activations, dys, before: tuple | None = None
):
    """Of this device's tokens, its parameters, and the group's routing weights, added to those of `before`.

    `of` are the settings, and dtypes of the parameters' gradients; None for their own. `xs` come in as many parts as
    `dys`, or are this device's and have to travel again.
    """
    settings, dtypes = of
    kernels, transport = settings.kernels, settings.transport
    token_index_map, weights = rows.all.token_index_map, part.weights
    dtypes = dtypes or jax.tree.map(lambda array: array.dtype, params)
    row_weights = place_values(weights, token_index_map, rows.all.num_rows)
    ups = Blocks(transport, up_parameters(params))
    following = Journeys(ups.journeys)
    operands, d_row_weights = _down_backward(settings, dys, params, row_weights, rows, pre_activations, following)
    if transport.devices > 1:
        following.start_all(d_row_weights[-1])

    def up_backward(operands, own):
        kernel = partial(kernels.up_backward, operands[0])
        blocks = zip(ups, settings.blocks(own), strict=True)
        return by_block([partial(kernel, tuple(w for w, _ in block), of_block) for block, of_block in blocks])

    def others(further: bool):
        x = xs
        if not isinstance(x, tuple):
            x = transport.arrivals(part.plan, lax.optimization_barrier((x, d_row_weights[-1]))[0])
        sums = TokenSums(settings, params.w_down, part, rows, None, x[0].dtype)
        d_weights = reduce(jnp.add, d_row_weights).at[token_index_map].get(mode="fill", fill_value=0)
        d_weights = d_weights.astype(weights.dtype)
        dx_before, d_params_before, d_weights_before = before or (None, None, None)
        if d_weights_before is not None:
            d_weights = d_weights_before + d_weights
        weight_gradients = partial(
            _weight_gradients,
            settings,
            _together(x),
            _together(dys),
            row_weights,
            rows,
            dtypes,
            journeys=following,
            before=d_params_before,
        )
        dx, d_params = sums.of(up_backward, operands, dx_before, meanwhile=weight_gradients)
        gradients = dx, d_params, d_weights

        def add_turn(turn, gradients):
            rows = settings.rows_of_turn(part.dispatch, turn)
            pre_activations, _ = pre_activations_and_hidden(settings, x, params, rows)
            return _gradients(of, x, params, part, rows, None, pre_activations, dys, gradients)

        return lax.fori_loop(0, turns, add_turn, gradients) if further else gradients

    return with_turns(turns, others)


def _down_backward(
    settings: Settings, dys, params: Parameters, row_weights, rows: Rows, pre_activations, following: Journeys
):
    """`dP`, which takes the place of `P` a part at a time, `g · H`, and `dg` of each part's rows."""
    transport = settings.transport
    pre_activations = in_place(pre_activations, len(dys) * transport.blocks)
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
    settings: Settings,
    x,
    dy,
    row_weights,
    rows: Rows,
    dtypes: Parameters,
    operands,
    *,
    journeys: Journeys,
    before: Parameters | None = None,
):
    """Gradients of this device's parameters, summed over the devices, and `operands` once they are computed.

    `operands` are `dP` and `g · H`. Other devices' blocks come first: their gradients leave while others are computed.
    With those of `before`, to which they are added, one matrix is computed at a time: then no others take memory.
    """
    transport, kernels = settings.transport, settings.kernels
    home, arrived = [], []
    ups = [slice(None)] if before is None else [slice(i, i + 1) for i in range(len(dtypes.up_weights))]

    def down(operands, own):
        options = {"dtype": dtypes.w_down, "bias_dtype": dtypes.b_down}
        return [kernels.down_weight_gradients(operands[1], dy, row_weights, own, **options)]

    def up(some, operands, own):
        options = {"dtypes": dtypes.up_weights[some], "bias_dtypes": dtypes.up_biases[some]}
        gradients, biases = kernels.up_weight_gradients(x, operands[0][some], own, **options)
        return list(zip(gradients, biases or (None,) * len(gradients), strict=True))

    def leave(block, gradients):
        def depart(after):
            arrived.append(transport.block_departs(gradients, block, after))
            return arrived[-1]

        journeys.add([depart] if block else [])

    for block, own in reversed(list(enumerate(settings.blocks(rows.all)))):
        home = []
        for matrices in (down, *(partial(up, some) for some in ups)):
            operands = journeys.start(operands)
            gradients = matrices(operands, own)
            if before is not None and block == 0:
                gradients = add_trees(gradients, _pairs(before)[len(home) :][: len(gradients)])
            if before is not None or transport.blocks > 1:  # one at a time
                gradients, operands = lax.optimization_barrier((gradients, operands))
            for pair in gradients:
                leave(block, pair)
            home += gradients
    operands = journeys.start(operands)
    journeys.start_all(operands)
    for i, gradients in enumerate(arrived):
        home[i % len(home)] = add_trees(home[i % len(home)], gradients)
    (d_down, d_down_bias), *d_ups = home
    d_up, d_up_biases = zip(*d_ups, strict=True)
    return Parameters(d_up, d_up_biases if dtypes.up_biases else (), d_down, d_down_bias), operands


def _pairs(params: Parameters) -> list[tuple]:
    """Each weight with its bias, those of the down projection first."""
    biases = params.up_biases or (None,) * len(params.up_weights)
    return [(params.w_down, params.b_down), *zip(params.up_weights, biases, strict=True)]


def add_trees(tree, other):
    return jax.tree.map(jnp.add, tree, other)


def _together(parts: tuple[Array, ...]):
    """All parts, as kernels that compute in parts take them, and others, which get one."""
    return parts[0] if len(parts) == 1 else parts
