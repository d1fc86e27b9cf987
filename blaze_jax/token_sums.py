"""The sums of each token's rows, a block of columns at a time: rows as wide as the model exist for one block alone.

Sums of other devices' tokens leave for there while this device's own are computed.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from blaze_jax.plan import Plan, Rows, Tokens
from blaze_jax.schedule import after
from pallas_kernels.contract import Dispatch, accumulator_dtype
from pallas_kernels.family import Kernels
from pallas_kernels.xla.loops import empty

type RowsOf = Callable[[Any, int], Callable]
"""Makes of operands and a part's number the `rows(first_column, num_columns)` that `combine_columns` combines."""


class _Part(NamedTuple):
    """Rows of a part of the tokens, their weights, and what brings the sums to the tokens' device; None if here."""

    number: int
    dispatch: Dispatch
    weights: Array | None
    depart: Callable | None


def token_sums(
    plan: Plan,
    tokens: Tokens,
    rows: Rows,
    weights: tuple[Array, ...] | None,
    rows_of: RowsOf,
    operands,
    before: Float[Array, "T d"] | None = None,
    *,
    w_down: Array,
    dtype,
    meanwhile: Callable = lambda operands: (None, operands),
) -> tuple[Float[Array, "T d"], Any]:
    """The sums of this device's tokens, added to those of `before`, and the result of `meanwhile`.

    A block of columns of the others' tokens leaves; then the one before it, which has arrived from other devices by
    now, is the addend of this device's own. So two are under way at most, and nothing else is as wide as the sums.

    Args:
      plan: the plan of the work.
      tokens: whose sums they are.
      rows: the rows of this turn.
      weights: factors `(T_part, K)` of the rows of each part; None for ones.
      rows_of: what makes the rows.
      operands: what it takes.
      before: sums to add to.
      w_down: whose shape says how wide sums and experts are.
      dtype: the dtype of the sums.
      meanwhile: `(result, operands)` of the operands, computed while the last block travels.
    """
    departures = plan.transport.departures(tokens.trips, len(rows.parts))
    of_parts = weights or [None] * len(rows.parts)
    parts = list(map(_Part, range(len(rows.parts)), rows.parts, of_parts, departures))
    own = next((part for part in parts if part.depart is None), None)
    away = [part for part in parts if part.depart is not None]
    if own and not away and before is None:
        result, operands = meanwhile(operands)
        options = {"at_once": plan.ranges is not None}
        of_own = rows_of(operands, own.number)
        return combine_columns(plan.kernels, of_own, w_down, own.dispatch, own.weights, dtype, **options), result

    width = w_down.shape[2]
    block = _block(plan.kernels, w_down, rows.parts[0], dtype)
    blocks = [(first, min(block, width - first)) for first in range(0, width, block)]
    y, arriving, done = before, [], ()

    def sums(part: _Part, operands, columns: tuple[int, int], out, first_column: int, addend) -> Array:
        # Or XLA would compute the rows of many blocks, and keep them all.
        of_block = rows_of(operands, part.number)(after(jnp.int32(columns[0]), done), columns[1])
        return plan.kernels.combine(of_block, part.dispatch.token_index_map, part.weights, out, first_column, addend)

    def finished(y, operands, number: int) -> Array:
        (first, columns), addend = blocks[number], arriving[number]
        if before is not None:
            there = lax.dynamic_slice_in_dim(y, first, columns, axis=1)
            addend = there if addend is None else addend + there
        if own is None:
            y = empty((addend.shape[0], width), dtype, addend) if y is None else y
            return lax.dynamic_update_slice_in_dim(y, addend, first, axis=1)
        y = _empty_columns(own.dispatch, width, dtype) if y is None else y
        return sums(own, operands, blocks[number], y, first, addend)

    for number, columns in enumerate(blocks):
        departed = []
        for part in away:
            done = sums(part, operands, columns, _empty_columns(part.dispatch, columns[1], dtype), 0, None)
            departed.append(part.depart(done))  # pyright: ignore[reportOptionalCall]
        arriving.append(reduce(jnp.add, departed) if departed else None)
        if number:
            y = done = finished(y, operands, number - 1)
    result, operands = meanwhile(after(operands, done))  # or it would be computed while nothing travels
    return finished(y, operands, len(blocks) - 1), result


def combine_columns(
    kernels: Kernels,
    rows: Callable,
    w_down: Float[Array, "E n d"],
    dispatch: Dispatch,
    weights: Float[Array, "T K"] | None,
    dtype,
    most: int | None = None,
    at_once: bool = False,
) -> Float[Array, "T d"]:
    """Combines `rows(first_column, num_columns)`, blocks of at most `most` columns; None for as many as suit.

    With `at_once`, rows that are not wider than an expert are a single block.
    """
    if at_once and w_down.shape[2] <= w_down.shape[1]:
        num_columns = w_down.shape[2]
        y = _empty_columns(dispatch, num_columns, dtype)
        return kernels.combine(rows(0, num_columns), dispatch.token_index_map, weights, y, 0)
    block, width = _block(kernels, w_down, dispatch, dtype, most), w_down.shape[2]
    weights = None if weights is None else weights.astype(accumulator_dtype(dtype))  # once, and not in each turn

    def turn(carry):
        column, y = carry  # counted in columns, which saves a GPU a launch that would multiply
        # A last narrow block reaches back over columns that are done.
        first_column = jnp.minimum(column, width - block) if width % block else column
        y = kernels.combine(rows(first_column, block), dispatch.token_index_map, weights, y, first_column)
        return column + block, y

    y = _empty_columns(dispatch, width, dtype)
    return lax.while_loop(lambda carry: carry[0] < width, turn, (jnp.int32(0), y))[1]


def block_width(width: int, most: int) -> int:
    """Columns of a block of `most` at most, where there are `width` in all: never all of them, if they are many."""
    return min(most, -(-width // 128) * 64, width)


def _block(kernels: Kernels, w_down: Float[Array, "E n d"], dispatch: Dispatch, dtype, most: int | None = None) -> int:
    num_experts, n, width = w_down.shape
    return block_width(width, most or kernels.column_block(dispatch.num_rows, width, n, num_experts, dtype))


def _empty_columns(dispatch: Dispatch, columns: int, dtype) -> Float[Array, "T columns"]:
    return empty((dispatch.token_index_map.shape[0], columns), dtype, dispatch)
