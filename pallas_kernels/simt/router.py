"""Router: top-k, weights, counts and the losses' sums in one pass over the logits; dispatch then adds up the blocks'.

A row of logits belongs to a group of lanes of one warp, 32 of them from 125 experts on, and each lane owns consecutive
experts. It sorts theirs, and in every round the group takes the largest of the lanes' heads, whose lane drops it.

Logits are compared as integers of the same order. The low bits of each make room for the expert's id, so that a single
word is sorted and all words differ. If two experts that were chosen one after the other differ only in their ids, or
the last one chosen and the best one left do, the warp chooses again by the whole keys, with the ids next to them. That
happens always for equal logits, and rarely for others.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.contract import EMPTY_SLOT, Losses, Routed, Rule
from pallas_kernels.mosaic.traced_once import traced_once
from pallas_kernels.simt import language as simt
from pallas_kernels.simt.dispatch import BLOCKS, dispatch_routed
from pallas_kernels.simt.language import (
    WARP,
    Long,
    block_barrier,
    branch,
    combine_lanes,
    exp2,
    log2,
    loop,
    maximum,
    minimum,
    multiply_add,
    reciprocal,
    select,
    total,
    warp_barrier,
    when,
)
from pallas_kernels.simt.router_keys import (
    MINUS_INFINITY,
    NOTHING,
    key_of,
    largest_of,
    sorted_descending,
    sorted_with_bytes,
    value_of,
)

MAX_EXPERTS = 1024
MAX_EXPERTS_PER_TOKEN = 32
MAX_PAIRS = 2**31 - 2**24  # their rows, with gaps, are numbered in 32 bits

_LIST = 4  # keys of a sorted list: their experts are the bytes of one word
_LOG2E = math.log2(math.e)
_LN2 = math.log(2)
_WARPGROUPS = ((8, 8), (4, 16), (2, 32))  # with at most so many experts to a lane
_WARPGROUPS_BY_SCORES = ((8, 4), (4, 8), (2, 32))
_LEAST = -200.0  # 2 to this is zero; and zero times this is zero, which is not so for -inf


def router_unsupported(logits: Float[Array, "T E"], experts_per_token: int) -> str | None:
    """Why the kernel cannot route these logits, or None if it can."""
    num_tokens, num_experts = logits.shape
    if logits.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"logits have dtype {logits.dtype}, must be float32, bfloat16 or float16"
    if num_experts > MAX_EXPERTS:
        return f"num_experts={num_experts} must be at most {MAX_EXPERTS}"
    if experts_per_token > MAX_EXPERTS_PER_TOKEN:
        return f"{experts_per_token=} must be at most {MAX_EXPERTS_PER_TOKEN}"
    if num_tokens * experts_per_token > MAX_PAIRS:
        return f"{num_tokens=} times {experts_per_token=} must be at most {MAX_PAIRS}"
    return None


class _Layout(NamedTuple):
    """Who owns what: `lanes` lanes to a row, `per_lane` experts to a lane, in lists of `of_list`."""

    lanes: int
    per_lane: int
    of_list: int
    lists: int
    warpgroups: int

    @classmethod
    def of(cls, num_experts: int, by_logits: bool) -> "_Layout":
        lanes = min(WARP, _power_of_two(-(-num_experts // _LIST)))
        per_lane = -(-num_experts // lanes)
        if per_lane > _LIST:
            per_lane = -(-per_lane // _LIST) * _LIST
        of_list = min(per_lane, _LIST)
        # As many threads as have registers enough.
        warpgroups = next(w for w, most in (_WARPGROUPS if by_logits else _WARPGROUPS_BY_SCORES) if per_lane <= most)
        return cls(lanes, per_lane, of_list, per_lane // of_list, warpgroups)

    @property
    def threads(self) -> int:
        return self.warpgroups * 128

    @property
    def warps(self) -> int:
        return self.threads // WARP

    @property
    def rows_per_warp(self) -> int:
        return WARP // self.lanes


@traced_once("rule", "blocks")
def router(logits: Float[Array, "T E"], bias: Float[Array, " E"] | None, rule: Rule, *, blocks: int = BLOCKS) -> Routed:
    """Chooses and weighs experts; see the portable twin.

    Scores, which rank the experts under a bias or with groups, can differ from the twin's in the last bits, and the
    choice between nearly equal ones with them. Two launches, whose `blocks` blocks route and then place the same
    tokens; no choice depends on their number, and the losses only in their last bits.
    """
    (num_tokens, num_experts), slots = logits.shape, rule.experts_per_token
    outputs = [
        jax.ShapeDtypeStruct((num_tokens, slots), jnp.int32),
        jax.ShapeDtypeStruct((num_tokens, slots), jnp.float32),
        jax.ShapeDtypeStruct((blocks, num_experts), jnp.int32),
        jax.ShapeDtypeStruct((blocks, num_experts), jnp.float32),
        jax.ShapeDtypeStruct((blocks, 2), jnp.float32),
    ]
    body = _Body(num_tokens, num_experts, rule, bias is not None, blocks)
    kernel = simt.simt_kernel(
        body.run,
        name="moe_router",
        outputs=outputs,
        blocks=blocks,
        warpgroups=body.layout.warpgroups,
        shared=body.shared_words,
    )
    biases = () if bias is None else (bias.astype(jnp.float32),)
    experts, weights, counts, probabilities, logs = kernel(logits, *biases)
    dispatch, (demand, *losses) = dispatch_routed(experts, counts, (probabilities, logs))
    losses = Losses(*(loss.reshape(()) for loss in losses))
    return Routed(experts, weights, demand, losses, probabilities.sum(0) / num_tokens, dispatch)


class _Body:
    """What a thread does."""

    def __init__(self, num_tokens: int, num_experts: int, rule: Rule, biased: bool, blocks: int):
        self.num_tokens, self.num_experts, self.rule, self.biased = num_tokens, num_experts, rule, biased
        self.slots = rule.experts_per_token
        self.rows_per_block = -(-num_tokens // blocks)
        self.grouped = rule.num_groups > 1
        self.by_logits = not (biased or self.grouped)
        self.layout = _Layout.of(num_experts, self.by_logits)
        self.per_group = num_experts // rule.num_groups
        self.padded = self.layout.lanes * self.layout.per_lane != num_experts

    @property
    def shared_words(self) -> list[int]:
        """Of the histogram, the warps' sums, what each row has chosen and the best left, and the groups of each row."""
        rows = self.layout.warps * self.layout.rows_per_warp
        words = [self.num_experts, self.layout.warps * (self.num_experts + 2), rows * (self.slots + 1)]
        if self.grouped:
            words += [rows * self.layout.lanes * self.layout.per_lane, rows * self.rule.num_groups]
        return words

    def run(self, logits, *pointers):
        if self.biased:
            self.bias, *pointers = pointers
        self.experts, self.weights, counts, probabilities, logs, *pointers = pointers
        self.histogram, partials, self.chosen, *pointers = pointers
        if self.grouped:
            self.ranks, self.group_scores = pointers
        self.logits, layout = logits, self.layout
        thread, block = simt.thread(), simt.block()
        self.lane = thread % WARP
        self.lane_of_row = self.lane % layout.lanes
        self.first_expert = self.lane_of_row * layout.per_lane
        self.row_of_block = simt.warp() * layout.rows_per_warp + self.lane // layout.lanes
        group_start = self.lane - self.lane_of_row
        self.lower_lanes = ((simt.Int(1) << self.lane_of_row) - 1) << group_start

        simt.clear(self.histogram, self.num_experts, layout.threads)

        first = block * self.rows_per_block
        self.last = minimum(first + self.rows_per_block, self.num_tokens)
        step = layout.warps * layout.rows_per_warp
        ahead = layout.per_lane <= 8  # the next row's logits are under way while this one is worked on
        zeros = [simt.Float(0.0)] * (layout.per_lane + 2)

        def work(start, *carry):
            # `start` is the same in the whole warp, which must stay together; its rows are not.
            row = start + self.lane // layout.lanes
            sums, loaded = carry[: len(zeros)], carry[len(zeros) :]
            values = list(loaded) if ahead else self.load(row)
            following = self.load(row + step) if ahead else []
            return [*self.route_row(row, values, sums), *following]

        start = first + simt.warp() * layout.rows_per_warp
        row = start + self.lane // layout.lanes
        sums_of_lane = loop(start, self.last, step, work, [*zeros, *(self.load(row) if ahead else [])])
        self.reduce(partials, sums_of_lane[: len(zeros)])
        block_barrier()

        def write_count(expert):
            counts[block * self.num_experts + expert] = self.histogram[expert]

        def sum_of_warps(i):
            return total([partials[i + w * (self.num_experts + 2)].as_float() for w in range(layout.warps)])

        def write_probability(expert):
            probabilities[block * self.num_experts + expert] = sum_of_warps(expert)

        def write_log(i):
            logs[block * 2 + i] = sum_of_warps(i + self.num_experts)

        loop(thread, self.num_experts, layout.threads, write_count)
        loop(thread, self.num_experts, layout.threads, write_probability)
        loop(thread, 2, layout.threads, write_log)

    def load(self, row):
        """This lane's logits of a row; -inf past the last expert."""
        row = minimum(row, self.num_tokens - 1)
        return self.load_mine(self.logits, Long(row) * self.num_experts, -math.inf)

    def load_mine(self, pointer, start, missing):
        layout, out = self.layout, []
        widest = 4 if pointer.kind == "float32" else 8
        size = math.gcd(layout.per_lane, self.num_experts, widest)
        for i in range(0, layout.per_lane, size):
            expert = self.first_expert + i
            index = start + expert
            if not self.padded:
                out += pointer.load_vector(index, size).wide().elements()
                continue
            inside = expert < self.num_experts  # all of them, or none
            values = pointer.load_vector(select(inside, index, 0), size).wide().elements()
            out += [select(inside, v, missing) for v in values]
        return out

    def route_row(self, row, logits, sums):
        """Chooses and writes; returns this lane's sums with the row's added."""
        rule = self.rule
        real = row < self.last
        keys = [key_of(x) for x in logits]
        largest = value_of(self.largest(largest_of(keys)))
        # A token that has no possible expert adds zeros: its differences from 0 are -inf, and their powers 0.
        blank = largest.equals(-math.inf)
        base = select(blank, 0.0, largest)

        exponents = [self.log_ratio(x, base, "softmax") for x in logits]
        powers, norm = self.powers(exponents, blank)
        log_sum = multiply_add(log2(norm), _LN2, base)
        if rule.scoring == "sigmoid":
            exponents = [self.log_ratio(x, base, "sigmoid") for x in logits]
            powers, norm = self.powers(exponents, blank)
        inverse = reciprocal(norm)
        share = select(real, inverse, 0.0)
        entropy = log2(norm) * total(powers) - _dot(powers, exponents)
        *of_experts, of_logs, of_entropy = sums
        sums = [
            *(multiply_add(power, share, p) for power, p in zip(powers, of_experts, strict=True)),
            multiply_add(log_sum, select(real, log_sum, 0.0), of_logs),
            multiply_add(entropy, share, of_entropy),
        ]

        if not self.by_logits:
            scores = [_sigmoid(x) for x in logits] if rule.scoring == "sigmoid" else [p * inverse for p in powers]
            keys = self.ranking(scores, keys)

        def whole_keys():
            """Logits are read again: this is rare, and registers are not."""
            return self.known([key_of(x) for x in self.load(row)] if self.by_logits else keys)

        experts, chosen_logits = self.choose(row, self.known(keys), whole_keys)
        self.weigh(row, real, experts, chosen_logits, largest, inverse)
        return sums

    def log_ratio(self, x, base, scoring):
        """Logarithm to base 2 of the score of `x` over that of `base`, at least `_LEAST`."""
        if scoring != "sigmoid":
            return maximum((x - base) * _LOG2E, _LEAST)
        # log sigmoid(x) = min(x, 0) - log(1 + exp(-|x|)); the differences of the first terms are exact.
        steps = maximum(base * -1.0, 0.0) - maximum(x * -1.0, 0.0)
        return maximum(steps * _LOG2E + (_log_of_one_and_power(base) - _log_of_one_and_power(x)), _LEAST)

    def powers(self, exponents, blank):
        """2 to these of this lane, and the row's sum of them; 1 of a blank row."""
        powers = [exp2(t) for t in exponents]
        return powers, select(blank, 1.0, combine_lanes(simt.add, total(powers), self.layout.lanes))

    def largest(self, key):
        """The largest of the row."""
        if self.layout.lanes == WARP:
            return simt.warp_maximum(key)
        return combine_lanes(maximum, key, self.layout.lanes)

    def ranking(self, scores, logit_keys):
        """Keys of the biased scores, of -inf where the logit is, and in the groups that are not the row's best."""
        if self.biased:
            bias = self.load_mine(self.bias, simt.Int(0), 0.0)
            scores = [s + b for s, b in zip(scores, bias, strict=True)]
        possible = [key > MINUS_INFINITY for key in logit_keys]
        keys = [select(p, key_of(s), MINUS_INFINITY) for p, s in zip(possible, scores, strict=True)]
        return self.keep_best_groups(keys) if self.grouped else keys

    def keep_best_groups(self, keys):
        """`keys`, with that of -inf outside the row's best groups. A group is worked on by one lane."""
        num_groups, per_group, lanes = self.rule.num_groups, self.per_group, self.layout.lanes
        ranks = self.ranks.at(self.row_of_block * (lanes * self.layout.per_lane))
        group_scores = self.group_scores.at(self.row_of_block * num_groups)
        mine = ranks.at(self.first_expert)
        for i, key in enumerate(keys):
            mine[i] = key
        warp_barrier()

        def two_best(group):
            members = ranks.at(group * per_group)

            def look(i, best, second):
                turned = i + group % per_group  # lanes that read in step then read different banks
                key = members[select(turned < per_group, turned, turned - per_group)]
                return [maximum(best, key), maximum(second, minimum(best, key))]

            best, second = loop(0, per_group, 1, look, [NOTHING, NOTHING])
            both = key_of(value_of(best) + value_of(second))
            group_scores[group] = select(
                second > MINUS_INFINITY, both, best
            )  # one that is ruled out counts for nothing

        loop(self.lane_of_row, num_groups, lanes, two_best)
        warp_barrier()

        def exclude(group):
            score = group_scores[group]

            def compare(other, better):
                another = group_scores[other]
                ahead = (another > score) | (another.equals(score) & (other < group))
                return [better + select(ahead, 1, 0)]

            (better,) = loop(0, num_groups, 1, compare, [0])
            excluded = better >= self.rule.groups_per_token
            members = ranks.at(group * per_group)
            loop(0, select(excluded, per_group, 0), 1, lambda i: members.__setitem__(i, MINUS_INFINITY))

        loop(self.lane_of_row, num_groups, lanes, exclude)
        warp_barrier()
        keys = [mine[i] for i in range(len(keys))]
        warp_barrier()
        return keys

    def known(self, keys):
        """`keys`, with the least of all past the last expert."""
        if not self.padded:
            return keys
        return [select(self.first_expert + i < self.num_experts, k, NOTHING) for i, k in enumerate(keys)]

    def choose(self, row, keys, whole_keys):
        """Ids and logits of the slots this lane owns: lane i of a row has slots i, i + lanes and so on.

        A slot for which no expert is left has the id -1 and no matter what logit.
        """
        lanes, slots = self.layout.lanes, self.slots
        if lanes == 1:
            (ranked,), (ids,) = self.sorted_lists(keys)
            experts = [_possible(ranked[slot], (ids >> (8 * slot)) & 0xFF) for slot in range(slots)]
            if self.by_logits:
                return experts, [value_of(key) for key in ranked[:slots]]
        elif self.layout.per_lane > 8 and not self.by_logits:
            experts = self.choose_by_keys(keys)  # for both words and keys there are not registers enough
        else:
            experts, doubtful = self.choose_by_words(keys)
            experts = branch(~simt.lanes_where(doubtful).equals(0), lambda: self.choose_by_keys(whole_keys()), experts)
        start = Long(minimum(row, self.num_tokens - 1)) * self.num_experts
        return experts, [self.logits[start + maximum(expert, 0)] for expert in experts]

    def choose_by_words(self, keys):
        """Ids of the slots this lane owns, and whether they are in doubt: words with key and id in one."""
        layout, slots = self.layout, self.slots
        ids = _power_of_two(layout.lanes * layout.per_lane) - 1
        last = simt.Int(ids) - self.first_expert  # a lower id makes a larger word
        words = [(key & ~ids) | (last - i) for i, key in enumerate(keys)]
        words = [*sorted_descending(words), simt.Int(NOTHING)]

        chosen = self.chosen.at(self.row_of_block * (slots + 1))
        rounds = min(slots + 1, self.num_experts)
        for slot in range(rounds):
            best = self.largest(words[0])
            wins = words[0].equals(best)

            @when(wins)
            def _(slot=slot, best=best):
                chosen[slot] = best

            for i in range(min(layout.per_lane, rounds - slot - 1)):
                words[i] = select(wins, words[i + 1], words[i])
        warp_barrier()
        experts, doubtful = [], simt.Bool(False)
        for start in range(0, slots, layout.lanes):
            slot = minimum(self.lane_of_row + start, slots - 1)
            word = chosen[slot]
            following = chosen[minimum(slot + 1, rounds - 1)]
            same = ((word ^ following) & ~ids).equals(0) & (word > MINUS_INFINITY)
            # Where every expert is chosen the last has none after it.
            doubtful = doubtful | (same & (slot + 1 < rounds) if rounds == slots else same)
            experts.append(_possible(word, simt.Int(ids) - (word & ids)))
        warp_barrier()
        return experts, doubtful

    def choose_by_keys(self, keys):
        """The same from the whole keys."""
        layout, slots = self.layout, self.slots
        lists, ids = self.sorted_lists(keys)
        chosen = self.chosen.at(self.row_of_block * (slots + 1))
        for slot in range(slots):
            # The lane's largest key, and for each list but the first whether it beats those before it.
            head, beats = lists[0][0], []
            for other in lists[1:]:
                beats.append(other[0] > head)
                head = maximum(head, other[0])
            mine = head.equals(self.largest(head))
            wins = mine & (simt.lanes_where(mine) & self.lower_lanes).equals(0)
            for i in reversed(range(layout.lists)):  # the last list that beats those before it has the head
                hit = wins & beats[i - 1] if i else wins
                wins = wins & ~beats[i - 1] if i else wins

                @when(hit)
                def _(i=i, slot=slot, head=head):
                    chosen[slot] = _possible(head, (ids[i] & 0xFF) + (self.first_expert if self.wide_ids else 0))

                longer = [*lists[i], simt.Int(NOTHING)]
                lists[i] = [select(hit, a, b) for a, b in zip(longer[1:], lists[i], strict=True)]
                ids[i] = select(hit, ids[i] >> 8, ids[i])
        warp_barrier()
        mine = [minimum(self.lane_of_row + start, slots - 1) for start in range(0, slots, layout.lanes)]
        experts = [chosen[slot] for slot in mine]
        warp_barrier()
        return experts

    def sorted_lists(self, keys):
        """Lists in descending order, and for each the experts of its keys, a byte each."""
        lists, ids = [], []
        for start in range(0, self.layout.per_lane, self.layout.of_list):
            first = simt.Int(start) if self.wide_ids else self.first_expert + start
            one, order = sorted_with_bytes(keys[start : start + self.layout.of_list], first * 0x01010101 + 0x03020100)
            lists.append(one)
            ids.append(order)
        return lists, ids

    @property
    def wide_ids(self) -> bool:
        """Whether a byte holds an expert's place in its lane only, and not its id."""
        return self.num_experts > 256

    def weigh(self, row, real, experts, logits, largest, inverse):
        """Writes this lane's slots, and counts them."""
        rule, lanes, slots = self.rule, self.layout.lanes, self.slots
        owned = [self.lane_of_row + i * lanes < slots if (i + 1) * lanes > slots else None for i in range(len(experts))]
        used = [expert >= 0 for expert in experts]
        if rule.normalize or rule.scoring == "softmax_selected":
            base = largest
            if not self.by_logits:  # the largest logit need not be among the chosen; slots past the last repeat it
                keys = [select(u, key_of(x), MINUS_INFINITY) for u, x in zip(used, logits, strict=True)]
                base = value_of(combine_lanes(maximum, largest_of(keys), lanes))
            raw = [exp2(self.log_ratio(x, base, rule.scoring)) for x in logits]
            counted = [u if o is None else u & o for u, o in zip(used, owned, strict=True)]
            counted = [select(c, r, 0.0) for c, r in zip(counted, raw, strict=True)]
            # Lanes past the last slot add up something else, and own nothing.
            factor = reciprocal(combine_lanes(simt.add, total(counted), min(lanes, _power_of_two(slots))))
            weights = [r * factor for r in raw]
        elif rule.scoring == "sigmoid":
            weights = [_sigmoid(x) for x in logits]
        else:
            weights = [exp2((x - largest) * _LOG2E) * inverse for x in logits]
        if rule.scale != 1:
            weights = [w * rule.scale for w in weights]
        for i, (expert, weight) in enumerate(zip(experts, weights, strict=True)):
            mine = real if owned[i] is None else real & owned[i]
            weight = select(used[i], select(largest.equals(largest), weight, largest), 0.0)  # a NaN is the whole row's

            @when(mine)
            def _(i=i, expert=expert, weight=weight):
                at = row * slots + (self.lane_of_row + i * lanes)
                self.experts[at] = expert
                self.weights[at] = weight

            @when(mine & used[i])
            def _(expert=expert):
                self.histogram.add(expert, 1)

    def reduce(self, partials, sums):
        """Writes the warp's sums: over its rows, always in the same order."""
        lanes = self.layout.lanes
        start = simt.warp() * (self.num_experts + 2)
        *probabilities, squared_log, entropy = sums
        probabilities = [combine_lanes(simt.add, p, WARP, lanes) for p in probabilities]
        squared_log = combine_lanes(simt.add, squared_log, WARP, lanes)
        entropy = combine_lanes(simt.add, entropy, WARP)
        for i, probability in enumerate(probabilities):
            expert = self.first_expert + i

            @when((self.lane < lanes) & (expert < self.num_experts))
            def _(expert=expert, probability=probability):
                partials[start + expert] = probability.bits()

        @when(self.lane.equals(0))
        def _():
            partials[start + self.num_experts] = squared_log.bits()
            partials[start + self.num_experts + 1] = (entropy * _LN2).bits()


def _power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def _dot(a, b):
    return functools.reduce(lambda sum_, ab: multiply_add(*ab, sum_), zip(a[1:], b[1:], strict=True), a[0] * b[0])


def _possible(key, expert):
    """The expert, or an empty slot where its key is that of one that is ruled out."""
    return select(key > MINUS_INFINITY, expert, EMPTY_SLOT)


def _sigmoid(x):
    return reciprocal(exp2(x * -_LOG2E) + 1.0)


def _log_of_one_and_power(x):
    """Of 1 + exp(-|x|), to base 2."""
    return log2(exp2(maximum(x, x * -1.0) * -_LOG2E) + 1.0)
