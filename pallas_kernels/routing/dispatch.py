"""Dispatch without a sort, in two launches: counts per block, then every pair's row.

Block b of both kernels owns the same run of tokens. The first counts its pairs by expert; the router does so too, and
then saves that launch. The second, `dispatch_place`, adds up the counts of the blocks before it, which gives every
block the start of its share of each expert's rows.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels import simt, xla
from pallas_kernels.contract import Dispatch
from pallas_kernels.mosaic.row_groups import ROW_ALIGNMENT, SPARE_ROWS, TILE_ROWS, TileSchedule
from pallas_kernels.routing.dispatch_place import known_expert, place
from pallas_kernels.simt.threads import block_barrier, indices
from pallas_kernels.simt.values import minimum, select
from pallas_kernels.traced_once import traced_once

MAX_EXPERTS = 2048  # every warp counts them in shared memory
BLOCKS = 128  # a power of two, and one SM left for the block that adds up the router's sums
WARPGROUPS = 4
THREADS = WARPGROUPS * 128
IN_FLIGHT = 8  # pairs that a thread loads at a time


@traced_once("num_experts", "row_alignment", "spare_rows", "blocks")
def dispatch(
    experts: Int[Array, "T K"],
    num_experts: int,
    *,
    row_alignment: int = ROW_ALIGNMENT,
    spare_rows: int = SPARE_ROWS,
    blocks: int = BLOCKS,
) -> Dispatch[TileSchedule]:
    """Rows grouped by expert, their tiles, and every pair's row; see the portable twin.

    An id outside `[0, num_experts)` marks an empty slot, whose row is R. The expert kernels need the default alignment
    and spare rows.

    Args:
      experts: int32, expert of each (token, slot).
      num_experts: E.
      row_alignment: groups start at multiples of so many rows.
      spare_rows: rows past those that groups can take.
      blocks: thread blocks of a launch; no result depends on it.
    """
    counts = _count(experts, num_experts, blocks)
    return place(experts, counts, row_alignment=row_alignment, spare_rows=spare_rows)[0]


def row_range(groups: Dispatch[TileSchedule], first_row: Int[Array, ""] | int, num_rows: int) -> Dispatch[TileSchedule]:
    """The rows from `first_row` on, as if there were no others; see the portable twin. Both are multiples of 8."""
    rows = xla.row_range(groups, first_row, num_rows, spare_rows=SPARE_ROWS)
    offsets = rows.expert_token_offsets
    return Dispatch(*rows[:-1], _tiles(offsets[:-1], offsets[1:], num_rows))


def in_parts(
    groups: Dispatch[TileSchedule], parts: int
) -> tuple[Dispatch[TileSchedule], tuple[Dispatch[TileSchedule], ...]]:
    """Rows that were grouped by expert and part, as groups by expert: all, and each part's; see the portable twin."""
    everything, own = xla.in_parts(groups._replace(tiles=None), parts)
    windows = jax.tree.map(lambda *rows: jnp.stack(rows), *(part.tiles for part in own))
    tiles = jax.vmap(partial(_tiles, num_rows=groups.num_rows - SPARE_ROWS))(windows.start, windows.end)
    of_parts = [jax.tree.map(lambda rows, p=p: rows[p], tiles) for p in range(parts)]
    of_all = groups.tiles._replace(expert=groups.tiles.expert // parts)
    own = (Dispatch(*part[:-1], of_part) for part, of_part in zip(own, of_parts, strict=True))
    return Dispatch(*everything[:-1], of_all), tuple(own)


def of_experts(
    groups: Dispatch[TileSchedule], first: int, experts: int, *, counted_from: int | None = None
) -> Dispatch[TileSchedule]:
    """The rows of `experts` experts, `first` and those after it, by the same numbers; see the portable twin."""
    tiles = groups.tiles
    with_rows, expert = tiles.valid_rows > 0, tiles.expert
    before = jnp.sum(with_rows & (expert < first), dtype=jnp.int32)
    mine = jnp.sum(with_rows & (expert >= first) & (expert < first + experts), dtype=jnp.int32)[None]
    tile = jnp.arange(tiles.num_tiles, dtype=jnp.int32)

    def moved(values):
        return jnp.where(tile < mine, values.at[before + tile].get(mode="fill", fill_value=0), 0)

    counted = expert - (first if counted_from is None else counted_from)
    rows = xla.of_experts(groups._replace(tiles=None), first, experts)
    return Dispatch(*rows[:-1], TileSchedule(*map(moved, (counted, *tiles.arrays[1:])), used=mine))


def _tiles(starts: Int[Array, " E"], ends: Int[Array, " E"], num_rows: int) -> TileSchedule:
    """The tiles of groups of rows from `starts` to `ends`, of `num_rows` at most."""
    groups = starts.shape[0]
    tiles = jnp.cumsum((ends - starts + TILE_ROWS - 1) // TILE_ROWS)
    tile = jnp.arange(-(-num_rows // TILE_ROWS) + min(groups, num_rows), dtype=jnp.int32)
    group = jnp.sum(tile[:, None] >= tiles, axis=1, dtype=jnp.int32)  # searchsorted takes XLA two launches
    used = group < groups
    group = jnp.where(used, group, 0)
    start = starts[group] + (tile - jnp.where(group > 0, tiles[group - 1], 0)) * TILE_ROWS
    schedule = (group, start, jnp.minimum(ends[group] - start, TILE_ROWS))
    return TileSchedule(*(jnp.where(used, a, 0).astype(jnp.int32) for a in schedule), used=tiles[-1:].astype(jnp.int32))


def dispatch_unsupported(num_experts: int) -> str | None:
    """Why the kernels cannot group rows of so many experts, or None if they can."""
    return None if num_experts <= MAX_EXPERTS else f"{num_experts=} must be at most {MAX_EXPERTS}"


def _count(experts: Int[Array, "T K"], num_experts: int, blocks: int) -> Int[Array, "blocks E"]:
    """Pairs of each expert in each block's run of tokens."""
    pairs_per_block = -(-experts.shape[0] // blocks) * experts.shape[1]
    at_once = min(IN_FLIGHT, -(-pairs_per_block // THREADS))

    def body(experts_ref, counts, histogram):
        simt.clear(histogram, num_experts + 1, THREADS)
        first = simt.block() * pairs_per_block
        last = minimum(first + pairs_per_block, experts.size)
        for start in indices(first + simt.thread(), last, THREADS * at_once):
            pairs = [start + i * THREADS for i in range(at_once)]
            loaded = [experts_ref[minimum(pair, experts.size - 1)] for pair in pairs]
            for pair, expert in zip(pairs, loaded, strict=True):
                histogram.add(select(pair < last, known_expert(expert, num_experts), num_experts), 1)
        block_barrier()
        for expert in indices(simt.thread(), num_experts, THREADS):
            counts[simt.block() * num_experts + expert] = histogram[expert]

    outputs, shared = [jax.ShapeDtypeStruct((blocks, num_experts), jnp.int32)], [num_experts + 1]
    options = {"blocks": blocks, "warpgroups": WARPGROUPS, "shared": shared}
    return simt.kernel(body, name="moe_dispatch_count", outputs=outputs, **options)(experts)[0]
