"""The loops over rows grouped by expert that every portable operation is built from.

A row is one (token, slot) pair; rows of an expert lie next to each other. A turn of the loops takes a tile: some rows
of each of a few experts, multiplied as a batch. Experts come in the order of their rows, the most first, so that those
of a batch have about as many; experts without rows are not visited. So the arithmetic is exact whatever the routing,
and little of it is done on rows that do not count.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import min_dim
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.compat import vary_over, varying_axes
from pallas_kernels.contract import Dispatch, Sums, accumulator_dtype

type Arrays = tuple[Array, ...]

MAX_TILE_ROWS = 128
MIN_TILE_ROWS = 8

TURN_ELEMENTS = 48 * 2**20
"""Elements that an accelerator reads and writes in a turn: half as many take 10% longer on an H200, twice as many more
memory."""

MAX_BATCH = 16
"""Experts of a batch at most: with all tokens on a few, the others of their batch are computed for nothing."""


class Turn(NamedTuple):
    """A turn of the loops takes `rows` of each of `experts` experts."""

    experts: int
    rows: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Windows:
    """Rows of each expert that are computed, where groups of rows do not say so by their offsets.

    Attributes:
      start: `(E,)` int32, the first row.
      end: `(E,)` int32, the first one after them.
      shares: how many windows there are for all rows, these among them.
    """

    start: Int[Array, " E"]
    end: Int[Array, " E"]
    shares: int = field(metadata={"static": True})

    @classmethod
    def of(cls, groups: Dispatch) -> "Windows":
        offsets = groups.expert_token_offsets  # which tiles of other families tell as well
        return groups.tiles if isinstance(groups.tiles, cls) else cls(offsets[:-1], offsets[1:], groups.num_experts)


class Tile(NamedTuple):
    """Consecutive rows of each expert visited: `mine` marks those that are its own.

    Attributes:
      start: `(B,)` int32, the first rows.
      mine: `(B, C, 1)`, for C rows of each.
    """

    start: Int[Array, " B"]
    mine: Bool[Array, "B C 1"]

    @property
    def turn(self) -> Turn:
        return Turn(*self.mine.shape[:2])

    @property
    def row(self) -> Int[Array, "B C"]:
        return self.start[:, None] + lax.iota(jnp.int32, self.turn.rows)[None]


_forced_turn: ContextVar[Turn | None] = ContextVar("forced_turn", default=None)


@contextmanager
def turns_of(experts: int, rows: int) -> Iterator[None]:
    """Inside, every platform's turns take so many rows of so many experts: for tests and tuning."""
    token = _forced_turn.set(Turn(experts, rows))
    try:
        yield
    finally:
        _forced_turn.reset(token)


def forced_turn() -> Turn | None:
    """The turn that `turns_of` says, or None."""
    return _forced_turn.get()


def cpu_turn(groups: Dispatch) -> Turn:
    """One expert's rows, about half its share: partly filled tiles waste little there, and products stay large."""
    if is_symbolic_dim(groups.num_rows):
        return Turn(1, min_dim(MAX_TILE_ROWS, groups.num_rows))
    share = groups.num_rows // Windows.of(groups).shares
    rows = max(MIN_TILE_ROWS, min(MAX_TILE_ROWS, 1 << (share // 2).bit_length()))
    return Turn(1, min(rows, groups.num_rows))


def accelerator_turn(groups: Dispatch, width: int) -> Turn:
    """Many rows: of one expert if it has as many, or else of a batch of experts.

    Args:
      groups: the rows by expert.
      width: elements read and written for a row.
    """
    budget = max(MAX_TILE_ROWS, TURN_ELEMENTS // width)
    if is_symbolic_dim(groups.num_rows):
        return Turn(1, min_dim(budget, groups.num_rows))
    share = groups.num_rows / Windows.of(groups).shares
    share += 3 * math.sqrt(share)  # hardly an expert has more rows, if all are chosen alike
    turns = max(1, math.ceil(share / budget))
    rows = min(-(-math.ceil(share / turns) // MIN_TILE_ROWS) * MIN_TILE_ROWS, groups.num_rows)
    # Half of the experts at most: what is gathered or converted for a batch is never a copy of all weights.
    return Turn(max(1, min(budget // rows, MAX_BATCH, groups.num_experts // 2)), rows)


def _on_platform[T](groups: Dispatch, width: int, run: Callable[[Turn], T]) -> T:
    """`run` with turns that suit the platform which the program is compiled for, and that need not be here."""
    if forced := forced_turn():
        return run(Turn(min(forced.experts, groups.num_experts), min_dim(forced.rows, groups.num_rows)))
    cpu, accelerator = cpu_turn(groups), accelerator_turn(groups, width)
    return lax.platform_dependent(cpu=lambda: run(cpu), default=lambda: run(accelerator))


def read_rows(array: Shaped[Array, "R ..."], tile: Tile) -> Shaped[Array, "B C ..."]:
    """The tile's rows of `array`, rows of other experts included."""

    def window(start):
        return lax.dynamic_slice_in_dim(array, start, tile.turn.rows)

    return window(tile.start[0])[None] if tile.turn.experts == 1 else jax.vmap(window)(tile.start)


def read_own_rows(array: Float[Array, "R width"], tile: Tile) -> Float[Array, "B C width"]:
    """The tile's rows of `array`, zeros for rows of other experts: they may hold NaN, and NaN times zero is NaN."""
    return jnp.where(tile.mine, read_rows(array, tile), 0)


def gather_rows(tokens: Float[Array, "T width"], groups: Dispatch, tile: Tile) -> Float[Array, "B C width"]:
    """Rows of `tokens` that the tile's own rows stand for; zeros for padding and for rows of other experts."""
    indices = jnp.where(tile.mine[..., 0], read_rows(groups.expert_token_indices, tile), tokens.shape[0])
    # The barrier keeps the gather out of the product's operand loop, where the CPU would index element by element.
    return lax.optimization_barrier(tokens.at[indices].get(mode="fill", fill_value=0))


def write_rows(
    array: Float[Array, "R width"], values: Float[Array, "B C width"], tile: Tile
) -> Float[Array, "R width"]:
    """`array` with the tile's own rows replaced by `values`; rows of other experts keep what they hold."""
    if tile.turn.experts == 1:
        start = tile.start[0]
        merged = jnp.where(tile.mine[0], values[0], lax.dynamic_slice_in_dim(array, start, tile.turn.rows))
        return lax.dynamic_update_slice_in_dim(array, merged, start, axis=0)
    # The dropped rows are distinct, too. Told that all rows are, XLA need not write them one after another.
    dropped = array.shape[0] + lax.iota(jnp.int32, math.prod(tile.turn)).reshape(tile.turn)
    row = jnp.where(tile.mine[..., 0], tile.row, dropped)
    return array.at[row].set(values, mode="drop", unique_indices=True)


def product(
    lhs: Float[Array, "B _ _"], rhs: Float[Array, "B _ _"], lhs_axis: int, rhs_axis: int
) -> Float[Array, "B _ _"]:
    """Product of each expert's matrices that contracts these axes of `lhs` and `rhs`, accumulated and left wide."""
    # Without the barrier XLA merges products that share an operand, and concatenates their weights in every turn.
    lhs, rhs = lax.optimization_barrier((lhs, rhs))
    axes = (((lhs_axis,), (rhs_axis,)), ((0,), (0,)))
    return lax.dot_general(lhs, rhs, axes, preferred_element_type=accumulator_dtype(lhs.dtype))


def zeros(shape: tuple[int, ...], dtype, *like) -> Array:
    """Zeros that a loop reading `like` can carry, inside `shard_map` too."""
    return vary_over(jnp.zeros(shape, dtype), varying_axes(*like))


def empty(shape: tuple[int, ...], dtype, *like) -> Array:
    """A buffer that holds anything, for what is written before it is read, inside `shard_map` too.

    XLA would take as long to fill it with zeros as a kernel to write it. Nobody reads the rows of no expert.
    """
    return vary_over(lax.empty(shape, dtype), varying_axes(*like))


def _for_each_batch[Carry](
    groups: Dispatch, turn: Turn, visit: Callable[[Int[Array, " B"], Callable, Carry], Carry], carry: Carry
) -> Carry:
    """`visit(experts, for_each_tile, carry)` for every batch of experts that has rows.

    `for_each_tile(step, carry)` is `step(tile, carry)` over the rows of the batch, first to last. Where the experts do
    not fill the last batch, there are distinct ids past the last, of experts without rows.
    """
    windows, batch = Windows.of(groups), turn.experts
    load = windows.end - windows.start
    num_experts = load.shape[0]
    order = jnp.argsort(-load, stable=True).astype(jnp.int32)
    order = jnp.concatenate([order, jnp.arange(num_experts, num_experts + -num_experts % batch, dtype=jnp.int32)])

    def visit_batch(i, carry):
        experts = lax.dynamic_slice_in_dim(order, i * batch, batch)
        first, end = (rows.at[experts].get(mode="fill", fill_value=0) for rows in (windows.start, windows.end))

        def step_at(step, i, carry):
            wanted = first + i * turn.rows
            start = jnp.minimum(wanted, groups.num_rows - turn.rows)  # the last window may reach back, never too far
            row = Tile(start, jnp.zeros((*turn, 1), jnp.bool)).row
            mine = (row >= wanted[:, None]) & (row < end[:, None])
            return step(Tile(start, mine[..., None]), carry)

        def for_each_tile(step, carry):
            tiles = ((end - first).max() + turn.rows - 1) // turn.rows
            return lax.fori_loop(0, tiles, lambda i, c: step_at(step, i, c), carry)

        return visit(experts, for_each_tile, carry)

    busy = (load > 0).sum(dtype=jnp.int32)
    return lax.fori_loop(0, (busy + batch - 1) // batch, visit_batch, carry)


def map_rows(
    groups: Dispatch,
    weights: tuple[Any, ...],
    prepare: Callable[[Arrays], Arrays],
    compute: Callable[[Arrays, Tile, Arrays], Arrays],
    rows: Arrays,
) -> Arrays:
    """Fills row buffers tile by tile, in place.

    Args:
      groups: the rows by expert.
      weights: arrays `(E, ...)`, a matrix for each expert first; matrices may be compressed.
      prepare: what `compute` shall have of a batch's weights `(B, ...)`, computed once for the batch.
      compute: `(prepared weights, tile, rows so far) -> new values of the tile's rows`, one array `(B, C, ...)` per
        buffer. One that reads the rows so far does so behind a barrier, before the first write: otherwise XLA copies
        whole buffers for each tile.
      rows: the buffers `(R, ...)`; rows of no expert keep what they hold.
    """

    def run(turn: Turn) -> Arrays:
        def visit(experts, for_each_tile, rows):
            of_experts = jax.tree.map(lambda array: _own(array, experts), weights)
            own = lax.optimization_barrier(prepare(of_experts))

            def step(tile, rows):
                values = compute(own, tile, rows)
                return tuple(write_rows(r, v.astype(r.dtype), tile) for r, v in zip(rows, values, strict=True))

            return for_each_tile(step, rows)

        return _for_each_batch(groups, turn, visit, vary_over(rows, varying_axes(groups, weights, rows)))

    return _on_platform(groups, sum(weights[0].shape[1:]), run)


def sum_rows(
    groups: Dispatch,
    terms: Callable[[Tile], Arrays],
    out: tuple[jax.ShapeDtypeStruct, ...],
    *like,
    sums: Sums | None = None,
) -> Arrays:
    """Per expert, the sum of `terms(tile)` over its tiles: accumulated wide, rounded once, zeros for an empty expert.

    Args:
      groups: the rows by expert.
      terms: the tile's contribution, one array `(B, ...)` per entry of `out`.
      out: shape `(E, ...)` and dtype of every result, a matrix for each expert first.
      *like: the arrays `terms` reads.
      sums: what the first results are added to, and then are.
    """
    known, first = sums or ((), None)
    read = [a.dtype for a in jax.tree.leaves(like)]

    def run(turn: Turn) -> Arrays:
        def visit(experts, for_each_tile, results):
            def add(tile, totals):
                return tuple(s + t.astype(s.dtype) for s, t in zip(totals, terms(tile), strict=True))

            start = (zeros((turn.experts, *o.shape[1:]), accumulator_dtype(o.dtype, *read), groups, like) for o in out)
            totals = list(for_each_tile(add, tuple(start)))
            places = [experts] * len(out)
            for i, result in enumerate(results[: len(known)]):
                if first is not None:  # an id past the last must not become a place of another expert
                    places[i] = jnp.where(experts < groups.num_experts, first + experts, result.shape[0] + experts)
                totals[i] += _own(result, places[i]).astype(totals[i].dtype)
            return tuple(_replace(r, s.astype(r.dtype), p) for r, s, p in zip(results, totals, places, strict=True))

        new = (zeros(o.shape, o.dtype, groups, like) for o in out[len(known) :])
        return _for_each_batch(groups, turn, visit, (*vary_over(known, varying_axes(groups, like)), *new))

    return _on_platform(groups, sum(out[0].shape[1:]), run)


def _own(array: Shaped[Array, "E ..."], experts: Int[Array, " B"]) -> Shaped[Array, "B ..."]:
    """The experts' slices; an id past the last gets any."""
    if experts.shape[0] == 1:
        return lax.dynamic_slice_in_dim(array, experts[0], 1)
    return array.at[experts].get(mode="clip")


def _replace(
    array: Shaped[Array, "E ..."], values: Shaped[Array, "B ..."], experts: Int[Array, " B"]
) -> Shaped[Array, "E ..."]:
    """`array` with the experts' slices replaced; ids past the last are dropped."""
    if experts.shape[0] == 1:
        return lax.dynamic_update_slice_in_dim(array, values, experts[0], axis=0)
    return array.at[experts].set(values, mode="drop", unique_indices=True)
