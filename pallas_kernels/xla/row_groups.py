"""Rows grouped by expert, and the loops over them that every portable op is built from.

A row is one (token, slot) pair; rows of an expert lie next to each other. The loops visit only experts that have rows,
and only as many tiles as those rows need, so the arithmetic is exact: nothing grows with the number of experts.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import min_dim
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.compat import vary_over, varying_axes

type Arrays = tuple[Array, ...]

MAX_TILE_ROWS = 128
MIN_TILE_ROWS = 8


class RowGroups(NamedTuple):
    """Which token each row reads, and where each expert's rows start.

    Attributes:
      token_indices: `(R,)` int32, the token of each row; a row of padding holds a value past the last and reads zeros.
      offsets: `(E + 1,)` int32, expert `e` owns rows `offsets[e]` to `offsets[e + 1]`.
    """

    token_indices: Int[Array, " R"]
    offsets: Int[Array, " E+1"]

    @property
    def num_rows(self) -> int:
        return self.token_indices.shape[0]

    @property
    def num_experts(self) -> int:
        return self.offsets.shape[0] - 1


class Tile(NamedTuple):
    """A window of consecutive rows: `rows` of them from `start`; `mine` marks those of the expert being visited."""

    start: Int[Array, ""]
    mine: Bool[Array, "rows 1"]

    @property
    def rows(self) -> int:
        return self.mine.shape[0]


def accumulator_dtype(*dtypes) -> jnp.dtype:
    """float32 for every type up to float32, float64 if one of them is that; also where jax promotes no types."""
    return jnp.dtype(jnp.float64 if jnp.float64 in dtypes else jnp.float32)


def tile_rows(groups: RowGroups) -> int:
    """Rows per tile: about half an expert's share, so that partly filled tiles waste little and products stay large."""
    if is_symbolic_dim(groups.num_rows):
        return min_dim(MAX_TILE_ROWS, groups.num_rows)
    share = groups.num_rows // groups.num_experts
    return min(max(MIN_TILE_ROWS, min(MAX_TILE_ROWS, 1 << (share // 2).bit_length())), groups.num_rows)


def read_rows(array: Shaped[Array, "R ..."], tile: Tile) -> Shaped[Array, "rows ..."]:
    """The tile's rows of `array`, rows of other experts included."""
    return lax.dynamic_slice_in_dim(array, tile.start, tile.rows)


def read_own_rows(array: Float[Array, "R width"], tile: Tile) -> Float[Array, "rows width"]:
    """The tile's rows of `array`, zeros for rows of other experts: they may hold NaN, and NaN times zero is NaN."""
    return jnp.where(tile.mine, read_rows(array, tile), 0)


def gather_rows(tokens: Float[Array, "T width"], groups: RowGroups, tile: Tile) -> Float[Array, "rows width"]:
    """Rows of `tokens` that the tile's own rows stand for; zeros for padding and for rows of other experts."""
    indices = jnp.where(tile.mine[:, 0], read_rows(groups.token_indices, tile), tokens.shape[0])
    # The barrier keeps the gather out of the product's operand loop, where the CPU would index element by element.
    return lax.optimization_barrier(tokens.at[indices].get(mode="fill", fill_value=0))


def write_rows(
    array: Float[Array, "R width"], values: Float[Array, "rows width"], tile: Tile
) -> Float[Array, "R width"]:
    """`array` with the tile's own rows replaced by `values`; rows of other experts keep what they hold."""
    merged = jnp.where(tile.mine, values.astype(array.dtype), read_rows(array, tile))
    return lax.dynamic_update_slice_in_dim(array, merged, tile.start, axis=0)


def zeros(shape: tuple[int, ...], dtype, *like) -> Array:
    """Zeros that a loop reading `like` can carry, inside `shard_map` too."""
    return vary_over(jnp.zeros(shape, dtype), varying_axes(*like))


def _for_each_expert[Carry](groups: RowGroups, visit: Callable[[Int[Array, ""], Carry], Carry], carry: Carry) -> Carry:
    """`visit(expert, carry)` in ascending order for every expert that has rows."""
    has_rows = groups.offsets[1:] > groups.offsets[:-1]
    slot = jnp.where(has_rows, jnp.cumsum(has_rows) - 1, groups.num_experts)
    busy = jnp.zeros_like(slot).at[slot].set(jnp.arange(groups.num_experts, dtype=slot.dtype), mode="drop")
    return lax.fori_loop(0, has_rows.sum(dtype=jnp.int32), lambda i, c: visit(busy[i], c), carry)


def _for_each_tile[Carry](groups: RowGroups, expert, visit: Callable[[Tile, Carry], Carry], carry: Carry) -> Carry:
    """`visit(tile, carry)` over the rows of one expert, first to last."""
    rows = tile_rows(groups)
    first, end = groups.offsets[expert], groups.offsets[expert + 1]

    def step(i, carry):
        wanted = first + i * rows
        start = jnp.minimum(wanted, groups.num_rows - rows)  # the last window may reach back, never past the end
        row = start + jnp.arange(rows, dtype=jnp.int32)
        return visit(Tile(start, ((row >= wanted) & (row < end))[:, None]), carry)

    return lax.fori_loop(0, (end - first + rows - 1) // rows, step, carry)


def map_rows(
    groups: RowGroups, weights: Arrays, compute: Callable[[Arrays, Tile, Arrays], Arrays], rows: Arrays
) -> Arrays:
    """Fills row buffers tile by tile, in place.

    Args:
      groups: the rows by expert.
      weights: arrays `(E, ...)`; `compute` gets the slice of the tile's expert.
      compute: `(expert's weights, tile, rows so far) -> new values of the tile's rows`, one array per buffer.
      rows: the buffers `(R, ...)`; rows of no expert keep what they hold.
    """

    def visit_expert(expert, rows):
        own = tuple(lax.dynamic_index_in_dim(w, expert, keepdims=False) for w in weights)

        def visit_tile(tile, rows):
            # Every read of the tile before the first write: otherwise XLA copies whole buffers for each tile.
            values = lax.optimization_barrier(compute(own, tile, rows))
            return tuple(write_rows(r, v, tile) for r, v in zip(rows, values, strict=True))

        return _for_each_tile(groups, expert, visit_tile, rows)

    return _for_each_expert(groups, visit_expert, vary_over(rows, varying_axes(groups, weights, rows)))


def sum_rows(
    groups: RowGroups, terms: Callable[[Tile], Arrays], out: tuple[jax.ShapeDtypeStruct, ...], *like
) -> Arrays:
    """Per expert, the sum of `terms(tile)` over its tiles: accumulated wide, rounded once, zeros for an empty expert.

    Args:
      groups: the rows by expert.
      terms: the tile's contribution, one array per entry of `out` without its leading axis.
      out: shape `(E, ...)` and dtype of every result.
      *like: the arrays `terms` reads.
    """
    read = [a.dtype for a in jax.tree.leaves(like)]

    def visit_expert(expert, results):
        start = tuple(zeros(o.shape[1:], accumulator_dtype(o.dtype, *read), groups, like) for o in out)

        def add(tile, sums):
            return tuple(s + t.astype(s.dtype) for s, t in zip(sums, terms(tile), strict=True))

        sums = _for_each_tile(groups, expert, add, start)
        return tuple(
            lax.dynamic_update_index_in_dim(r, s.astype(r.dtype), expert, axis=0)
            for r, s in zip(results, sums, strict=True)
        )

    return _for_each_expert(groups, visit_expert, tuple(zeros(o.shape, o.dtype, groups, like) for o in out))
