"""The plan of the experts' work: which rows are computed with which parameters, and when.

A row is a pair of a token and an expert. Four cuts, each for its own reason, say which rows one kernel takes:

    range   some of the tokens of one device: what has a row for each pair then exists for one range at a time.
    turn    the rows that a buffer of `row_budget` rows holds; the others follow in further turns.
    part    the tokens of one device of the group: they are computed as they arrive, this device's own first.
    block   the experts of one device along `fsdp`: they are computed as their parameters arrive, the own ones first.

A plan is made once, from settings; with a dispatch it gives the rows of a turn, by part and block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from blaze_jax.activations import Activation
from blaze_jax.checks import check_numbers
from blaze_jax.exchange import HERE, Transport, Trips
from blaze_jax.quantized import decoded
from pallas_kernels.codings import is_quantized
from pallas_kernels.compat import is_symbolic_dim, vary_over
from pallas_kernels.contract import Dispatch
from pallas_kernels.family import Kernels
from pallas_kernels.fp8 import CastWeight

ROW_MULTIPLE = 8
"""Budgets of rows are multiples of it, as groups of rows are in every family of kernels."""

RANGE_BYTES = 2**28
"""The activation of a range has at least as many: launching its kernels then takes about 1% of their time."""

ROWS_PER_EXPERT = 2**14
"""Rows of a range, at least: adding to the gradients of the weights then takes about 1% of the time of its products."""

MOST_RANGES = 16
"""Each is a piece of the program, and more would save little."""

ROW_BUDGET = 1.25
"""Rows of a buffer for every row that is expected: a quarter more, which no sane routing exceeds by chance."""

Save = Literal["pre_activations", "int8", "inputs"]


def check_mean_experts(mean_experts: float | None, slots: int) -> None:
    """Raises ValueError unless it is None, or an average number of experts of tokens with so many slots."""
    if mean_experts is not None:
        check_numbers(mean_experts=mean_experts)
        if not 0 < mean_experts <= slots:
            raise ValueError(f"{mean_experts=} must be None, or above 0 and at most {slots}, the slots of a token")


class Projection(NamedTuple):
    """What a projection of every expert has, which travels together.

    Attributes:
      weight: `(E, d, n)`; of the down projection `(E, n, d)`.
      bias: `(E, n)`; of the down projection `(E, d)`; or None.
      a, b: an adapter, whose product is added to the weight: `(E, d, r)` and `(E, r, n)`, of the down projection
        `(E, n, r)` and `(E, r, d)`; or None.
      cast: the weight in 8 bits, without itself, see `casts`; or None.
    """

    weight: Array
    bias: Array | None
    a: Array | None = None
    b: Array | None = None
    cast: CastWeight | None = None

    def with_bias_added(self, other: "Projection") -> "Projection":
        """The same weight, and the sum of the biases, if the other has one."""
        return self if self.bias is None or other.bias is None else self._replace(bias=self.bias + other.bias)


class Parameters(NamedTuple):
    """Projections of the experts: gate and up (or up alone), and down; their gradients, and their dtypes."""

    ups: tuple[Projection, ...]
    down: Projection

    def map(self, change: Callable[..., Projection], *others: "Parameters") -> "Parameters":
        """`change` of each projection, and of those of the others that stand in its place."""
        *ups, down = map(change, *((*p.ups, p.down) for p in (self, *others)))
        return Parameters(tuple(ups), down)

    def without(self, *fields: Literal["weight", "bias", "cast"]) -> "Parameters":
        """These with None in the place of all weights, biases or casts."""
        return self.map(lambda p: p._replace(**dict.fromkeys(fields)))


def with_frozen(trained: Parameters, params: Parameters) -> Parameters:
    """The parameters again, of what `Plan.trained` leaves of them."""

    def whole(own: Projection, p: Projection) -> Projection:
        return p._replace(a=own.a, b=own.b) if own.weight is None else own._replace(cast=p.cast)

    return trained.map(whole, params)


def weights_and_biases(projections: Sequence[Projection]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Weights and biases apart, as kernels take them; no biases where there are none."""
    weights, biases, *_ = zip(*projections, strict=True)
    return weights, () if biases[0] is None else biases


class Tokens(NamedTuple):
    """Tokens of this device, or those of them that travel at a time, and their pairs on all devices of the group.

    Attributes:
      x: `(T, d)`, this device's.
      weights: `(T_group, K)`, the group's.
      experts: `(T_group, K)`, ids of experts of this device, -1 for those of others.
      dispatch: the group's pairs with experts of this device; where tokens are in ranges, a tuple of each one's.
      trips: which tokens travel where, for "all_to_all".
      most_pairs: pairs of the device of the group with the most, None if that is not known.
      first: number of the first token of a range, whose weights, experts and dispatch these are; None for those of all.
    """

    x: Float[Array, "T d"]
    weights: Float[Array, "T_group K"]
    experts: Int[Array, "T_group K"]
    dispatch: Dispatch
    trips: Trips | None = None
    most_pairs: Int[Array, ""] | None = None
    first: int | None = None


class Rows(NamedTuple):
    """The rows of one turn.

    Attributes:
      all: every row.
      blocks: all rows by block of experts.
      parts: all rows by part of the tokens.
      units: `units[part][block]`, the rows of a part with experts of a block.
    """

    all: Dispatch
    blocks: tuple[Dispatch, ...]
    parts: tuple[Dispatch, ...]
    units: tuple[tuple[Dispatch, ...], ...]


@dataclass(frozen=True)
class TokenRanges:
    """Ranges of `size` tokens, the last one of those that are left, of `num_tokens`.

    A range has rows of all experts, so that the tiles of every kernel keep a GPU as busy as those of all tokens would.
    """

    num_tokens: int
    size: int

    def __post_init__(self):
        if not 1 <= self.size <= self.num_tokens:
            raise ValueError(f"size={self.size} of a range must be from 1 to num_tokens={self.num_tokens}")

    def cut[A](self, arrays: A) -> tuple[A, ...]:
        """Each range's entries of arrays `(T, ...)`."""

        def entries(first: int) -> A:
            return jax.tree.map(lambda array: array[first : first + self.size], arrays)

        return tuple(map(entries, range(0, self.num_tokens, self.size)))

    def dispatch(
        self, group: Callable[[Int[Array, "size K"]], Dispatch], experts: Int[Array, "T K"]
    ) -> tuple[Dispatch, ...]:
        """Each range's pairs as `group` groups them; token ids are those of all T tokens."""

        def of_range(number: int, own: Int[Array, "size K"]) -> Dispatch:
            groups = group(own)
            tokens = groups.expert_token_indices
            ids = jnp.where(tokens < own.shape[0], number * self.size + tokens, self.num_tokens)
            return groups._replace(expert_token_indices=ids)

        return tuple(of_range(number, own) for number, own in enumerate(self.cut(experts)))

    def tokens(self, tokens: "Tokens") -> tuple["Tokens", ...]:
        """Each range's, of those of all, whose dispatch is a tuple of each range's."""
        dispatches = cast(tuple[Dispatch, ...], tokens.dispatch)
        pairs = zip(self.cut((tokens.weights, tokens.experts)), dispatches, strict=True)
        return tuple(
            tokens._replace(weights=weights, experts=experts, dispatch=dispatch, first=number * self.size)
            for number, ((weights, experts), dispatch) in enumerate(pairs)
        )


def token_ranges(num_tokens: int, slots: int, num_experts: int, row_bytes: int) -> TokenRanges | None:
    """The ranges of T tokens with K slots, whose activation has `row_bytes` a row; None for all at once.

    The gradients of the weights are added up in float32. At 4 TB/s and 500 TFLOP/s this takes 167·E/R of the time of a
    range's products, for its R rows, whatever the widths.
    """
    if is_symbolic_dim(num_tokens):
        return None
    least = max(RANGE_BYTES // row_bytes, ROWS_PER_EXPERT * num_experts)
    number = min(num_tokens * slots // least, MOST_RANGES)
    return TokenRanges(num_tokens, -(-num_tokens // number)) if number > 1 else None


@dataclass(frozen=True)
class Plan:
    """Settings of the experts' work, and the rows of each turn.

    Attributes:
      activation, save: see `expert_ffn`.
      kernels: the family that computes.
      transport: how tokens and parameters travel.
      row_budget: rows of a buffer; None for as many as there may be.
      ranges: cuts of the tokens; None for all at once.
      frozen: whether weights and biases have no gradients, only adapters do.
      quantized: whether weights are compressed, and decoded in each pass, by the kernels or before them.
    """

    activation: Activation
    save: Save
    kernels: Kernels
    transport: Transport = HERE
    row_budget: int | None = None
    ranges: TokenRanges | None = None
    frozen: bool = False
    quantized: bool = False

    def parameters(self, shards: Parameters, dtype) -> Parameters:
        """What this device computes with, of what it has of the parameters; compressed weights as they are."""
        return self.transport.parameters(shards, dtype)

    def decodes_before(self, projections: Sequence[Projection], dtype) -> bool:
        """Whether weights of one product are compressed, and the kernels do not take them so."""
        return self.quantized and not self.kernels.decodes(tuple(p.weight for p in projections), dtype)

    def decoded(self, projections: Sequence[Projection], dtype, *before: Any) -> Sequence[Projection]:
        """The projections as the kernels take them: numbers are made after `before` is computed, for one use alone."""
        if projections[0].cast is not None:
            return [p._replace(weight=cast(Any, p.cast)) for p in projections]
        if not self.decodes_before(projections, dtype):
            return projections
        return decoded(self.delayed(projections, *before), dtype)

    def delayed[T](self, params: T, *before: Any) -> T:
        """The parameters with codes that exist after `before` is computed.

        A zero that exists only then is added to them: unlike a barrier around the codes, it needs no copy of them where
        they are one layer's of a stack.
        """
        zero, *_ = lax.optimization_barrier((jnp.uint8(0), *before))
        return jax.tree.map(lambda p: p.delayed(zero) if is_quantized(p) else p, params, is_leaf=is_quantized)

    @property
    def keep(self) -> bool:
        """Whether the backward pass keeps what the forward pass computes with."""
        return self.transport.keep and not self.quantized

    def trained(self, params: Parameters) -> Parameters:
        """What of the parameters has gradients."""
        return params.without("weight", "bias", "cast") if self.frozen else params.without("cast")

    def turns(self, tokens: Tokens) -> tuple[Rows, Int[Array, ""] | None]:
        """The rows of the first turn, and how many turns take the others; None if there are never others."""
        dispatch, axes = tokens.dispatch, self.transport.in_step  # all take part in every transport
        if self.row_budget is None or self.row_budget >= dispatch.num_rows:
            return self._cut(dispatch), None
        rows = dispatch.expert_token_offsets[-1]
        if tokens.most_pairs is not None:
            groups = dispatch.num_experts
            rows, axes = tokens.most_pairs + groups * (ROW_MULTIPLE - 1), axes - set(self.transport.group)
        turns = jnp.maximum(rows - self.row_budget + self._turn_rows - 1, 0) // self._turn_rows
        if axes:
            turns = lax.pmax(vary_over(turns, axes), tuple(sorted(axes)))
        return self._cut(self.kernels.row_range(dispatch, 0, self.row_budget)), turns

    def turn(self, tokens: Tokens, number: Int[Array, ""] | int) -> Rows:
        """The rows of a further turn, the first of which has number 0."""
        assert self.row_budget is not None
        first = self.row_budget + number * self._turn_rows
        return self._cut(self.kernels.row_range(tokens.dispatch, first, self._turn_rows))

    def pieces(self, rows: Dispatch, number: int) -> tuple[tuple[Dispatch, ...], ...]:
        """Rows of a part by block, each block but the last in so many pieces, if they divide it.

        While one piece is computed, one array of the next block comes.
        """
        blocks = self._blocks(rows)
        experts = rows.num_experts // len(blocks)
        if len(blocks) == 1 or experts % number:
            return tuple((block,) for block in blocks)
        of_experts, step = self.kernels.of_experts, experts // number
        assert of_experts is not None

        def cut(first):
            starts = range(first, first + experts, step)
            return tuple(of_experts(rows, start, step, counted_from=first) for start in starts)

        return (*(cut(block * experts) for block in range(len(blocks) - 1)), (blocks[-1],))

    @property
    def _turn_rows(self) -> int:
        """Rows of a further turn: an eighth of the budget, which as a rule is all that there are beyond it."""
        assert self.row_budget is not None
        return -(-self.row_budget // (8 * ROW_MULTIPLE)) * ROW_MULTIPLE

    def _cut(self, rows: Dispatch) -> Rows:
        parts = (rows,)
        if self.transport.parts > 1 and self.kernels.in_parts is not None:
            rows, parts = self.kernels.in_parts(rows, self.transport.parts)
        return Rows(rows, self._blocks(rows), parts, tuple(map(self._blocks, parts)))

    def _blocks(self, rows: Dispatch) -> tuple[Dispatch, ...]:
        of_experts, blocks = self.kernels.of_experts, self.transport.blocks
        if blocks == 1 or of_experts is None:
            return (rows,)
        experts = rows.num_experts // blocks
        return tuple(of_experts(rows, first, experts) for first in range(0, rows.num_experts, experts))
