"""Second launch of dispatch: from the pairs' experts and every block's counts to rows, offsets and tiles.

Block b owns a run of tokens, and each of its warps a run of those, which it walks in order, 32 pairs at a time: a
pair's rank is the number of pairs of its expert that its warp met before. Meanwhile all threads add up the blocks'
counts. Where an expert's rows start, plus its pairs in earlier blocks and warps, plus the rank, is the pair's row.

The block gathers its token ids by expert in shared memory and then writes them in runs: single words written here and
there would cost a sector of memory each.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import simt
from pallas_kernels.contract import Dispatch, Losses
from pallas_kernels.mosaic.row_groups import ROW_ALIGNMENT, SPARE_ROWS, TILE_ROWS, TileSchedule
from pallas_kernels.routing.block_sums import ColumnSums, finish_router
from pallas_kernels.simt.threads import (
    block_barrier,
    exclusive_warp_sum,
    indices,
    lanes_with_equal_bits,
    warp_barrier,
    when,
)
from pallas_kernels.simt.values import WARP, count_bits, minimum, select, total

WARPGROUPS = 4
THREADS = WARPGROUPS * 128
WARPS = THREADS // WARP
HELD = 6  # steps of a warp whose pairs stay in registers; 8 spilled where there are 256 experts
STEPS_AT_ONCE = 8  # steps whose pairs are loaded together, where there are more of them
GATHERED_AT_ONCE = 4  # rows that a thread writes at a time
MOST_SHARED_WORDS = 50 * 1024
_TOKEN_BITS = 20


def place(
    experts: Int[Array, "T K"],
    counts: Int[Array, "blocks E"],
    sums: tuple[Float[Array, "blocks E"], Float[Array, "blocks 2"]] | None = None,
    *,
    row_alignment: int = ROW_ALIGNMENT,
    spare_rows: int = SPARE_ROWS,
) -> tuple[Dispatch[TileSchedule], tuple[Int[Array, " E"], Losses] | None]:
    """Rows grouped by expert; with the router's sums also its demand and losses, else None.

    A block of their own adds those up, while the others work. `counts` are the pairs of each expert in each block's run
    of `ceil(T / blocks)` tokens.
    """
    experts_shape, (blocks, num_experts) = experts.shape, counts.shape
    column_sums, log_sums = ColumnSums(blocks, num_experts, THREADS), ColumnSums(blocks, 2, THREADS)
    routed: Any = None
    shared_by_sums = None
    if sums is not None:
        routed = _int32(num_experts), Losses(*[jax.ShapeDtypeStruct((1,), jnp.float32)] * 3)
        shared_by_sums = column_sums.words, column_sums.words, log_sums.words, WARPS
    room = MOST_SHARED_WORDS - sum(shared_by_sums or ())
    body = _Place(experts_shape, column_sums, row_alignment, spare_rows, room)

    def run(experts, counts, sums, dispatch, routed, shared, shared_by_sums):
        if sums is None:
            body.run(experts, counts, dispatch, shared)
            return
        block = simt.block()
        with when(block < blocks):
            body.run(experts, counts, dispatch, shared)
        with when(block.equals(blocks)):
            finish_router(experts_shape, column_sums, log_sums, counts, sums, routed, shared_by_sums)

    options = {"outputs": (body.outputs, routed), "shared": (tuple(body.words.values()), shared_by_sums)}
    options |= {"blocks": blocks + (sums is not None), "warpgroups": WARPGROUPS}
    dispatch, routed = simt.kernel(run, name="moe_dispatch_place", **options)(experts, counts, sums)
    return dispatch, routed


def _int32(*shape) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def known_expert(expert, num_experts: int):
    """`expert`, or `num_experts` for an empty slot."""
    return select((expert >= 0) & (expert < num_experts), expert, num_experts)


class _Pair(NamedTuple):
    """A (token, slot) pair of this lane, if it has one: `expert` is `num_experts` for an empty slot or no pair."""

    number: simt.Int
    used: simt.Bool
    expert: simt.Int


class _Place:
    """A thread of the kernel."""

    def __init__(self, experts_shape, column_sums: ColumnSums, row_alignment: int, spare_rows: int, most_words: int):
        self.num_tokens, self.slots = experts_shape
        self.column_sums, self.row_alignment = column_sums, row_alignment
        self.blocks, self.num_experts = column_sums.num_rows, column_sums.width
        self.num_pairs = self.num_tokens * self.slots
        groups = min(self.num_experts, self.num_pairs)
        self.num_rows = self.aligned(self.num_pairs + groups * (row_alignment - 1)) + spare_rows
        self.num_tiles = -(-self.num_pairs // TILE_ROWS) + groups
        tiles = TileSchedule(*[_int32(self.num_tiles)] * 3)
        index_map = _int32(self.num_tokens, self.slots)
        self.outputs = Dispatch(_int32(self.num_rows), _int32(self.num_experts + 1), None, index_map, tiles)
        self.tokens_per_block = -(-self.num_tokens // self.blocks)
        self.pairs_per_block = self.tokens_per_block * self.slots
        self.steps = -(-self.pairs_per_block // THREADS)  # of a warp
        self.counters = self.num_experts + 1  # of a warp
        # Each of the first threads takes a few neighbouring experts.
        self.experts_per_thread = -(-self.num_experts // THREADS)
        self.scanning_warps = -(-self.num_experts // (self.experts_per_thread * WARP))
        # A block's shared memory: the words of each array.
        self.words = {
            "counters": WARPS
            * self.counters,  # each warp's, by expert and for empty slots: its pairs, then its next row
            "sums": column_sums.words,  # all blocks' pairs by expert
            "sums_before": column_sums.words,  # pairs by expert in the blocks before this one
            "pairs": self.num_experts,  # the sums by expert, each in one word
            "group_start": self.num_experts + 1,  # each expert's first row, and where the last one's end
            "first_tile": self.num_experts + 1,  # each expert's first tile, and how many there are
            "first_gathered": self.num_experts + 1,  # each one's first of the block's gathered rows, and how many
            "way_home": self.num_experts,  # how far each expert's gathered rows are from home
            "warp_totals": 3 * self.scanning_warps,  # rows, tiles and gathered rows of each warp that scans experts
            "gathered": self.pairs_per_block,  # token and expert of each of the block's pairs
        }
        # Token and expert must fit into a word, and all pairs into memory.
        self.gather = self.num_experts < 2048 and self.tokens_per_block < 1 << _TOKEN_BITS
        self.gather = self.gather and sum(self.words.values()) <= most_words
        if not self.gather:
            self.words["gathered"] = 1

    def run(self, experts, counts, dispatch: Dispatch, shared: tuple) -> None:
        self.experts = experts
        self.shared = shared = SimpleNamespace(**dict(zip(self.words, shared, strict=True)))
        self.token_indices, self.offsets, _, self.token_index_map, self.tiles = dispatch
        self.thread, self.block, self.warp = simt.thread(), simt.block(), simt.warp()
        self.lane = self.thread & (WARP - 1)
        self.mine = shared.counters.at(self.warp * self.counters)
        self.warp_start = self.block * self.pairs_per_block + self.warp * (self.steps * WARP)
        block_end = minimum((self.block + 1) * self.pairs_per_block, self.num_pairs)
        self.warp_end = minimum(self.warp_start + self.steps * WARP, block_end)

        held = [self.pair_at(simt.Int(i)) for i in range(self.steps)] if self.steps <= HELD else []
        shares = self.column_sums.begin(counts, self.thread, self.block)
        for counter in indices(self.lane, self.counters, WARP):
            self.mine[counter] = 0
        warp_barrier()
        ranks = self.walk(held)
        if not held:
            for pairs in self.batches():
                for pair in pairs:
                    self.mine.add(pair.expert, 1)
        self.column_sums.finish(shares, shared.sums, shared.sums_before, self.block)
        block_barrier()
        with when(self.warp < self.scanning_warps):
            self.scan_warp()
        block_barrier()
        with when(self.warp < self.scanning_warps):
            self.start_experts()
        block_barrier()
        for pair, rank in zip(held, ranks, strict=True):
            self.write_pair(pair, self.mine[pair.expert] + rank)
        if not held:
            for pairs in self.batches():
                for pair, row in zip(pairs, self.walk(pairs), strict=True):
                    self.write_pair(pair, row)
        self.write_offsets_and_gaps()
        self.write_tiles()
        if self.gather:
            block_barrier()
            self.write_gathered()

    def aligned(self, count):
        return (count + self.row_alignment - 1) // self.row_alignment * self.row_alignment

    def pair_at(self, step) -> _Pair:
        """A step's pair of this lane."""
        pair = self.warp_start + step * WARP + self.lane
        used = pair < self.warp_end
        expert = known_expert(self.experts[minimum(pair, self.num_pairs - 1)], self.num_experts)
        return _Pair(pair, used, select(used, expert, self.num_experts))

    def batches(self) -> Iterator[list[_Pair]]:
        """A few steps' pairs at a time, in order; steps past the last have no pairs."""
        for step in indices(0, self.steps, STEPS_AT_ONCE):
            yield [self.pair_at(step + i) for i in range(STEPS_AT_ONCE)]

    def walk(self, pairs: list[_Pair]) -> list:
        """Counts the pairs, and returns what the warp's counters were before each."""
        lower_lanes = (simt.Int(1) << self.lane) - 1
        bits = self.num_experts.bit_length()
        equal = [lanes_with_equal_bits(pair.expert, bits) for pair in pairs]
        out = []
        for pair, mine in zip(pairs, equal, strict=True):
            rank = count_bits(mine & lower_lanes)
            start = self.mine[pair.expert]
            warp_barrier()
            with when(rank.equals(0)):
                self.mine[pair.expert] = start + count_bits(mine)
            warp_barrier()
            out.append(start + rank)
        return out

    def my_experts(self) -> list:
        """This thread's experts: the true ones, and whether they are."""
        per = self.experts_per_thread
        return [(self.thread * per + i, self.thread * per + i < self.num_experts) for i in range(per)]

    def scan_warp(self) -> None:
        """Writes where each expert starts, counted from the warp's first."""
        shared, rows = self.shared, []
        for expert, real in self.my_experts():
            known = minimum(expert, self.num_experts - 1)
            count = select(real, self.column_sums.read(shared.sums, known), 0)
            here = total([shared.counters[known + w * self.counters] for w in range(WARPS)])
            tiles = (count + TILE_ROWS - 1) // TILE_ROWS
            rows.append((self.aligned(count), tiles, select(real, here, 0)))
            with when(real):
                shared.pairs[expert] = count
        for kind, result in enumerate((shared.group_start, shared.first_tile, shared.first_gathered)):
            running, everything = exclusive_warp_sum(total([row[kind] for row in rows]), self.lane)
            for (expert, real), row in zip(self.my_experts(), rows, strict=True):
                with when(real):
                    result[expert] = running
                running = running + row[kind]
            slot = self.warp + kind * self.scanning_warps
            with when(self.lane.equals(0)):
                shared.warp_totals[slot] = everything

    def start_experts(self) -> None:
        """Writes where each expert starts, and in it the pairs of each warp."""
        shared, earlier = self.shared, []
        for kind in range(3):
            totals = [shared.warp_totals[w + kind * self.scanning_warps] for w in range(self.scanning_warps)]
            earlier.append(total([select(self.warp > w, t, 0) for w, t in enumerate(totals)]))
        for expert, real in self.my_experts():
            with when(real):
                self.start_expert(expert, earlier)

    def start_expert(self, expert, earlier) -> None:
        shared = self.shared
        places = (shared.group_start, shared.first_tile, shared.first_gathered)
        row, tile, gathered = starts = [place[expert] + e for place, e in zip(places, earlier, strict=True)]
        count = shared.pairs[expert]
        here = [shared.counters[expert + w * self.counters] for w in range(WARPS)]
        start = home = row + self.column_sums.read(shared.sums_before, expert)
        if self.gather:
            shared.way_home[expert] = home - gathered
            start = gathered
        for w, pairs in enumerate(here):
            shared.counters[expert + w * self.counters] = start
            start = start + pairs
        for place, first in zip(places, starts, strict=True):
            place[expert] = first
        with when(expert.equals(self.num_experts - 1)):
            shared.group_start[self.num_experts] = row + self.aligned(count)
            shared.first_tile[self.num_experts] = tile + (count + TILE_ROWS - 1) // TILE_ROWS
            shared.first_gathered[self.num_experts] = gathered + total(here)

    def write_pair(self, pair: _Pair, row) -> None:
        """The pair's position, and its token where the row is."""
        known = pair.expert < self.num_experts
        home = row
        if self.gather:
            home = row + self.shared.way_home[minimum(pair.expert, self.num_experts - 1)]
        with when(pair.used):
            self.token_index_map[pair.number] = select(known, home, self.num_rows)
        with when(pair.used & known):
            token = pair.number // self.slots
            if self.gather:
                token = token - self.block * self.tokens_per_block
                self.shared.gathered[row] = token | (pair.expert << _TOKEN_BITS)
            else:
                self.token_indices[row] = token

    def write_gathered(self) -> None:
        """The block's tokens, from shared memory to their rows."""
        first_token = self.block * self.tokens_per_block
        end = self.shared.first_gathered[self.num_experts]
        for start in indices(self.thread, end, THREADS * GATHERED_AT_ONCE):
            rows = [start + i * THREADS for i in range(GATHERED_AT_ONCE)]
            words = [self.shared.gathered[select(row < end, row, start)] for row in rows]
            homes = [self.shared.way_home[word >> _TOKEN_BITS] for word in words]
            for row, word, home in zip(rows, words, homes, strict=True):
                with when(row < end):
                    self.token_indices[home + row] = (word & ((1 << _TOKEN_BITS) - 1)) + first_token

    def shared_among_blocks(self, size, turn: int) -> Iterator[simt.Int]:
        """Numbers below `size`, by all blocks alike, a few threads of each; `turn` tells from which warp on."""
        thread = (self.thread + (THREADS - turn * WARP % THREADS)) % THREADS
        return indices(thread * self.blocks + self.block, size, THREADS * self.blocks)

    def write_offsets_and_gaps(self) -> None:
        group_start = self.shared.group_start
        for expert in self.shared_among_blocks(self.num_experts + 1, 1):
            self.offsets[expert] = group_start[expert]
        for i in self.shared_among_blocks(self.num_experts * self.row_alignment, 2):
            expert = i // self.row_alignment
            row = group_start[expert] + self.shared.pairs[expert] + i % self.row_alignment
            with when(row < group_start[expert + 1]):
                self.token_indices[row] = self.num_tokens
        start = group_start[self.num_experts] + (self.block * THREADS + self.thread)
        for row in indices(start, self.num_rows, self.blocks * THREADS):
            self.token_indices[row] = self.num_tokens

    def write_tiles(self) -> None:
        group_start, first_tile = self.shared.group_start, self.shared.first_tile
        for tile in self.shared_among_blocks(self.num_tiles, 0):
            # The last expert whose first tile is not past this one.
            low, high = simt.Int(0), simt.Int(self.num_experts)
            for _ in range(self.num_experts.bit_length()):
                middle = (low + high) // 2
                below = first_tile[middle] <= tile
                low, high = select(below & (low < middle), middle, low), select(below, high, middle)
            used = tile < first_tile[self.num_experts]
            expert = minimum(low, self.num_experts - 1)
            start = (tile - first_tile[expert]) * TILE_ROWS
            rows = minimum(self.aligned(self.shared.pairs[expert]) - start, TILE_ROWS)
            for array, value in zip(self.tiles.arrays, (expert, group_start[expert] + start, rows), strict=True):
                array[tile] = select(used, value, 0)
