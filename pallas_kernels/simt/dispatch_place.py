"""Second launch of dispatch: from the pairs' experts and every block's counts to rows, offsets and tiles.

Block b owns a run of tokens, and each of its warps a run of those, which it walks in order, 32 pairs at a time: a
pair's rank is the number of pairs of its expert that its warp met before. Meanwhile all threads add up the blocks'
counts. Where an expert's rows start, plus its pairs in earlier blocks and warps, plus the rank, is the pair's row.

The block gathers its token ids by expert in shared memory and then writes them in runs: single words written here and
there would cost a sector of memory each.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic.row_groups import TILE_ROWS
from pallas_kernels.simt import language as simt
from pallas_kernels.simt.column_sums import ColumnSums
from pallas_kernels.simt.language import WARP, block_barrier, loop, minimum, select, total, warp_barrier, when
from pallas_kernels.simt.router_sums import RouterSums

WARPGROUPS = 4
HELD = 6  # steps of a warp whose pairs stay in registers; 8 spilled where there are 256 experts
STEPS_AT_ONCE = 8  # the same where there are more of them
GATHERED_AT_ONCE = 4  # rows that a thread writes at a time
MOST_SHARED_WORDS = 50 * 1024
_TOKEN_BITS = 20


class Size(NamedTuple):
    """Of the results: rows and tiles at most, and what every group's first row is a multiple of."""

    num_rows: int
    num_tiles: int
    row_alignment: int


def place(
    experts: Int[Array, "T K"],
    counts: Int[Array, "blocks E"],
    size: Size,
    sums: tuple[Float[Array, "blocks E"], Float[Array, "blocks 2"]] | None = None,
) -> list[Array]:
    """Token list, offsets, positions, and three arrays of tiles; with the router's sums also its demand and losses.

    A block of their own adds those up, while the others work.
    """
    body = _Place(experts.shape, counts.shape, size, sums is not None)
    return simt.simt_kernel(
        body.run,
        name="moe_dispatch_place",
        outputs=body.outputs,
        blocks=body.blocks + (sums is not None),
        warpgroups=WARPGROUPS,
        shared=body.shared_words,
    )(experts, counts, *(sums or ()))


def known_expert(expert, num_experts: int):
    """`expert`, or `num_experts` for an empty slot."""
    return select((expert >= 0) & (expert < num_experts), expert, num_experts)


class _Place:
    """What a thread does."""

    def __init__(self, experts_shape, counts_shape, size: Size, has_sums: bool):
        (self.num_tokens, self.slots), (self.blocks, self.num_experts) = experts_shape, counts_shape
        self.num_rows, self.num_tiles, self.row_alignment = size
        self.num_pairs = self.num_tokens * self.slots
        self.threads = WARPGROUPS * 128
        self.warps = self.threads // WARP
        self.tokens_per_block = -(-self.num_tokens // self.blocks)
        self.pairs_per_block = self.tokens_per_block * self.slots
        self.steps = -(-self.pairs_per_block // (self.warps * WARP))  # of a warp
        self.counters = self.num_experts + 1  # of a warp: the last is of empty slots
        self.sums = ColumnSums(self.blocks, self.num_experts, self.threads)
        # Each of the first threads takes a few neighbouring experts.
        self.experts_per_thread = -(-self.num_experts // self.threads)
        self.scanning_warps = -(-self.num_experts // (self.experts_per_thread * WARP))
        self.router_sums = None
        if has_sums:
            self.router_sums = RouterSums(self.num_tokens, self.slots, self.blocks, self.num_experts, self.threads)
        self.gather = self.num_experts < 2048 and self.tokens_per_block < 1 << _TOKEN_BITS
        self.gather = self.gather and sum(self.shared_words) <= MOST_SHARED_WORDS

    @property
    def outputs(self) -> list[jax.ShapeDtypeStruct]:
        shapes = [(self.num_rows,), (self.num_experts + 1,), (self.num_tokens, self.slots), *[(self.num_tiles,)] * 3]
        arrays = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
        return arrays + (self.router_sums.outputs if self.router_sums else [])

    @property
    def shared_words(self) -> list[int]:
        num_experts = self.num_experts
        words = [self.warps * self.counters, self.sums.words, self.sums.words]  # the warps' counts; sums; sums before
        words += [num_experts, num_experts + 1, num_experts + 1]  # pairs, first row and first tile of each expert
        words += [num_experts + 1, num_experts]  # first of the block's gathered rows, and how far those are from home
        words += [3 * self.scanning_warps, self.pairs_per_block if self.gather else 1]
        return words + (self.router_sums.shared_words if self.router_sums else [])

    def run(self, *pointers):
        if not self.router_sums:
            self.place(*pointers)
            return
        of_sums = self.router_sums
        inputs, pointers = pointers[: 2 + of_sums.num_inputs], pointers[2 + of_sums.num_inputs :]
        outputs, shared = pointers[: len(self.outputs)], pointers[len(self.outputs) :]
        mine = len(shared) - len(of_sums.shared_words)
        losses = outputs[-of_sums.num_outputs :]
        block = simt.block()
        when(block < self.blocks)(lambda: self.place(*inputs[:2], *outputs[: -of_sums.num_outputs], *shared[:mine]))
        when(block.equals(self.blocks))(lambda: of_sums.run(*inputs[1:], *losses, *shared[mine:]))

    def place(self, experts, counts, token_indices, offsets, positions, *pointers):
        self.experts, self.token_indices, self.offsets, self.positions = experts, token_indices, offsets, positions
        self.tiles, pointers = pointers[:3], pointers[3:]
        self.next, self.sum, self.sum_before, self.total, *pointers = pointers
        self.group_start, self.first_tile, self.first_gathered, self.way_home, *pointers = pointers
        self.warp_totals, self.gathered = pointers
        self.thread, self.block, self.warp = simt.thread(), simt.block(), simt.warp()
        self.lane = self.thread & (WARP - 1)
        self.mine = self.next.at(self.warp * self.counters)
        self.warp_start = self.block * self.pairs_per_block + self.warp * (self.steps * WARP)
        block_end = minimum((self.block + 1) * self.pairs_per_block, self.num_pairs)
        self.warp_end = minimum(self.warp_start + self.steps * WARP, block_end)

        held = [self.pair_at(simt.Int(i)) for i in range(self.steps)] if self.steps <= HELD else None
        shares = self.sums.begin(counts, self.thread, self.block)
        loop(self.lane, self.counters, WARP, lambda i: self.mine.__setitem__(i, 0))
        warp_barrier()
        ranks = self.walk(held) if held else self.count_pairs()
        self.sums.finish(shares, self.sum, self.sum_before, self.block)
        block_barrier()
        when(self.warp < self.scanning_warps)(self.scan_warp)
        block_barrier()
        when(self.warp < self.scanning_warps)(self.start_experts)
        block_barrier()
        if held and ranks:
            for pair, rank in zip(held, ranks, strict=True):
                self.write_pair(pair, self.mine[pair[2]] + rank)
        else:
            self.for_all_pairs(
                lambda pairs: [self.write_pair(p, r) for p, r in zip(pairs, self.walk(pairs), strict=True)]
            )
        self.write_offsets_and_gaps()
        self.write_tiles()
        if self.gather:
            block_barrier()
            self.write_gathered()

    def aligned(self, count):
        return (count + self.row_alignment - 1) // self.row_alignment * self.row_alignment

    def pair_at(self, step):
        """A step's pair of this lane, whether there is one, and its expert; `num_experts` for none."""
        pair = self.warp_start + step * WARP + self.lane
        used = pair < self.warp_end
        expert = known_expert(self.experts[minimum(pair, self.num_pairs - 1)], self.num_experts)
        return pair, used, select(used, expert, self.num_experts)

    def for_all_pairs(self, work):
        """Does `work` on a few steps' pairs at a time, in order; steps past the last have no pairs."""
        loop(
            0,
            self.steps,
            STEPS_AT_ONCE,
            lambda step: [work([self.pair_at(step + i) for i in range(STEPS_AT_ONCE)]), None][1],
        )

    def count_pairs(self) -> None:
        def count(pairs):
            for _, _, expert in pairs:
                self.mine.add(expert, 1)

        self.for_all_pairs(count)

    def walk(self, pairs) -> list:
        """What the warp's counters were before each pair, and counts the pairs."""
        lower_lanes = (simt.Int(1) << self.lane) - 1
        bits = self.num_experts.bit_length()
        equal = [simt.lanes_with_equal_bits(expert, bits) for _, _, expert in pairs]
        out = []
        for (_, _, expert), mine in zip(pairs, equal, strict=True):
            rank = simt.count_bits(mine & lower_lanes)
            start = self.mine[expert]
            warp_barrier()

            @when(rank.equals(0))
            def _(start=start, mine=mine, expert=expert):
                self.mine[expert] = start + simt.count_bits(mine)

            warp_barrier()
            out.append(start + rank)
        return out

    def my_experts(self) -> list:
        """This thread's experts: the true ones, and whether they are."""
        per = self.experts_per_thread
        return [(self.thread * per + i, self.thread * per + i < self.num_experts) for i in range(per)]

    def scan_warp(self) -> None:
        """Where each expert starts, counted from the warp's first."""
        rows = []
        for expert, real in self.my_experts():
            known = minimum(expert, self.num_experts - 1)
            count = select(real, self.sums.read(self.sum, known), 0)
            here = total([self.next[known + w * self.counters] for w in range(self.warps)])
            tiles = (count + TILE_ROWS - 1) // TILE_ROWS
            rows.append((self.aligned(count), tiles, select(real, here, 0)))
            when(real)(lambda expert=expert, count=count: self.total.__setitem__(expert, count))
        for kind, result in enumerate((self.group_start, self.first_tile, self.first_gathered)):
            running, everything = simt.exclusive_warp_sum(total([row[kind] for row in rows]), self.lane)
            for (expert, real), row in zip(self.my_experts(), rows, strict=True):
                when(real)(lambda e=expert, r=running, result=result: result.__setitem__(e, r))
                running = running + row[kind]
            slot = self.warp + kind * self.scanning_warps
            when(self.lane.equals(0))(lambda slot=slot, x=everything: self.warp_totals.__setitem__(slot, x))

    def start_experts(self) -> None:
        """Where each expert starts, and in it the pairs of each warp."""
        earlier = [self.earlier_warps(kind) for kind in range(3)]
        for expert, real in self.my_experts():
            when(real)(lambda expert=expert: self.start_expert(expert, earlier))

    def earlier_warps(self, kind: int):
        totals = [self.warp_totals[w + kind * self.scanning_warps] for w in range(self.scanning_warps)]
        return total([select(self.warp > w, t, 0) for w, t in enumerate(totals)])

    def start_expert(self, expert, earlier) -> None:
        places = (self.group_start, self.first_tile, self.first_gathered)
        row, tile, gathered = (place[expert] + e for place, e in zip(places, earlier, strict=True))
        count = self.total[expert]
        here = [self.next[expert + w * self.counters] for w in range(self.warps)]
        home = row + self.sums.read(self.sum_before, expert)
        start = home
        if self.gather:
            self.way_home[expert] = home - gathered
            start = gathered
        for w, pairs in enumerate(here):
            self.next[expert + w * self.counters] = start
            start = start + pairs
        for place, first in zip(places, (row, tile, gathered), strict=True):
            place[expert] = first

        @when(expert.equals(self.num_experts - 1))
        def _():
            self.group_start[self.num_experts] = row + self.aligned(count)
            self.first_tile[self.num_experts] = tile + (count + TILE_ROWS - 1) // TILE_ROWS
            self.first_gathered[self.num_experts] = gathered + total(here)

    def write_pair(self, pair, row) -> None:
        """The pair's position, and its token where the row is."""
        pair, used, expert = pair
        known = expert < self.num_experts
        home = row
        if self.gather:
            home = row + self.way_home[minimum(expert, self.num_experts - 1)]

        @when(used)
        def _():
            self.positions[pair] = select(known, home, self.num_rows)

        @when(used & known)
        def _():
            token = pair // self.slots
            if self.gather:
                token = token - self.block * self.tokens_per_block
                self.gathered[row] = token | (expert << _TOKEN_BITS)
            else:
                self.token_indices[row] = token

    def write_gathered(self) -> None:
        """The block's tokens, from shared memory to their rows."""
        first_token = self.block * self.tokens_per_block
        end = self.first_gathered[self.num_experts]

        def write(start):
            rows = [start + i * self.threads for i in range(GATHERED_AT_ONCE)]
            words = [self.gathered[select(row < end, row, start)] for row in rows]
            homes = [self.way_home[word >> _TOKEN_BITS] for word in words]
            for row, word, home in zip(rows, words, homes, strict=True):

                @when(row < end)
                def _(row=row, word=word, home=home):
                    self.token_indices[home + row] = (word & ((1 << _TOKEN_BITS) - 1)) + first_token

        loop(self.thread, end, self.threads * GATHERED_AT_ONCE, write)

    def shared_among_blocks(self, size, turn: int, work) -> None:
        """`work(i)` below `size` by all blocks alike, a few threads of each; `turn` tells from which warp on."""
        thread = (self.thread + (self.threads - turn * WARP % self.threads)) % self.threads
        loop(thread * self.blocks + self.block, size, self.threads * self.blocks, work)

    def write_offsets_and_gaps(self) -> None:
        def write_offset(expert):
            self.offsets[expert] = self.group_start[expert]

        self.shared_among_blocks(self.num_experts + 1, 1, write_offset)

        def pad(i):
            expert = i // self.row_alignment
            row = self.group_start[expert] + self.total[expert] + i % self.row_alignment

            @when(row < self.group_start[expert + 1])
            def _():
                self.token_indices[row] = self.num_tokens

        self.shared_among_blocks(self.num_experts * self.row_alignment, 2, pad)

        def spare(row):
            self.token_indices[row] = self.num_tokens

        start = self.group_start[self.num_experts] + (self.block * self.threads + self.thread)
        loop(start, self.num_rows, self.blocks * self.threads, spare)

    def write_tiles(self) -> None:
        def write_tile(tile):
            low, high = simt.Int(0), simt.Int(self.num_experts)  # the last expert whose first tile is not past this one
            for _ in range(self.num_experts.bit_length()):
                middle = (low + high) // 2
                below = self.first_tile[middle] <= tile
                low, high = select(below & (low < middle), middle, low), select(below, high, middle)
            used = tile < self.first_tile[self.num_experts]
            expert = minimum(low, self.num_experts - 1)
            start = (tile - self.first_tile[expert]) * TILE_ROWS
            rows = minimum(self.aligned(self.total[expert]) - start, TILE_ROWS)
            for array, value in zip(self.tiles, (expert, self.group_start[expert] + start, rows), strict=True):
                array[tile] = select(used, value, 0)

        self.shared_among_blocks(self.num_tiles, 0, write_tile)
