"""Dispatch, from experts to rows, without a sort; parts of these rows; and combine, from rows back to tokens."""

from dataclasses import replace
from functools import partial, reduce

import jax.numpy as jnp
from jax import lax
from jax.core import min_dim
from jaxtyping import Array, Float, Int

from pallas_kernels.compat import vary_over, varying_axes
from pallas_kernels.contract import Dispatch, accumulator_dtype
from pallas_kernels.xla.loops import Windows, empty, zeros

_MOST_UNROLLED = 32
"""Slots of a token, of which `combine` has an operation each: a program would grow with more."""


def tile_pairs(num_experts: int) -> int:
    """Pairs of a tile: few, since they are counted in turn, but enough that the counts stay linear in T·K."""
    return min(max(32, 1 << (num_experts // 4 - 1).bit_length()), 256)


def count_in_turn(
    tiles: Int[Array, "tiles P"], num_experts: int
) -> tuple[Int[Array, "tiles E+1"], Int[Array, "tiles P"]]:
    """Pairs of each tile by expert, and every pair's rank: how many of its expert come before it in its tile.

    A step per place in a tile, all tiles at once: one operation per pair, which is what suits a CPU.
    """
    tile = jnp.arange(tiles.shape[0], dtype=jnp.int32)

    def count_pair(counts, expert):
        return counts.at[tile, expert].add(1, mode="promise_in_bounds"), counts[tile, expert]

    counts, rank = lax.scan(count_pair, zeros((tiles.shape[0], num_experts + 1), jnp.int32, tiles), tiles.T)
    return counts, rank.T


def count_by_comparison(
    tiles: Int[Array, "tiles P"], num_experts: int
) -> tuple[Int[Array, "tiles E+1"], Int[Array, "tiles P"]]:
    """Counts as `count_in_turn`, but compares a pair to its whole tile and to every expert, as suits an accelerator."""
    counts = (tiles[:, None] == jnp.arange(num_experts + 1, dtype=jnp.int32)[None, :, None]).sum(2, dtype=jnp.int32)
    place = jnp.arange(tiles.shape[1], dtype=jnp.int32)
    earlier = (place[None] < place[:, None])[None]
    return counts, ((tiles[:, None] == tiles[:, :, None]) & earlier).sum(2, dtype=jnp.int32)


def dispatch(
    experts: Int[Array, "T K"], num_experts: int, *, row_alignment: int = 1, spare_rows: int = 0
) -> Dispatch[None]:
    """Pairs grouped by expert: what `Dispatch` says, and no tiles.

    Three linear steps: each tile counts its pairs by expert, which also ranks them; an exclusive scan of the counts
    over tiles and of the totals over experts; one write per pair. Pairs keep their order, so tokens ascend inside an
    expert. Memory in addition to the results is O(T·K + tiles·E).

    Args:
      experts: int32, expert of each (token, slot); a value outside `[0, num_experts)` marks an empty slot.
      num_experts: E.
      row_alignment: every group starts at a multiple of this; the gaps are rows of token T, which read zeros.
      spare_rows: rows past those that groups can take.

    Returns:
      R is the most rows that groups so aligned can take, and the spare ones.
    """
    num_tokens, slots = experts.shape
    num_rows = experts.size + min_dim(num_experts, experts.size) * (row_alignment - 1)
    num_rows = -(-num_rows // row_alignment) * row_alignment + spare_rows
    flat = jnp.where((experts >= 0) & (experts < num_experts), experts, num_experts).reshape(-1)
    pairs = tile_pairs(num_experts)
    num_tiles = -(-flat.size // pairs)
    tiles = jnp.pad(flat, (0, num_tiles * pairs - flat.size), constant_values=num_experts).reshape(num_tiles, pairs)

    options = {"num_experts": num_experts}
    counts, rank_in_tile = lax.platform_dependent(
        tiles, cpu=partial(count_in_turn, **options), default=partial(count_by_comparison, **options)
    )
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    pairs_before_tile = jnp.cumsum(counts, axis=0) - counts
    group_sizes = counts.sum(0, dtype=jnp.int32)[:num_experts]
    aligned_sizes = -(-group_sizes // row_alignment) * row_alignment
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(aligned_sizes, dtype=jnp.int32)])

    first_position = pairs_before_tile + offsets[None]
    rows = first_position[tile[:, None], tiles] + rank_in_tile
    rows = jnp.where(tiles < num_experts, rows, num_rows).reshape(-1)[: flat.size]
    tokens = lax.iota(jnp.int32, flat.size) // slots
    expert_token_indices = jnp.full((num_rows,), num_tokens, jnp.int32).at[rows].set(tokens, mode="drop")
    return Dispatch(expert_token_indices, offsets, None, rows.reshape(experts.shape), None)


def row_range(
    groups: Dispatch, first_row: Int[Array, ""] | int, num_rows: int, *, spare_rows: int = 0
) -> Dispatch[None]:
    """The rows from `first_row` on, as if there were no others: an expert has those of its rows that are among them.

    Args:
      groups: all rows.
      first_row: the range's first; where groups are aligned, a multiple of their alignment.
      num_rows: the range's length, the same multiple; it may reach past the last row.
      spare_rows: rows past those.

    Returns:
      R is `num_rows` and the spare ones.
    """
    total = num_rows + spare_rows
    offsets = jnp.clip(groups.expert_token_offsets - first_row, 0, num_rows)
    row = jnp.arange(total, dtype=jnp.int32)
    num_tokens = groups.token_index_map.shape[0]
    tokens = groups.expert_token_indices.at[first_row + row].get(mode="fill", fill_value=num_tokens)
    place = groups.token_index_map - first_row
    return Dispatch(
        expert_token_indices=jnp.where(row < offsets[-1], tokens, num_tokens),
        expert_token_offsets=offsets,
        token_expert_indices=None,
        token_index_map=jnp.where((place >= 0) & (place < offsets[-1]), place, total),
        tiles=None,
    )


def in_parts(groups: Dispatch, parts: int) -> tuple[Dispatch[None], tuple[Dispatch[Windows], ...]]:
    """Rows that were grouped by expert and part, as groups by expert: all, and those of each part's tokens.

    Args:
      groups: those of the pairs (token, e * parts + p) for expert e and part p. Parts have equally many tokens, in
        order.
      parts: how many.

    Returns:
      All rows by expert, and for each part the rows of its tokens, by the same numbers. There, tokens are counted from
      the part's first, and expert_token_offsets tell of all rows.
    """
    windows, size = Windows.of(groups), groups.token_index_map.shape[0] // parts
    everything = groups._replace(expert_token_offsets=groups.expert_token_offsets[::parts], tiles=None)

    def part(p: int) -> Dispatch[Windows]:
        tokens = groups.expert_token_indices - p * size
        return everything._replace(
            expert_token_indices=jnp.where((tokens >= 0) & (tokens < size), tokens, size),
            token_index_map=groups.token_index_map[p * size : (p + 1) * size],
            tiles=replace(windows, start=windows.start[p::parts], end=windows.end[p::parts]),
        )

    return everything, tuple(map(part, range(parts)))


def of_experts(groups: Dispatch, first: int, experts: int, *, counted_from: int | None = None) -> Dispatch[Windows]:
    """The rows of `experts` experts, `first` and those after it, by the same numbers.

    There, experts are counted from `counted_from`, the first one whose weights the kernels get; None for `first`.
    """
    begin = first if counted_from is None else counted_from
    offsets = groups.expert_token_offsets[first : first + experts + 1]
    windows = Windows.of(groups)
    start, end = (rows[begin : first + experts] for rows in (windows.start, windows.end))
    row, tokens = jnp.arange(groups.num_rows, dtype=jnp.int32), groups.expert_token_indices
    mine = (row >= offsets[0]) & (row < offsets[-1])
    return groups._replace(
        expert_token_indices=jnp.where(mine, tokens, groups.token_index_map.shape[0]),
        expert_token_offsets=offsets,
        tiles=replace(windows, start=start, end=end.at[: first - begin].set(start[: first - begin])),
    )


def combine(
    rows: Float[Array, "R columns"],
    token_index_map: Int[Array, "T K"],
    weights: Float[Array, "T K"] | None,
    out: Float[Array, "T_all d"] | None,
    first_column: Int[Array, ""] | int,
    addend: Float[Array, "T columns"] | None = None,
    *,
    first_token: Int[Array, ""] | int = 0,
    width: int | None = None,
) -> Float[Array, "T_all d"]:
    """`out` with columns from `first_column` on replaced by `addend + Σ_k weights[t, k] · rows[token_index_map[t, k]]`.

    That is done for T of its tokens, from `first_token` on, and the others are as they were.

    Summed wide in this order, and rounded once. Positions past the last row (empty slots) contribute zero, unless their
    weight is NaN. Without `weights` all are one, without `addend` it is zero. Without `out` there is a new array of
    `width` columns, by default those of the rows, of which the others hold anything.
    """
    wide = accumulator_dtype(rows.dtype)
    shape = token_index_map.shape[0], rows.shape[1]
    total = jnp.zeros(shape, wide) if addend is None else addend.astype(wide)

    def add_slot(slot, total):
        row = rows.at[token_index_map[:, slot]].get(mode="fill", fill_value=0).astype(wide)
        return total + (row if weights is None else weights[:, slot, None].astype(wide) * row)

    slots = token_index_map.shape[1]
    if slots > _MOST_UNROLLED:
        total = lax.fori_loop(
            0, slots, add_slot, vary_over(total, varying_axes(rows, token_index_map, weights, addend))
        )
    else:
        total = reduce(lambda total, slot: add_slot(slot, total), range(slots), total)
    out = empty((shape[0], width or shape[1]), rows.dtype, rows) if out is None else out
    first = jnp.asarray(first_token, jnp.int32), jnp.asarray(first_column, jnp.int32)  # also where ints have 64 bits
    return lax.dynamic_update_slice(out, total.astype(out.dtype), first)
