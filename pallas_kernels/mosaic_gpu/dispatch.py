"""Dispatch without a sort, in two launches: counts per block, then positions.

Block b of both kernels owns the same run of tokens. The first counts its pairs by expert. The second adds up the counts
of the blocks before it, which gives every block the start of its share of each expert's rows; its warps then walk their
pairs in order, 32 at a time, and rank those of one expert by lane.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.mosaic_gpu import simt
from pallas_kernels.mosaic_gpu.row_groups import ROW_ALIGNMENT, SPARE_ROWS, TILE_ROWS, RowGroups, TileSchedule
from pallas_kernels.mosaic_gpu.row_matmul import NUM_SMS
from pallas_kernels.mosaic_gpu.simt import WARP, block_barrier, loop, minimum, select, warp_barrier, when

WARPGROUPS = 4
THREADS = WARPGROUPS * 128
WARPS = THREADS // WARP
IN_FLIGHT = 8  # pairs that a thread loads at a time
COUNTS_IN_FLIGHT = 4  # the same for blocks' counts


def dispatch(
    experts: Int[Array, "T K"],
    num_experts: int,
    *,
    counts: Int[Array, "blocks E"] | None = None,
    blocks: int = NUM_SMS,
) -> tuple[RowGroups, Int[Array, "T K"]]:
    """Rows grouped by expert, their tiles, and every pair's row; see the portable twin.

    Groups start at multiples of 8 rows. An id outside `[0, num_experts)` marks an empty slot, whose row is R.

    Args:
      experts: int32, expert of each (token, slot).
      num_experts: E.
      counts: int32, pairs of each expert in each block's run of `ceil(T / blocks)` tokens, if they are known already
        (the router counts them); it saves the first launch.
      blocks: thread blocks of a launch; no result depends on it.
    """
    num_pairs = experts.size
    if counts is None:
        counts = _count(experts, num_experts, blocks)
    max_rows = num_pairs + min(num_experts, num_pairs) * (ROW_ALIGNMENT - 1)
    num_rows = -(-max_rows // ROW_ALIGNMENT) * ROW_ALIGNMENT + SPARE_ROWS
    num_tiles = -(-num_pairs // TILE_ROWS) + min(num_experts, num_pairs)
    token_indices, offsets, positions, *tiles = _place(experts, counts, num_rows, num_tiles)
    return RowGroups(token_indices, offsets, TileSchedule(*tiles)), positions


def _int32(*shape) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _clear(array, size):
    def clear(i):
        array[i] = 0

    loop(simt.thread(), size, THREADS, clear)


def _known(expert, num_experts):
    """`expert`, or `num_experts` for an empty slot."""
    return select((expert >= 0) & (expert < num_experts), expert, num_experts)


def _count(experts: Int[Array, "T K"], num_experts: int, blocks: int) -> Int[Array, "blocks E"]:
    """Pairs of each expert in each block's run of tokens."""
    pairs_per_block = -(-experts.shape[0] // blocks) * experts.shape[1]
    at_once = min(IN_FLIGHT, -(-pairs_per_block // THREADS))

    def body(experts_ref, counts, histogram):
        _clear(histogram, num_experts + 1)
        block_barrier()
        first = simt.block() * pairs_per_block
        last = minimum(first + pairs_per_block, experts.size)

        def add(start):
            pairs = [start + i * THREADS for i in range(at_once)]
            loaded = [experts_ref[minimum(pair, experts.size - 1)] for pair in pairs]
            for pair, expert in zip(pairs, loaded, strict=True):
                histogram.add(select(pair < last, _known(expert, num_experts), num_experts), 1)

        loop(first + simt.thread(), last, THREADS * at_once, add)
        block_barrier()

        def write(expert):
            counts[simt.block() * num_experts + expert] = histogram[expert]

        loop(simt.thread(), num_experts, THREADS, write)

    return simt.simt_kernel(
        body,
        name="moe_dispatch_count",
        outputs=[_int32(blocks, num_experts)],
        blocks=blocks,
        warpgroups=WARPGROUPS,
        shared=[num_experts + 1],
    )(experts)[0]


def _place(experts: Int[Array, "T K"], counts: Int[Array, "blocks E"], num_rows: int, num_tiles: int):
    """Token list, group offsets, positions of the pairs, and the tile schedule."""
    (num_tokens, slots), (blocks, num_experts) = experts.shape, counts.shape
    pairs_per_block = -(-num_tokens // blocks) * slots
    steps_per_warp = -(-pairs_per_block // (WARPS * WARP))
    pairs_per_warp = steps_per_warp * WARP
    steps_at_once = min(IN_FLIGHT, steps_per_warp)
    # The counts are summed by all threads: each takes a few neighbouring experts, and every so manyth block.
    neighbours = math.gcd(num_experts, 4)
    columns = num_experts // neighbours
    parts = max(1, min(THREADS // columns, -(-blocks // COUNTS_IN_FLIGHT)))
    experts_per_lane = -(-num_experts // WARP)

    def body(*pointers):
        experts_ref, counts_ref, *pointers = pointers
        token_indices, offsets, positions, tile_expert, tile_row, tile_rows, *shared = pointers
        next_row, total, before, group_start, first_tile = shared
        thread, block, warp = simt.thread(), simt.block(), simt.warp()
        lane = thread & (WARP - 1)
        block_end = minimum((block + 1) * pairs_per_block, experts.size)
        warp_start = block * pairs_per_block + warp * pairs_per_warp
        warp_end = minimum(warp_start + pairs_per_warp, block_end)
        my_rows = warp * (num_experts + 1)  # of `next_row`: a row of experts per warp

        def pair_at(step):
            pair = warp_start + step * WARP + lane
            used = pair < warp_end
            expert = _known(experts_ref[minimum(pair, experts.size - 1)], num_experts)
            return pair, used, select(used, expert, num_experts)

        loaded = [pair_at(simt.Int(i)) for i in range(steps_at_once)] if steps_at_once == steps_per_warp else None

        def for_all_pairs(work):
            """Does `work` on a few steps' pairs at a time, in order; steps past the last have no pairs."""
            if loaded:
                work(loaded)
                return
            loop(0, steps_per_warp, steps_at_once, lambda step: work([pair_at(step + i) for i in range(steps_at_once)]))

        # Each warp counts its own pairs; together all count what came before this block, and the whole.
        _clear(next_row, WARPS * (num_experts + 1))
        _clear(before, num_experts)
        _clear(total, num_experts)
        block_barrier()

        def count(pairs):
            for _, _, expert in pairs:
                next_row.add(my_rows + expert, 1)

        for_all_pairs(count)

        def add_up(item):
            expert, part = item % columns * neighbours, item // columns

            def add(first, *sums):
                others = [first + i * parts for i in range(COUNTS_IN_FLIGHT)]
                rows = [select(other < blocks, other, 0) * num_experts + expert for other in others]
                vectors = [counts_ref.load_vector(row, neighbours).elements() for row in rows]
                for other, vector in zip(others, vectors, strict=True):
                    earlier, inside = other < block, other < blocks
                    sums = [
                        *(s + select(earlier, v, 0) for s, v in zip(sums[:neighbours], vector, strict=True)),
                        *(s + select(inside, v, 0) for s, v in zip(sums[neighbours:], vector, strict=True)),
                    ]
                return sums

            sums = loop(part, blocks, parts * COUNTS_IN_FLIGHT, add, [0] * (2 * neighbours))
            for i in range(neighbours):
                before.add(expert + i, sums[i])
                total.add(expert + i, sums[neighbours + i])

        loop(thread, columns * parts, THREADS, add_up)
        block_barrier()

        def scan(result, of_expert):
            """`result[e]` = sum of `of_expert` over the experts before e, by one warp."""
            values = []
            for i in range(experts_per_lane):
                expert = lane * experts_per_lane + i
                value = of_expert(minimum(expert, num_experts - 1))
                values.append(select(expert < num_experts, value, 0))
            running, everything = simt.exclusive_warp_sum(simt.total(values), lane)
            for i, value in enumerate(values):
                expert = lane * experts_per_lane + i

                @when(expert < num_experts)
                def _(expert=expert, running=running):
                    result[expert] = running

                running = running + value

            @when(lane.equals(0))
            def _():
                result[num_experts] = everything

        def aligned(count):
            return (count + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT

        when(warp.equals(0))(lambda: scan(group_start, lambda e: aligned(total[e])))
        when(warp.equals(1))(lambda: scan(first_tile, lambda e: (total[e] + TILE_ROWS - 1) // TILE_ROWS))
        block_barrier()

        def start_warps(expert):
            row = group_start[expert] + before[expert]
            for w in range(WARPS):
                at = expert + w * (num_experts + 1)
                count = next_row[at]
                next_row[at] = row
                row = row + count

        loop(thread, num_experts, THREADS, start_warps)

        # Shared among all blocks: offsets, rows of no token, and the tiles.
        everyone, all_threads = block * THREADS + thread, blocks * THREADS

        def write_offset(expert):
            offsets[expert] = group_start[expert]

        loop(everyone, num_experts + 1, all_threads, write_offset)

        def pad(i):
            expert = i // ROW_ALIGNMENT
            row = group_start[expert] + total[expert] + i % ROW_ALIGNMENT

            @when(row < group_start[expert + 1])
            def _():
                token_indices[row] = num_tokens

        loop(everyone, num_experts * ROW_ALIGNMENT, all_threads, pad)

        def spare(row):
            token_indices[row] = num_tokens

        loop(group_start[num_experts] + everyone, num_rows, all_threads, spare)

        def write_tile(tile):
            low, high = simt.Int(0), simt.Int(num_experts)  # the last expert whose first tile is not past this one
            for _ in range(num_experts.bit_length()):
                middle = (low + high) // 2
                below = first_tile[middle] <= tile
                low, high = select(below & (low < middle), middle, low), select(below, high, middle)
            used = tile < first_tile[num_experts]
            expert = minimum(low, num_experts - 1)
            start = (tile - first_tile[expert]) * TILE_ROWS
            tile_expert[tile] = select(used, expert, 0)
            tile_row[tile] = select(used, group_start[expert] + start, 0)
            tile_rows[tile] = select(used, minimum(aligned(total[expert]) - start, TILE_ROWS), 0)

        loop(everyone, num_tiles, all_threads, write_tile)
        block_barrier()

        lower_lanes = (simt.Int(1) << lane) - 1

        def place(pairs):
            for (pair, used, expert), mine in [(p, simt.lanes_equal_to_mine(p[2])) for p in pairs]:
                rank = simt.count_bits(mine & lower_lanes)
                row = next_row[my_rows + expert] + rank
                warp_barrier()

                @when(rank.equals(0))
                def _(row=row, mine=mine, expert=expert):
                    next_row[my_rows + expert] = row + simt.count_bits(mine)

                warp_barrier()
                known = expert < num_experts

                @when(used)
                def _(pair=pair, row=row, known=known):
                    positions[pair] = select(known, row, num_rows)

                @when(used & known)
                def _(pair=pair, row=row):
                    token_indices[row] = pair // slots

        for_all_pairs(place)

    return simt.simt_kernel(
        body,
        name="moe_dispatch_place",
        outputs=[
            _int32(num_rows),
            _int32(num_experts + 1),
            _int32(num_tokens, slots),
            *(_int32(num_tiles) for _ in range(3)),
        ],
        blocks=blocks,
        warpgroups=WARPGROUPS,
        shared=[WARPS * (num_experts + 1), num_experts, num_experts, num_experts + 1, num_experts + 1],
    )(experts, counts)
