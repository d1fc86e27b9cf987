"""The sums of the tokens' rows: those of other devices' tokens leave while this device's own are computed."""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from blaze_jax.column_blocks import column_blocks, combine_columns, empty_columns
from blaze_jax.expert_rows import Rows, Settings, Tokens, in_place
from pallas_kernels.compat import vary_over, varying_axes
from pallas_kernels.contract import Dispatch


class _Part(NamedTuple):
    """Rows of a part of the tokens, their weights, and what brings the sums to the tokens' device; None if here."""

    dispatch: Dispatch
    weights: Array | None
    depart: Callable | None


class TokenSums(NamedTuple):
    """The sums of the tokens' rows, a block of columns at a time; those of other devices' tokens leave for there."""

    settings: Settings
    w_down: Array
    part: Tokens
    rows: Rows
    weights: tuple[Array, ...] | None
    dtype: Any

    def of(
        self,
        rows_of: Callable,
        operands,
        before: Float[Array, "T d"] | None = None,
        *,
        meanwhile: Callable = lambda operands: (None, operands),
    ) -> tuple[Float[Array, "T d"], Any]:
        """The sums of this device's tokens, added to those of `before`, and the result of `meanwhile`.

        A block of columns of the others' tokens leaves; then the one before it, which has arrived from other devices by
        now, is the addend of this device's own. So two are under way at most, and nothing else is as wide as the sums.

        Args:
          rows_of: of operands and a dispatch, the `rows` of `combine_columns`.
          operands: what it takes.
          before: sums to add to.
          meanwhile: `(result, operands)` of the operands, computed while the last block travels.
        """
        parts = self._parts()
        own = parts[0] if parts[0].depart is None else None  # the first part stays, if one does
        away = [(part, part.depart) for part in parts if part.depart is not None]
        if not away and before is None:
            result, operands = meanwhile(operands)
            return self._here(rows_of(operands, parts[0].dispatch), parts[0]), result

        blocks = column_blocks(self.settings.kernels, self.w_down, parts[0].dispatch, self.dtype)
        y, arriving, done = before, [], ()

        def finished(y, operands, block):
            (first, columns), addend = blocks[block], arriving[block]
            if before is not None:
                there = lax.dynamic_slice_in_dim(y, first, columns, axis=1)
                addend = there if addend is None else addend + there
            if own is None:
                y = _empty(addend, self.w_down.shape[2]) if y is None else y
                return lax.dynamic_update_slice_in_dim(y, addend, first, axis=1)
            y = empty_columns(own.dispatch, self.w_down.shape[2], self.dtype) if y is None else y
            return self._combined(rows_of(operands, own.dispatch), own, blocks[block], y, first, addend, done)

        for block, (_, columns) in enumerate(blocks):
            departed = []
            for part, depart in away:
                out = empty_columns(part.dispatch, columns, self.dtype)
                done = self._combined(rows_of(operands, part.dispatch), part, blocks[block], out, 0, None, done)
                departed.append(depart(done))
            arriving.append(reduce(jnp.add, departed) if departed else None)
            if block:
                y = done = finished(y, operands, block - 1)
        operands, _ = lax.optimization_barrier((operands, done))
        result, operands = meanwhile(operands)
        return finished(y, operands, len(blocks) - 1), result

    def _here(self, rows: Callable, part: _Part) -> Float[Array, "T d"]:
        options = (self.w_down, part.dispatch, part.weights, self.dtype)
        return combine_columns(self.settings.kernels, rows, *options, at_once=self.settings.ranges is not None)

    def _combined(self, rows: Callable, part: _Part, block: tuple[int, int], out, column: int, addend, after) -> Array:
        """`out` with the part's sums of a block. Its rows wait for `after`, or XLA would keep those of many blocks."""
        first, columns = block
        first_column, _ = lax.optimization_barrier((jnp.int32(first), after))
        of_block = rows(first_column, columns)
        return self.settings.kernels.combine(of_block, part.dispatch.token_index_map, part.weights, out, column, addend)

    def _parts(self) -> list[_Part]:
        parts = len(self.rows.parts)
        departures = self.settings.transport.departures(self.part.plan, parts)
        return list(map(_Part, self.rows.parts, self.weights or [None] * parts, departures))


def by_block(kernels: list[Callable]) -> Callable:
    """The rows `(first_column, num_columns)` of all blocks of experts, written one block after the other."""

    def rows(first_column, num_columns):
        options: dict[str, Any] = {}
        for kernel in kernels:
            options["into"] = kernel(first_column, num_columns, **options)
        return in_place(options["into"], len(kernels))

    return rows


def _empty(columns: Array, width: int) -> Array:
    """As many rows as `columns`; every column has to be written."""
    return vary_over(lax.empty((columns.shape[0], width), columns.dtype), varying_axes(columns))
