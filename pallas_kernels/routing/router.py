"""Router: top-k, weights, counts and the losses' sums in one pass over the logits; dispatch then adds up the blocks'.

A row of logits belongs to a group of lanes of one warp, 32 of them from 125 experts on, and each lane owns consecutive
experts. From their keys the group chooses together (`router_choice`).

Pallas's tile language says the same for a plain softmax router in fifty lines. On an H200 (jax 0.11.2, 22 November
2026) that kernel took 1.2 to 3.1 times as long: 18.3 instead of 9.6 µs for 24576 tokens, 128 experts and 8 per token,
which is at most 0.9% of the layer. But with more than one expert per token it chose wrong ids there, though it is right
in the interpreter. It has no sigmoid scores, biases or groups, and takes only some numbers of tokens.
"""

import math
from operator import add

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import simt
from pallas_kernels.contract import Losses, Routed, Rule, Scoring
from pallas_kernels.routing.dispatch import BLOCKS
from pallas_kernels.routing.dispatch_place import place
from pallas_kernels.routing.router_choice import (
    MINUS_INFINITY,
    Choice,
    Lane,
    Layout,
    keep_best_groups,
    key_of,
    largest_of,
    power_of_two,
    value_of,
)
from pallas_kernels.simt.threads import block_barrier, branch, combine_lanes, indices, lanes_where, loop, when
from pallas_kernels.simt.values import WARP, exp2, log2, maximum, minimum, multiply_add, reciprocal, select, total
from pallas_kernels.traced_once import traced_once

LN2, LOG2E = math.log(2), math.log2(math.e)
_LEAST = -200.0  # 2 to this is zero; and zero times this is zero, which is not so for -inf

MAX_EXPERTS = 1024
MAX_EXPERTS_PER_TOKEN = 32
MAX_PAIRS = 2**31 - 2**24  # their rows, with gaps, are numbered in 32 bits


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


@traced_once("rule", "blocks")
def router(logits: Float[Array, "T E"], bias: Float[Array, " E"] | None, rule: Rule, *, blocks: int = BLOCKS) -> Routed:
    """Chooses and weighs experts; see the portable twin.

    Scores, which rank the experts under a bias or with groups, can differ from the twin's in the last bits, and the
    choice between nearly equal ones with them. Two launches, whose `blocks` blocks route and then place the same
    tokens; no choice depends on their number, and the losses only in their last bits.
    """
    (num_tokens, num_experts), slots = logits.shape, rule.experts_per_token
    ids, weights = (jax.ShapeDtypeStruct((num_tokens, slots), dtype) for dtype in (jnp.int32, jnp.float32))
    counts, sums = (jax.ShapeDtypeStruct((blocks, num_experts), dtype) for dtype in (jnp.int32, jnp.float32))
    outputs = [ids, weights, (counts, sums, jax.ShapeDtypeStruct((blocks, 2), jnp.float32))]
    body = _Body(num_tokens, num_experts, rule, bias is not None, blocks)
    options = {"blocks": blocks, "warpgroups": body.layout.warpgroups, "shared": body.shared_words}
    kernel = simt.kernel(body.run, name="moe_router", outputs=outputs, **options)
    bias = None if bias is None else bias.astype(jnp.float32)
    experts, weights, (counts, probabilities, logs) = kernel(logits, bias)
    dispatch, (demand, losses) = place(experts, counts, (probabilities, logs))
    losses = Losses(*(loss.reshape(()) for loss in losses))
    return Routed(experts, weights, demand, losses, probabilities.sum(0) / num_tokens, dispatch)


class _Body:
    """A thread of the kernel."""

    def __init__(self, num_tokens: int, num_experts: int, rule: Rule, biased: bool, blocks: int):
        self.num_tokens, self.num_experts, self.rule = num_tokens, num_experts, rule
        self.slots = rule.experts_per_token
        self.rows_per_block = -(-num_tokens // blocks)
        self.grouped = rule.num_groups > 1
        self.by_logits = not (biased or self.grouped)
        self.layout = layout = Layout(num_experts, self.by_logits)
        of_groups = layout.rows * layout.lanes * layout.per_lane, layout.rows * rule.num_groups
        # The histogram, the warps' sums, what a row has chosen and the best left, and a row's groups.
        self.shared_words = [num_experts, layout.warps * (num_experts + 2), layout.rows * (self.slots + 1)]
        self.shared_words.append(of_groups if self.grouped else None)

    def run(self, logits, bias, experts, weights, sums, histogram, partials, chosen, of_groups) -> None:
        self.logits, self.bias, self.experts, self.weights, self.histogram = logits, bias, experts, weights, histogram
        self.of_groups, layout, num_experts = of_groups, self.layout, self.num_experts
        (counts, probabilities, logs), thread, block = sums, simt.thread(), simt.block()
        self.lane = Lane(layout, thread)
        self.choice = Choice(self.lane, self.slots, chosen)
        simt.clear(histogram, num_experts, layout.threads)

        self.route_rows(block, partials)
        block_barrier()

        def sum_of_warps(i):
            return total([partials[i + w * (num_experts + 2)].as_float() for w in range(layout.warps)])

        for expert in indices(thread, num_experts, layout.threads):
            counts[block * num_experts + expert] = histogram[expert]
        for expert in indices(thread, num_experts, layout.threads):
            probabilities[block * num_experts + expert] = sum_of_warps(expert)
        for i in indices(thread, 2, layout.threads):
            logs[block * 2 + i] = sum_of_warps(i + num_experts)

    def route_rows(self, block, partials) -> None:
        """Routes the warp's rows, and writes its sums over them."""
        layout, lane = self.layout, self.lane
        first = block * self.rows_per_block
        self.last = minimum(first + self.rows_per_block, self.num_tokens)
        ahead = layout.per_lane <= 8  # the next row's logits are under way while this one is worked on
        zeros = [simt.Float(0.0)] * (layout.per_lane + 2)

        def work(start, *carry):
            # `start` is the same in the whole warp, which must stay together; its rows are not.
            row = start + lane.of_warp // layout.lanes
            sums, loaded = carry[: len(zeros)], carry[len(zeros) :]
            logits = list(loaded) if ahead else self.load(row)
            following = self.load(row + layout.rows) if ahead else []
            return [*self.route_row(row, logits, sums), *following]

        start = first + simt.warp() * layout.rows_per_warp
        row = start + lane.of_warp // layout.lanes
        loaded = self.load(row) if ahead else []
        sums_of_lane = loop(start, self.last, layout.rows, work, [*zeros, *loaded])
        self.reduce(partials, sums_of_lane[: len(zeros)])

    def load(self, row) -> list:
        """This lane's logits of a row; -inf past the last expert."""
        row = minimum(row, self.num_tokens - 1)
        return self.lane.load(self.logits, simt.Long(row) * self.num_experts, -math.inf)

    def route_row(self, row, logits, sums) -> list:
        """Chooses and writes; returns this lane's sums with the row's added."""
        rule, lane = self.rule, self.lane
        real = row < self.last
        keys = [key_of(x) for x in logits]
        largest = value_of(lane.largest_of_row(largest_of(keys)))
        # A token that has no possible expert adds zeros: its differences from 0 are -inf, and their powers 0.
        blank = largest.equals(-math.inf)
        base = select(blank, 0.0, largest)

        exponents = [log_ratio(x, base, "softmax") for x in logits]
        powers, norm = self.powers(exponents, blank)
        log_sum = multiply_add(log2(norm), LN2, base)
        if rule.scoring == "sigmoid":
            exponents = [log_ratio(x, base, "sigmoid") for x in logits]
            powers, norm = self.powers(exponents, blank)
        inverse = reciprocal(norm)
        share = select(real, inverse, 0.0)
        entropy = log2(norm) * total(powers) - dot(powers, exponents)
        *of_experts, of_logs, of_entropy = sums
        sums = [
            *(multiply_add(power, share, p) for power, p in zip(powers, of_experts, strict=True)),
            multiply_add(log_sum, select(real, log_sum, 0.0), of_logs),
            multiply_add(entropy, share, of_entropy),
        ]

        if not self.by_logits:
            scores = [sigmoid(x) for x in logits] if rule.scoring == "sigmoid" else [p * inverse for p in powers]
            keys = self.ranking(scores, keys)
        experts, chosen_logits = self.choose(row, keys)
        owned = self.owned(len(experts))
        used = [expert >= 0 for expert in experts]
        weights = self.weigh(chosen_logits, owned, used, largest, inverse)
        self.write(row, real, experts, weights, owned, used, largest)
        return sums

    def powers(self, exponents, blank) -> tuple:
        """2 to these of this lane, and the row's sum of them; 1 of a blank row."""
        powers = [exp2(t) for t in exponents]
        return powers, select(blank, 1.0, combine_lanes(add, total(powers), self.layout.lanes))

    def ranking(self, scores, logit_keys) -> list:
        """Keys of the biased scores, of -inf where the logit is, and in the groups that are not the row's best."""
        if self.bias is not None:
            bias = self.lane.load(self.bias, simt.Int(0), 0.0)
            scores = [s + b for s, b in zip(scores, bias, strict=True)]
        possible = [key > MINUS_INFINITY for key in logit_keys]
        keys = [select(p, key_of(s), MINUS_INFINITY) for p, s in zip(possible, scores, strict=True)]
        return keep_best_groups(self.lane, keys, self.rule, *self.of_groups) if self.grouped else keys

    def choose(self, row, keys) -> tuple[list, list]:
        """Ids and logits of the slots this lane owns: lane i of a row has slots i, i + lanes and so on.

        A slot for which no expert is left has the id -1 and no matter what logit.
        """
        lane, choice, known = self.lane, self.choice, self.lane.known(keys)

        def choose_again():
            """By whole keys. Logits are read again: this is rare, and registers are not."""
            return choice.by_keys(lane.known([key_of(x) for x in self.load(row)] if self.by_logits else keys))

        if self.layout.lanes == 1:
            experts, ranked = choice.by_one_lane(known)
            if self.by_logits:
                return experts, [value_of(key) for key in ranked]
        elif self.layout.per_lane > 8 and not self.by_logits:
            experts = choice.by_keys(known)  # for both words and keys there are not registers enough
        else:
            experts, doubtful = choice.by_words(known)
            experts = branch(~lanes_where(doubtful).equals(0), choose_again, experts)
        start = simt.Long(minimum(row, self.num_tokens - 1)) * self.num_experts
        return experts, [self.logits[start + maximum(expert, 0)] for expert in experts]

    def owned(self, count: int) -> list:
        """Whether there are the slots that this lane would own; None where every lane's are."""
        lanes, slots = self.layout.lanes, self.slots
        return [self.lane.of_row + i * lanes < slots if (i + 1) * lanes > slots else None for i in range(count)]

    def weigh(self, logits, owned, used, largest, inverse) -> list:
        """Weights of this lane's slots, right where they are owned and used."""
        rule, lanes = self.rule, self.layout.lanes
        if rule.normalize or rule.scoring == "softmax_selected":
            base = largest
            if not self.by_logits:  # the largest logit need not be among the chosen; slots past the last repeat it
                keys = [select(u, key_of(x), MINUS_INFINITY) for u, x in zip(used, logits, strict=True)]
                base = value_of(combine_lanes(maximum, largest_of(keys), lanes))
            raw = [exp2(log_ratio(x, base, rule.scoring)) for x in logits]
            counted = [u if o is None else u & o for u, o in zip(used, owned, strict=True)]
            counted = [select(c, r, 0.0) for c, r in zip(counted, raw, strict=True)]
            # Lanes past the last slot add up something else, and own nothing.
            factor = reciprocal(combine_lanes(add, total(counted), min(lanes, power_of_two(self.slots))))
            weights = [r * factor for r in raw]
        elif rule.scoring == "sigmoid":
            weights = [sigmoid(x) for x in logits]
        else:
            weights = [exp2((x - largest) * LOG2E) * inverse for x in logits]
        return weights if rule.scale == 1 else [w * rule.scale for w in weights]

    def write(self, row, real, experts, weights, owned, used, largest) -> None:
        """Writes this lane's slots, and counts them."""
        for i, (expert, weight) in enumerate(zip(experts, weights, strict=True)):
            mine = real if owned[i] is None else real & owned[i]
            weight = select(used[i], select(largest.equals(largest), weight, largest), 0.0)  # a NaN is the whole row's
            with when(mine):
                at = row * self.slots + (self.lane.of_row + i * self.layout.lanes)
                self.experts[at] = expert
                self.weights[at] = weight
            with when(mine & used[i]):
                self.histogram.add(expert, 1)

    def reduce(self, partials, sums) -> None:
        """Writes the warp's sums: over its rows, always in the same order."""
        lanes, lane, num_experts = self.layout.lanes, self.lane, self.num_experts
        start = simt.warp() * (num_experts + 2)
        *probabilities, squared_log, entropy = sums
        probabilities = [combine_lanes(add, p, WARP, lanes) for p in probabilities]
        squared_log = combine_lanes(add, squared_log, WARP, lanes)
        entropy = combine_lanes(add, entropy, WARP)
        for i, probability in enumerate(probabilities):
            expert = lane.first_expert + i
            with when((lane.of_warp < lanes) & (expert < num_experts)):
                partials[start + expert] = probability.bits()
        with when(lane.of_warp.equals(0)):
            partials[start + num_experts] = squared_log.bits()
            partials[start + num_experts + 1] = (entropy * LN2).bits()


def log_ratio(x: simt.Float, base: simt.Float, scoring: Scoring) -> simt.Float:
    """Logarithm to base 2 of the score of `x` over that of `base`, at least `_LEAST`."""
    if scoring != "sigmoid":
        return maximum((x - base) * LOG2E, _LEAST)
    # log sigmoid(x) = min(x, 0) - log(1 + exp(-|x|)); the differences of the first terms are exact.
    steps = maximum(base * -1.0, 0.0) - maximum(x * -1.0, 0.0)
    return maximum(steps * LOG2E + (_log_of_one_and_power(base) - _log_of_one_and_power(x)), _LEAST)


def sigmoid(x: simt.Float) -> simt.Float:
    return reciprocal(exp2(x * -LOG2E) + 1.0)


def dot(a: list[simt.Float], b: list[simt.Float]) -> simt.Float:
    out = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        out = multiply_add(x, y, out)
    return out


def _log_of_one_and_power(x: simt.Float) -> simt.Float:
    """Logarithm of 1 + exp(-|x|), to base 2."""
    return log2(exp2(maximum(x, x * -1.0) * -LOG2E) + 1.0)
