"""How the plan is carried out: what waits, what travels meanwhile, and the loops over turns, ranges and columns.

XLA runs what it compiles in any order that the data allow. Where another order would cost memory or time, `after` makes
one array wait for others; every use says what would happen without it.

The sums of each token's rows come a block of columns at a time: rows as wide as the model exist for one block alone.
Sums of other devices' tokens leave for there while this device's own are computed.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from blaze_jax.exchange import Transport
from blaze_jax.plan import Plan, Projection, Rows, Tokens
from pallas_kernels.compat import is_symbolic_dim
from pallas_kernels.contract import accumulator_dtype
from pallas_kernels.family import Kernels
from pallas_kernels.xla.loops import empty

FEW_ROWS = 32
"""Rows of all columns exist at once where they take at most a 32nd of the memory of the experts' three matrices: so few
tokens wait for these alone, and each block of columns would begin and end with idle multiprocessors."""


def after[T](value: T, *others) -> T:
    """`value`, which is there when `others` are computed, and not before."""
    return lax.optimization_barrier((value, *others))[0]


def in_place[T](arrays: T, parts: int) -> T:
    """`arrays`, of which a kernel writes one of `parts` and trusts XLA that the other rows are there.

    For one layer of a stack, XLA would give it the stack's memory for its result alone (see `mosaic/launches.py`).
    """
    return arrays if parts == 1 else after(arrays)


class Journeys(NamedTuple):
    """Arrays that travel one after the other, each while a kernel runs: XLA has one collective under way at a time.

    Attributes:
      waiting: functions of the arrays that a journey waits for; each returns what arrives.
      arrived: what the journeys that have started return, in their order.
      under_way: what the last one returns, until a kernel has waited for it.
    """

    waiting: tuple[Callable[[Any], Any], ...] = ()
    arrived: tuple = ()
    under_way: Any = None

    def start[T](self, operands: T, others=()) -> tuple[T, "Journeys"]:
        """`operands` of the kernel under which the next array travels, once the one before is there.

        The next one leaves when `operands` and `others` are computed. The kernel must not write over `operands`.
        """
        if self.under_way is not None:
            operands = after(operands, self.under_way)
        if not self.waiting:
            return operands, self._replace(under_way=None)
        arrival = self.waiting[0]((operands, others))
        return operands, Journeys(self.waiting[1:], (*self.arrived, arrival), arrival)

    def start_all(self, others, number: int | None = None) -> "Journeys":
        """All that wait leave when `others` are computed, or as many as make `number` in all."""
        now = len(self.waiting) if number is None else max(number - len(self.arrived), 0)
        arrived = (*self.arrived, *(journey(others) for journey in self.waiting[:now]))
        return Journeys(self.waiting[now:], arrived, self.under_way)


def to_come(transport: Transport, own: Sequence[Projection]) -> tuple[Callable[[Any], Projection], ...]:
    """The journeys of other devices' blocks of experts, of each of which this device has `own`."""
    return tuple(partial(transport.block_arrives, pair, block) for block in range(1, transport.blocks) for pair in own)


def with_turns(turns: Int[Array, ""] | None, begin: Callable):
    """The result of `begin() -> (result, further)`, and then of `further()(number, result)` for each further turn.

    The host waits for their number here, between long kernels: after them it would fall behind the device.
    """

    def run(all_turns: bool):
        result, further = begin()
        return lax.fori_loop(0, turns, further(), result) if all_turns else result

    return run(False) if turns is None else lax.cond(turns == 0, partial(run, False), partial(run, True))


def token_sums(
    plan: Plan,
    tokens: Tokens,
    rows: Rows,
    weights: tuple[Array, ...] | None,
    rows_of: Callable[[Any, int], Callable],
    operands,
    out: Float[Array, "T d"] | None = None,
    before: Float[Array, "T d"] | None = None,
    *,
    w_down: Float[Array, "E n d"],
    dtype,
    meanwhile: Callable = lambda operands: (None, operands),
    prepared: Callable = lambda operands, last_use: operands,
) -> tuple[Float[Array, "T d"], Any]:
    """The sums of this device's tokens, and the result of `meanwhile`.

    A block of columns of the others' tokens leaves; then the one before it, which has arrived from other devices by
    now, is the addend of this device's own. So two are under way at most, and nothing else is as wide as the sums.

    Args:
      plan: the plan of the work.
      tokens: whose sums they are.
      rows: the rows of this turn.
      weights: factors `(T_part, K)` of the rows of each part; None for ones.
      rows_of: makes of operands and a part's number the `rows(first_column, num_columns)` that are summed.
      operands: what it takes.
      out: where they are written to, beside those of other tokens; None for a new array.
      before: what they are added to, in the place of `out`.
      w_down: whose shape says how wide sums and experts are.
      dtype: the dtype of the sums.
      meanwhile: `(result, operands)` of the operands, computed while the last block travels.
      prepared: the operands `(operands, last_use)` as `rows_of` takes them, made once for all blocks of columns and all
        parts; `last_use` says that they are used for nothing else.
    """
    kernels, (num_experts, n, width) = plan.kernels, w_down.shape
    departures = plan.transport.departures(tokens.trips, len(rows.parts))
    factors = weights or (None,) * len(rows.parts)
    away = [(part, depart) for part, depart in enumerate(departures) if depart]
    own, first_token = departures[0] is None, 0 if tokens.first is None else tokens.first  # of the first part, if any
    block = block_width(width, kernels.column_block(rows.parts[0].num_rows, width, n, num_experts, dtype))
    if own and not away and before is None:
        num_rows = rows.parts[0].num_rows
        result, operands = meanwhile(operands)  # takes what `prepared` may write over then
        operands = prepared(operands, True)
        narrow = plan.ranges and width <= n  # a range's rows are then no wider than its activation
        few = not is_symbolic_dim(num_rows) and num_rows * FEW_ROWS <= 3 * num_experts * n
        if narrow or few:
            block = None
        index = rows.parts[0].token_index_map
        out = empty((index.shape[0], width), dtype, rows.parts[0]) if out is None else out
        return combine_columns(kernels, rows_of(operands, 0), block, index, factors[0], out, first_token), result

    blocks = [(first, min(block, width - first)) for first in range(0, width, block)]
    y, arriving, done = out if before is None else before, [], ()
    operands = prepared(operands, False)

    def sums(part: int, operands, columns: tuple[int, int], out, first_column: int, addend, width: int) -> Array:
        # Or XLA would compute the rows of many blocks, and keep them all.
        of_block = rows_of(operands, part)(after(jnp.int32(columns[0]), done), columns[1])
        index, to = rows.parts[part].token_index_map, {"first_token": first_token, "width": width}
        return kernels.combine(of_block, index, factors[part], out, first_column, addend, **to)

    def finished(y, operands, number: int) -> Array:
        (first, columns), addend = blocks[number], arriving[number]
        if before is not None:
            there = lax.dynamic_slice_in_dim(y, first, columns, axis=1)
            if tokens.first is not None:
                there = lax.dynamic_slice_in_dim(there, tokens.first, rows.parts[0].token_index_map.shape[0])
            addend = there if addend is None else addend + there
        if not own:
            y = empty((addend.shape[0], width), dtype, addend) if y is None else y
            return lax.dynamic_update_slice_in_dim(y, addend, first, axis=1)
        return sums(0, operands, blocks[number], y, first, addend, width)

    for number, columns in enumerate(blocks):
        departed = []
        for part, depart in away:
            done = sums(part, operands, columns, None, 0, None, columns[1])
            departed.append(depart(done))
        arriving.append(reduce(jnp.add, departed) if departed else None)
        if number:
            y = done = finished(y, operands, number - 1)
    result, operands = meanwhile(after(operands, done))  # or it would be computed while nothing travels
    return finished(y, operands, len(blocks) - 1), result


def combine_columns(
    kernels: Kernels,
    rows: Callable,
    block: int | None,
    index: Int[Array, "T K"],
    weights: Array | None,
    out: Float[Array, "T_all d"],
    first_token: int = 0,
) -> Float[Array, "T_all d"]:
    """The sums of `rows(first_column, num_columns)` in `out`, a block of columns at a time, or all at once for None."""
    width = out.shape[1]
    if block is None:
        return kernels.combine(rows(0, width), index, weights, out, 0, first_token=first_token)
    weights = None if weights is None else weights.astype(accumulator_dtype(out.dtype))  # once, and not in each turn

    def turn(carry):
        column, out = carry  # counted in columns, which saves a GPU a launch that would multiply
        # A last narrow block reaches back over columns that are done.
        first_column = jnp.minimum(column, width - block) if width % block else column
        out = kernels.combine(rows(first_column, block), index, weights, out, first_column, first_token=first_token)
        return column + block, out

    return lax.while_loop(lambda carry: carry[0] < width, turn, (jnp.int32(0), out))[1]


def block_width(width: int, most: int) -> int:
    """Columns of a block of `most` at most, where there are `width` in all: never all of them, if they are many."""
    return min(most, -(-width // 128) * 64, width)
