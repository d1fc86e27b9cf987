"""The router's lanes, and their choice among the keys of a row.

A row of logits belongs to a group of lanes of one warp, and each lane owns consecutive experts. Lanes compare logits
and scores by their keys, integers of the same order. Each lane sorts its own keys, and in every round the row takes
the largest of the lanes' heads, whose lane drops it.

The low bits of each key make room for the expert's id, so that a single word is sorted and all words differ. If two
experts that were chosen one after the other differ only in their ids, or the last one chosen and the best one left do,
the warp chooses again by the whole keys, with the ids next to them. That happens always for equal logits, and rarely
for others.
"""

import math
from collections.abc import Iterator, Sequence
from functools import reduce

from pallas_kernels import simt
from pallas_kernels.contract import EMPTY_SLOT, Rule
from pallas_kernels.simt.threads import combine_lanes, indices, lanes_where, loop, warp_barrier, warp_maximum, when
from pallas_kernels.simt.values import WARP, Bool, Float, Int, maximum, minimum, permute_bytes, select

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


class Layout:
    """The division of rows among lanes and blocks.

    Attributes:
      lanes: lanes to a row.
      per_lane: experts to a lane.
      of_list: experts to a list of a lane's.
      warpgroups: those of a block.
      rows: rows that a block has at a time.
      padded: whether the last lanes own less than `per_lane` experts.
    """

    def __init__(self, num_experts: int, by_logits: bool):
        self.num_experts = num_experts
        self.lanes = min(WARP, power_of_two(-(-num_experts // _LIST)))
        self.per_lane = -(-num_experts // self.lanes)
        if self.per_lane > _LIST:
            self.per_lane = -(-self.per_lane // _LIST) * _LIST
        self.of_list = min(self.per_lane, _LIST)
        # As many threads as have registers enough.
        choices = _WARPGROUPS if by_logits else _WARPGROUPS_BY_SCORES
        self.warpgroups = next(w for w, most in choices if self.per_lane <= most)
        self.threads, self.warps = self.warpgroups * 128, self.warpgroups * 4
        self.rows_per_warp = WARP // self.lanes
        self.rows = self.warps * self.rows_per_warp
        self.padded = self.lanes * self.per_lane != num_experts


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


class Choice:
    """The choice of `slots` experts; slot i is lane `i mod lanes`'s.

    `chosen` is shared memory, `slots + 1` words to a row.
    """

    def __init__(self, lane: Lane, slots: int, chosen):
        self.lane, self.layout, self.slots = lane, lane.layout, slots
        self.chosen = chosen
        self.wide_ids = self.layout.num_experts > 256  # a byte then holds an expert's place in its lane only

    def by_one_lane(self, keys) -> tuple[list, list]:
        """Ids and keys of the slots, where a lane has the whole row."""
        (ranked,), (ids,) = self._sorted_lists(keys)
        experts = [_possible(ranked[slot], (ids >> (8 * slot)) & 0xFF) for slot in range(self.slots)]
        return experts, ranked[: self.slots]

    def by_words(self, keys) -> tuple[list, Bool]:
        """Ids of the slots this lane owns, and whether they are in doubt: words with key and id in one."""
        lane, layout, slots = self.lane, self.layout, self.slots
        ids = power_of_two(layout.lanes * layout.per_lane) - 1
        last = Int(ids) - lane.first_expert  # a lower id makes a larger word
        words = [(key & ~ids) | (last - i) for i, key in enumerate(keys)]
        words = [*sorted_descending(words), Int(NOTHING)]

        chosen = self._of_row()
        rounds = min(slots + 1, layout.num_experts)
        for slot in range(rounds):
            best = lane.largest_of_row(words[0])
            wins = words[0].equals(best)
            with when(wins):
                chosen[slot] = best
            for i in range(min(layout.per_lane, rounds - slot - 1)):
                words[i] = select(wins, words[i + 1], words[i])
        warp_barrier()
        experts, doubtful = [], Bool(False)
        for start in range(0, slots, layout.lanes):
            slot = minimum(lane.of_row + start, slots - 1)
            word = chosen[slot]
            following = chosen[minimum(slot + 1, rounds - 1)]
            same = ((word ^ following) & ~ids).equals(0) & (word > MINUS_INFINITY)
            # Where every expert is chosen the last has none after it.
            doubtful = doubtful | (same & (slot + 1 < rounds) if rounds == slots else same)
            experts.append(_possible(word, Int(ids) - (word & ids)))
        warp_barrier()
        return experts, doubtful

    def by_keys(self, keys) -> list:
        """Ids of the slots this lane owns, from the whole keys."""
        lane, slots = self.lane, self.slots
        lists, ids = self._sorted_lists(keys)
        chosen = self._of_row()
        for slot in range(slots):
            # The lane's largest key, and for each list but the first whether it beats those before it.
            head, beats = lists[0][0], []
            for other in lists[1:]:
                beats.append(other[0] > head)
                head = maximum(head, other[0])
            mine = head.equals(lane.largest_of_row(head))
            wins = mine & (lanes_where(mine) & lane.lower_lanes).equals(0)
            for i in reversed(range(len(lists))):  # the last list that beats those before it has the head
                hit = wins & beats[i - 1] if i else wins
                wins = wins & ~beats[i - 1] if i else wins
                with when(hit):
                    chosen[slot] = _possible(head, (ids[i] & 0xFF) + (lane.first_expert if self.wide_ids else 0))
                longer = [*lists[i], Int(NOTHING)]
                lists[i] = [select(hit, a, b) for a, b in zip(longer[1:], lists[i], strict=True)]
                ids[i] = select(hit, ids[i] >> 8, ids[i])
        warp_barrier()
        mine = [minimum(lane.of_row + start, slots - 1) for start in range(0, slots, self.layout.lanes)]
        experts = [chosen[slot] for slot in mine]
        warp_barrier()
        return experts

    def _of_row(self):
        return self.chosen.at(self.lane.row_of_block * (self.slots + 1))

    def _sorted_lists(self, keys) -> tuple[list, list]:
        """Lists in descending order, and for each the experts of its keys, a byte each."""
        lists, ids = [], []
        for start in range(0, self.layout.per_lane, self.layout.of_list):
            first = Int(start) if self.wide_ids else self.lane.first_expert + start
            one, order = sorted_with_bytes(keys[start : start + self.layout.of_list], first * 0x01010101 + 0x03020100)
            lists.append(one)
            ids.append(order)
        return lists, ids


def _possible(key, expert):
    """The expert, or an empty slot where its key is that of one that is ruled out."""
    return select(key > MINUS_INFINITY, expert, EMPTY_SLOT)


def sorted_descending(keys: Sequence[Int]) -> list[Int]:
    """The keys, largest first."""
    keys = list(keys)
    for i, j in _exchanges(len(keys)):
        keys[i], keys[j] = maximum(keys[i], keys[j]), minimum(keys[i], keys[j])
    return keys


def sorted_with_bytes(keys: Sequence[Int], bytes_: Int) -> tuple[list[Int], Int]:
    """Keys in descending order, and the bytes that go with them; equals keep their order."""
    keys = list(keys)
    for turn in range(len(keys)):
        for i in range(turn % 2, len(keys) - 1, 2):
            swap = keys[i + 1] > keys[i]
            keys[i], keys[i + 1] = maximum(keys[i], keys[i + 1]), minimum(keys[i], keys[i + 1])
            order = [0, 1, 2, 3]
            order[i], order[i + 1] = i + 1, i
            bytes_ = select(swap, permute_bytes(bytes_, order), bytes_)
    return keys, bytes_


def _exchanges(n: int) -> Iterator[tuple[int, int]]:
    """Pairs of places whose exchange, larger one first, sorts n values (Batcher's merge exchange)."""
    span = 1
    while span < n:
        apart = span
        while apart:
            for start in range(apart % span, n - apart, 2 * apart):
                for i in range(start, min(start + apart, n - apart)):
                    if i // (2 * span) == (i + apart) // (2 * span):
                        yield i, i + apart
            apart //= 2
        span *= 2


def keep_best_groups(lane: Lane, keys: list, rule: Rule, ranks, group_scores) -> list:
    """`keys`, with that of -inf outside the row's best groups. A group is worked on by one lane.

    `ranks` and `group_scores` are shared memory, a word for each expert (padding included) and each group of every row.
    """
    layout, num_groups = lane.layout, rule.num_groups
    per_group = layout.num_experts // num_groups
    ranks = ranks.at(lane.row_of_block * (layout.lanes * layout.per_lane))
    group_scores = group_scores.at(lane.row_of_block * num_groups)
    mine = ranks.at(lane.first_expert)
    for i, key in enumerate(keys):
        mine[i] = key
    warp_barrier()
    for group in indices(lane.of_row, num_groups, layout.lanes):
        group_scores[group] = _score(ranks.at(group * per_group), group, per_group, rule.scores_per_group)
    warp_barrier()
    for group in indices(lane.of_row, num_groups, layout.lanes):
        excluded = _better_groups(group_scores, group, num_groups) >= rule.groups_per_token
        members = ranks.at(group * per_group)
        for i in indices(0, select(excluded, per_group, 0), 1):
            members[i] = MINUS_INFINITY
    warp_barrier()
    keys = [mine[i] for i in range(len(keys))]
    warp_barrier()
    return keys


def _score(members, group, per_group: int, summed: int):
    """Key of the group's best, or of the sum of its two best; one that is ruled out counts for nothing."""

    def look(i, best, second):
        turned = i + group % per_group  # lanes that read in step then read different banks
        key = members[select(turned < per_group, turned, turned - per_group)]
        return [maximum(best, key), maximum(second, minimum(best, key))]

    best, second = loop(0, per_group, 1, look, [NOTHING, NOTHING])
    if summed == 1:
        return best
    both = key_of(value_of(best) + value_of(second))
    return select(second > MINUS_INFINITY, both, best)


def _better_groups(group_scores, group, num_groups: int):
    """The number of groups that go before this one."""
    score = group_scores[group]

    def compare(other, better):
        another = group_scores[other]
        ahead = (another > score) | (another.equals(score) & (other < group))
        return [better + select(ahead, 1, 0)]

    (better,) = loop(0, num_groups, 1, compare, [0])
    return better
