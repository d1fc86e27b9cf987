"""The experts' forward pass: the activation `H` of the rows, and the sums `y` of a device's tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from blaze_jax.expert_blocks import Blocks, Journeys
from blaze_jax.expert_rows import Parameters, Rows, Settings, Tokens, in_place, with_turns
from blaze_jax.reverse_mode import differentiated_once
from blaze_jax.token_ranges import TokenRanges
from blaze_jax.token_sums import TokenSums, by_block
from pallas_kernels.contract import EMPTY_SLOT, accumulator_dtype


def part_output(settings: Settings, params: Parameters, up_projection: Callable, part: Tokens):
    """The part's output, the pre-activations of the budget's rows, and the tokens as they arrived."""
    transport, x = settings.transport, part.x
    rows, turns = settings.turns(part)
    if transport.own_first:  # apart from the weights and ids, with which XLA would send few tokens
        x, _ = lax.optimization_barrier((x, part.weights))
    xs = transport.arrivals(part.plan, x)
    pre_activations, (hidden, others) = up_projection(settings, xs, params, rows)
    downs = [(params.w_down, params.b_down), *others]
    weights = _weights_of_parts(part, params.w_down.shape[0] * transport.blocks, len(rows.parts))

    def output(further: bool):
        y = _output(settings, hidden, downs, part, rows, weights)
        if not further:
            return y
        x, y = lax.optimization_barrier((part.x, y))  # or the tokens would arrive, and take memory, long before
        again = transport.arrivals(part.plan, x)

        def add_turn(i, y):
            rows = settings.rows_of_turn(part.dispatch, i)
            _, (hidden, others) = hidden_only(settings, again, params, rows)
            return _output(settings, hidden, [downs[0], *others], part, rows, weights, y)

        return lax.fori_loop(0, turns, add_turn, y)

    return with_turns(turns, output), pre_activations, xs


def output_in_ranges(ranges: TokenRanges, compute: Callable, part: Tokens):
    """The same, by `compute` of a range of the tokens at a time; pre-activations are stacked."""

    def step(start, dispatch):
        weights, experts = (ranges.of(array, start) for array in (part.weights, part.experts))
        y, pre_activations, _ = compute(Tokens(part.x, weights, experts, dispatch))
        return y, (), pre_activations

    y, _, pre_activations = ranges.one_by_one(step, (), part.dispatch)
    return y, pre_activations, (part.x,)


def _up_projection(keep: bool, settings: Settings, xs: tuple[Array, ...], params: Parameters, rows: Rows):
    """`P` if it is to be kept, `H`, and the down projection's parameters of other devices' blocks of experts."""
    transport = settings.transport
    options: dict[str, Any] = {"activation": settings.activation.function, "keep_pre_activations": keep}
    into: dict[str, Any] = {}
    ups, downs = Blocks(transport, up_parameters(params)), Blocks(transport, [(params.w_down, params.b_down)])
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
    pre_activations, hidden = in_place(into["into"], len(xs) * transport.blocks)
    return pre_activations, (hidden, tuple(down for (down,) in list(downs)[1:]))


def up_parameters(params: Parameters) -> list[tuple[Array, Array | None]]:
    """The up projections' weights, each with its biases or None."""
    return list(zip(params.up_weights, params.up_biases or (None,) * len(params.up_weights), strict=True))


hidden_only = differentiated_once(partial(_up_projection, False))
pre_activations_and_hidden = differentiated_once(partial(_up_projection, True), partial(_up_projection, False))


@differentiated_once
def _output(
    settings: Settings, hidden, downs, part: Tokens, rows: Rows, weights: tuple[Array, ...], before: Array | None = None
):
    """The output `y` of this device's tokens, a block of columns at a time, added to that of `before`."""
    sums = TokenSums(settings, downs[0][0], part, rows, weights, hidden.dtype)

    def down_projection(hidden, own):
        kernel = partial(settings.kernels.down_projection, hidden)
        return by_block(
            [partial(kernel, *down, of_block) for down, of_block in zip(downs, settings.blocks(own), strict=True)]
        )

    return sums.of(down_projection, hidden, before)[0]


def _weights_of_parts(part: Tokens, num_experts: int, parts: int) -> tuple[Array, ...]:
    """The routing weights of each part of the tokens, as they are summed with.

    They are made before the conditional on further turns, after which the device waits for every launch of the host.
    """
    # An id out of range, E, cannot raise under tracing; it must not pass for an empty slot either.
    known = jnp.where(part.experts < num_experts, part.weights, jnp.nan)
    weights = jnp.where(part.experts == EMPTY_SLOT, 0, known).astype(accumulator_dtype(part.x.dtype))
    return tuple(jnp.split(weights, parts))
