"""How the plan is carried out: what waits for what, what travels meanwhile, and the loops over turns and ranges.

XLA runs what it compiles in any order that the data allow. Where another order would cost memory or time, `after` makes
one array wait for others; every use says what would happen without it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from blaze_jax.exchange import Transport
from blaze_jax.plan import Projection, TokenRanges
from pallas_kernels.compat import vary_over, varying_axes
from pallas_kernels.xla.loops import empty


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


def to_come(transport: Transport, own: list[Projection]) -> tuple[Callable[[Any], Projection], ...]:
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


def one_by_one(ranges: TokenRanges, step: Callable, sums, *stacks):
    """`step(start, *own) -> (by_token, terms, others)` for each range, where its first token is `start`.

    Args:
      ranges: cuts of the tokens.
      step: a function of the range's entries `own` in `stacks`.
      sums: what the terms of the first range are added to.
      *stacks: pytrees of arrays `(count, ...)`, or None.

    Returns:
      What is by token as arrays `(T, ...)`, the sums, and the others stacked.
    """
    first = (jnp.int32(0), *jax.tree.map(lambda array: array[0], stacks))
    by_token, _, others = jax.eval_shape(step, *first)
    like = sums, stacks
    whole = jax.tree.map(lambda a: empty((ranges.num_tokens, *a.shape[1:]), a.dtype, like), by_token)
    stacked = jax.tree.map(lambda a: empty((ranges.count, *a.shape), a.dtype, like), others)

    def turn(i, carry):
        whole, sums, stacked = carry
        start = ranges.start(i)
        own = jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, i, keepdims=False), stacks)
        by_token, terms, others = step(start, *own)
        # XLA lets the kernels write there, if nothing is between the two.
        whole = jax.tree.map(lambda a, own: lax.dynamic_update_slice_in_dim(a, own, start, 0), whole, by_token)
        stacked = jax.tree.map(lambda a, own: lax.dynamic_update_index_in_dim(a, own, i, 0), stacked, others)
        return whole, jax.tree.map(jnp.add, sums, terms), stacked

    return lax.fori_loop(0, ranges.count, turn, (whole, vary_over(sums, varying_axes(like)), stacked))
