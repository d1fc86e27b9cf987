"""Sums over the rows of an array (rows, width): every block's numbers, added up by the threads of one block.

`ColumnSums` adds up one array, `finish_router` all that the router's blocks have counted and added up.

A thread takes a few neighbouring columns and a run of rows, with its loads in flight together; what the threads have
meets in shared memory. The order of a sum is always the same.
"""

import math
from operator import add
from typing import NamedTuple

from pallas_kernels import simt
from pallas_kernels.simt.threads import block_barrier, branch, combine_lanes, loop, when
from pallas_kernels.simt.values import WARP, Float, Int, Pointer, minimum, multiply_add, select, total

IN_FLIGHT = 8  # loads of up to 16 bytes
_MOST_PARTS = 32  # where lanes cannot add up among themselves


class _Share(NamedTuple):
    """A thread's part: `array` starts at its `first_row` and column; `loaded` if all of it is on its way."""

    item: Int
    column: Int
    first_row: Int
    array: Pointer
    loaded: list[list] | None


class ColumnSums:
    """The division of `(rows, width)` among threads; `words` is the size of the shared array of one kind of sums."""

    def __init__(self, rows: int, width: int, threads: int):
        self.num_rows, self.width, self.threads = rows, width, threads
        self.neighbours = math.gcd(width, 4)
        self.columns = width // self.neighbours
        self._lanes_meet = self.columns < WARP and WARP % self.columns == 0
        most = max(1, threads // self.columns)
        if not self._lanes_meet and self.columns % WARP:
            most = min(most, _MOST_PARTS)
        self.parts = _divisor(rows, most)
        self.rows = rows // self.parts
        self.at_once = _divisor(self.rows, IN_FLIGHT)
        self.items = self.columns * self.parts
        self.groups = -(-self.items // WARP) if self._lanes_meet else self.parts
        self.words = self.groups * width

    def begin(self, array, thread, turn=None) -> list[_Share]:
        """This thread's shares, and their loads if they are not too many.

        `turn` rotates who takes which rows: blocks that read the same then do not all begin at the same place.
        """
        shares = []
        for first in range(0, self.items, self.threads):
            item = thread + first
            known = minimum(item, self.items - 1)
            column, part = known % self.columns * self.neighbours, known // self.columns
            if turn is not None:
                part = (part + turn) % self.parts
            first_row = part * self.rows
            mine = array.at(first_row * self.width + column)
            loaded = self._load(mine, 0) if self.at_once == self.rows else None
            shares.append(_Share(item, column, first_row, mine, loaded))
        return shares

    def _load(self, array, first) -> list[list]:
        rows = [first + i for i in range(self.at_once)]
        return [array.load_vector(row * self.width, self.neighbours).elements() for row in rows]

    def finish(self, shares: list[_Share], sums, before=None, row=None) -> None:
        """Writes sums to shared memory, and to `before` those of the rows before `row`; to be read past a barrier."""
        for share in shares:
            every, earlier = self._add_up(share, row)
            for where, values in [(sums, every)] + ([] if before is None else [(before, earlier)]):
                self._write(where, share, values)

    def _add_up(self, share: _Share, row):
        if share.loaded is not None:
            every = [total(values) for values in zip(*share.loaded, strict=True)]
            if row is None:
                return every, None
            # Rows before this one: all of a share's, or none, but in the share that has this row.
            inside = row - share.first_row
            none = [select(inside > 0, value, 0) for value in every]

            def count():
                kept = [[select(inside > i, v, 0) for v in values] for i, values in enumerate(share.loaded or [])]
                return [total(values) for values in zip(*kept, strict=True)]

            return every, branch((inside > 0) & (inside < self.rows), count, none)

        def add_rows(first, *sums):
            sums, earlier = list(sums[: self.neighbours]), list(sums[self.neighbours :])
            for i, values in enumerate(self._load(share.array, first)):
                sums = [s + v for s, v in zip(sums, values, strict=True)]
                if row is not None:
                    is_before = share.first_row + first + i < row
                    earlier = [s + select(is_before, v, 0) for s, v in zip(earlier, values, strict=True)]
            return [*sums, *earlier]

        zero = Float(0.0) if share.array.kind == "float32" else Int(0)
        out = loop(0, self.rows, self.at_once, add_rows, [zero] * (self.neighbours * (1 if row is None else 2)))
        return out[: self.neighbours], out[self.neighbours :]

    def _write(self, where, share: _Share, values) -> None:
        used, group = share.item < self.items, share.item // self.columns
        if self._lanes_meet:
            values = [select(used, v, 0) for v in values]
            values = [combine_lanes(add, v, WARP, self.columns) for v in values]
            group = share.item // WARP
            used = used & ((share.item % WARP) < self.columns)

        with when(used):
            for i, value in enumerate(values):
                place = group * self.width + (share.column // self.neighbours + i * self.columns)
                where[place] = value.bits() if isinstance(value, Float) else value

    def read(self, sums, column, *, floating: bool = False):
        """The sum of a column, from shared memory."""
        place = column // self.neighbours + column % self.neighbours * self.columns
        array = sums.at(place)
        values = [array[group * self.width] for group in range(self.groups)]
        return total([v.as_float() for v in values] if floating else values)


def _divisor(number: int, most: int) -> int:
    """The largest divisor of `number` up to `most`."""
    return next(d for d in range(min(number, most), 0, -1) if number % d == 0)


def finish_router(experts_shape, experts: ColumnSums, logs: ColumnSums, counts, sums, outputs, shared) -> None:
    """Adds up what the router's blocks have counted and summed: by one block, into demand and the three losses.

    Args:
      experts_shape: numbers of tokens and of experts for each.
      experts: the division of what there is of each expert.
      logs: the division of the two sums over tokens.
      counts: of pairs, (blocks, E) int32.
      sums: probabilities (blocks, E) and logs (blocks, 2), both float32.
      outputs: demand and losses.
      shared: arrays of the size of the three sums, and a word for each warp.
    """
    (num_tokens, slots), num_experts, threads = experts_shape, experts.width, experts.threads
    (probabilities, log_parts), (demand, losses), (count_sums, probability_sums, log_sums, warps) = (
        sums,
        outputs,
        shared,
    )
    thread = simt.thread()
    begun = [(experts, counts, count_sums), (experts, probabilities, probability_sums), (logs, log_parts, log_sums)]
    begun = [(of, of.begin(array, thread), sums) for of, array, sums in begun]
    for of, shares, sums in begun:
        of.finish(shares, sums)
    block_barrier()

    def balance(expert, so_far):
        count = experts.read(count_sums, expert)
        demand[expert] = count
        probability = experts.read(probability_sums, expert, floating=True)
        return [multiply_add(count.to_float(), probability, so_far)]

    (mine,) = loop(thread, num_experts, threads, balance, [Float(0.0)])
    mine = combine_lanes(add, mine, WARP)
    with when((thread % WARP).equals(0)):
        warps[thread // WARP] = mine.bits()
    block_barrier()

    with when(thread.equals(0)):
        every = total([warps[w].as_float() for w in range(threads // WARP)])
        losses.balance[0] = every * (num_experts / (slots * num_tokens**2))
        for loss, column in ((losses.squared_log, 0), (losses.entropy, 1)):
            loss[0] = logs.read(log_sums, Int(column), floating=True) * (1 / num_tokens)
