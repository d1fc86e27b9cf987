"""What the experts compute with, and which rows at a time: a budget, a part of the tokens, a block of experts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from blaze_jax.activations import Activation
from blaze_jax.exchange import HERE, Plan, Transport
from blaze_jax.token_ranges import TokenRanges
from pallas_kernels.compat import vary_over
from pallas_kernels.contract import Dispatch, Kernels

ROW_MULTIPLE = 8
"""Budgets of rows are multiples of it, as groups of rows are in every family of kernels."""

Save = Literal["pre_activations", "inputs"]


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
        """Rows of a turn: fewer than the budget, for a turn has one matrix's gradient twice, which it adds to."""
        assert self.row_budget is not None
        return -(-self.row_budget // (8 * ROW_MULTIPLE)) * ROW_MULTIPLE


def with_turns(turns: Int[Array, ""] | None, run: Callable):
    """`run(further)`, which takes the further turns only if there are any.

    The host waits for their number here, between long kernels: after them it would fall behind the device.
    """
    return run(False) if turns is None else lax.cond(turns == 0, partial(run, False), partial(run, True))


def in_place(arrays, parts: int):
    """`arrays`, of which a kernel writes one of `parts` and trusts XLA that the other rows are there.

    For one layer of a stack, XLA would give it the stack's memory for its result alone (see `mosaic/launches.py`).
    """
    return arrays if parts == 1 else lax.optimization_barrier(arrays)
