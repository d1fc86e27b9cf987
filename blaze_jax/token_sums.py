"""The sums of the tokens' rows: those of other devices' tokens leave while this device's own are computed."""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from blaze_jax.column_blocks import combine_columns, departing_columns
from blaze_jax.expert_rows import Rows, Settings, Tokens, in_place


class TokenSums(NamedTuple):
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

    def added(self, rows_of: Callable, operands, y: Array) -> Array:
        """`y` and the sums of this device's tokens, to which nothing as wide as `y` is alive."""
        for own, weights, depart in self._parts():
            rows = rows_of(operands, own)
            y, _ = departing_columns(
                self.settings.kernels, rows, self.w_down, own, weights, self.dtype, depart or (lambda sums: sums), y
            )
        return y

    def _parts(self):
        parts = len(self.rows.parts)
        departures = self.settings.transport.departures(self.part.plan, parts)
        weights = [None] * parts if self.weights is None else jnp.split(self.weights, parts)
        return zip(self.rows.parts, weights, departures, strict=True)


def by_block(kernels: list[Callable]) -> Callable:
    """The rows `(first_column, num_columns)` of all blocks of experts, written one block after the other."""

    def rows(first_column, num_columns):
        options: dict[str, Any] = {}
        for kernel in kernels:
            options["into"] = kernel(first_column, num_columns, **options)
        return in_place(options["into"], len(kernels))

    return rows
