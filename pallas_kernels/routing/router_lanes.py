"""The router's lanes: a row of logits is a group of lanes' of one warp, and experts are each lane's.

Lanes compare logits and scores by their keys, integers of the same order.
"""

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

from pallas_kernels import simt
from pallas_kernels.simt.threads import combine_lanes, warp_maximum
from pallas_kernels.simt.values import WARP, Float, Int, maximum, select

NOTHING = -(1 << 31)
"""Below the key of -inf."""

MINUS_INFINITY = NOTHING + (1 << 23) - 1
"""The key of -inf."""


def key_of(x: Float) -> Int:
    """The integer that orders like the float. Adding zero makes -0 a 0 and any NaN the one with the largest key."""
    bits = (x + 0.0).bits()
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def value_of(key: Int) -> Float:
    """The float of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).as_float()


def largest_of(keys: Sequence[Int]) -> Int:
    return reduce(maximum, keys)


_LIST = 4  # keys of a sorted list: their experts are the bytes of one word
_WARPGROUPS = ((8, 8), (4, 16), (2, 32))  # with at most so many experts to a lane
_WARPGROUPS_BY_SCORES = ((8, 4), (4, 8), (2, 32))


class Layout(NamedTuple):
    """`lanes` lanes to a row, `per_lane` experts to a lane, in lists of `of_list`."""

    num_experts: int
    lanes: int
    per_lane: int
    of_list: int
    warpgroups: int

    @classmethod
    def of(cls, num_experts: int, by_logits: bool) -> "Layout":
        lanes = min(WARP, power_of_two(-(-num_experts // _LIST)))
        per_lane = -(-num_experts // lanes)
        if per_lane > _LIST:
            per_lane = -(-per_lane // _LIST) * _LIST
        # As many threads as have registers enough.
        warpgroups = next(w for w, most in (_WARPGROUPS if by_logits else _WARPGROUPS_BY_SCORES) if per_lane <= most)
        return cls(num_experts, lanes, per_lane, min(per_lane, _LIST), warpgroups)

    @property
    def threads(self) -> int:
        return self.warpgroups * 128

    @property
    def warps(self) -> int:
        return self.threads // WARP

    @property
    def rows_per_warp(self) -> int:
        return WARP // self.lanes

    @property
    def rows(self) -> int:
        """Rows that a block has at a time."""
        return self.warps * self.rows_per_warp

    @property
    def padded(self) -> bool:
        """Whether the last lanes own less than `per_lane` experts."""
        return self.lanes * self.per_lane != self.num_experts


class Lane:
    """One thread: its lane, counted in the warp and in the row, its row in the block, and its first expert."""

    def __init__(self, layout: Layout, thread: Int):
        self.layout = layout
        self.of_warp = thread % WARP
        self.of_row = self.of_warp % layout.lanes
        self.first_expert = self.of_row * layout.per_lane
        self.row_of_block = simt.warp() * layout.rows_per_warp + self.of_warp // layout.lanes
        group_start = self.of_warp - self.of_row
        self.lower_lanes = ((Int(1) << self.of_row) - 1) << group_start

    def load(self, array, start, missing) -> list:
        """This lane's part of the E numbers at `start`, in float32; `missing` past the last expert."""
        num_experts, out = self.layout.num_experts, []
        widest = 4 if array.kind == "float32" else 8
        size = math.gcd(self.layout.per_lane, num_experts, widest)
        for i in range(0, self.layout.per_lane, size):
            expert = self.first_expert + i
            index = start + expert
            if not self.layout.padded:
                out += array.load_vector(index, size).wide().elements()
                continue
            inside = expert < num_experts  # all of them, or none
            values = array.load_vector(select(inside, index, 0), size).wide().elements()
            out += [select(inside, v, missing) for v in values]
        return out

    def known(self, keys) -> list:
        """`keys`, with the least of all past the last expert."""
        if not self.layout.padded:
            return keys
        return [select(self.first_expert + i < self.layout.num_experts, k, NOTHING) for i, k in enumerate(keys)]

    def largest_of_row(self, key) -> Int:
        if self.layout.lanes == WARP:
            return warp_maximum(key)
        return combine_lanes(maximum, key, self.layout.lanes)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()
