"""Dispatch without a sort: counts per tile, an exclusive scan, and direct writes to the final position."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from pallas_kernels.xla.row_groups import zeros

TILE_PAIRS = 256


def dispatch(
    experts: Int[Array, "T K"], num_experts: int, *, num_rows: int, row_alignment: int
) -> tuple[Int[Array, " R"], Int[Array, " E+1"], Int[Array, "T K"]]:
    """Token list by expert, group offsets, and every pair's position in that list.

    Three linear steps: each tile counts its pairs by expert, which also ranks them; an exclusive scan of the counts
    over tiles and of the totals over experts; one write per pair. Pairs keep their order, so tokens ascend inside an
    expert. Memory beside the results is O(T·K + tiles·E).

    Args:
      experts: expert of each (token, slot); a value outside `[0, num_experts)` marks an empty slot.
      num_experts: E.
      num_rows: R, at least what the groups need.
      row_alignment: every group starts at a multiple of this.

    Returns:
      `(token_indices, offsets, positions)`: unused rows hold T, empty slots have position R.
    """
    num_tokens, slots = experts.shape
    flat = jnp.where((experts >= 0) & (experts < num_experts), experts, num_experts).reshape(-1)
    num_tiles = -(-flat.size // TILE_PAIRS)
    tiles = jnp.pad(flat, (0, num_tiles * TILE_PAIRS - flat.size), constant_values=num_experts).reshape(
        num_tiles, TILE_PAIRS
    )

    # One step per place in a tile, all tiles at once: a pair's rank is the count so far of its expert in its tile.
    tile = jnp.arange(num_tiles, dtype=jnp.int32)

    def count_pair(counts, expert):
        return counts.at[tile, expert].add(1, mode="promise_in_bounds"), counts[tile, expert]

    counts, rank_in_tile = lax.scan(count_pair, zeros((num_tiles, num_experts + 1), jnp.int32, experts), tiles.T)
    pairs_before_tile = jnp.cumsum(counts, axis=0) - counts
    group_sizes = counts.sum(0, dtype=jnp.int32)[:num_experts]
    aligned_sizes = -(-group_sizes // row_alignment) * row_alignment
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(aligned_sizes, dtype=jnp.int32)])

    first_position = pairs_before_tile + offsets
    positions = first_position[tile[:, None], tiles] + rank_in_tile.T
    positions = jnp.where(tiles < num_experts, positions, num_rows).reshape(-1)[: flat.size]
    tokens = lax.iota(jnp.int32, flat.size) // slots
    token_indices = jnp.full((num_rows,), num_tokens, jnp.int32).at[positions].set(tokens, mode="drop")
    return token_indices, offsets, positions.reshape(experts.shape)
