"""Experts choose tokens: the cut-off of each expert's list by radix selection, and the experts that take each token."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels import simt
from pallas_kernels.contract import KEY_BITS, Cutoffs
from pallas_kernels.simt.threads import block_barrier, branch, exclusive_warp_sum, indices, loop, when
from pallas_kernels.simt.values import WARP, Long, minimum, select, total
from pallas_kernels.traced_once import traced_once

WARPGROUPS = 4
THREADS = WARPGROUPS * 128
WARPS = THREADS // WARP
DIGIT_BITS = 11
BINS = 1 << DIGIT_BITS
BINS_PER_THREAD = BINS // THREADS
IN_FLIGHT = 8  # keys that a thread loads at a time


@traced_once()
def token_cutoffs(keys: Int[Array, "E T"], wanted: Int[Array, " E"]) -> Cutoffs:
    """Cuts each expert's list off after `wanted[e]` tokens; see the portable twin.

    A block works on an expert, digit after digit of the key from the highest on: it counts the tokens by that digit,
    and goes on with those of the one digit where the list is cut off. Where not all tokens of the last key are taken,
    the id goes on where the key ends. An expert that wants nothing costs next to nothing.
    """
    num_experts, num_tokens = keys.shape
    options = {"blocks": num_experts, "warpgroups": WARPGROUPS, "shared": [BINS, WARPS, 3]}
    outputs = [jax.ShapeDtypeStruct((num_experts,), jnp.int32)] * 2
    find = simt.kernel(_Cutoffs(num_tokens).run, name="moe_token_cutoffs", outputs=outputs, **options)
    return Cutoffs(*find(keys, wanted))


class _Cutoffs:
    """A thread of `token_cutoffs`."""

    def __init__(self, num_tokens: int):
        self.num_tokens = num_tokens
        self.token_bits = max(1, (num_tokens - 1).bit_length())

    def run(self, keys, wanted, cutoff_keys, cutoff_tokens, histogram, warp_totals, found):
        self.histogram, self.warp_totals, self.found = histogram, warp_totals, found
        self.last_token = simt.Int(self.num_tokens - 1)
        self.thread, self.warp, self.lane = simt.thread(), simt.warp(), simt.thread() % WARP
        expert = simt.block()
        self.keys = keys.at(Long(expert) * self.num_tokens)
        missing = wanted[expert]
        first = self.thread.equals(0)

        with when(first & missing.equals(0)):
            cutoff_keys[expert] = (1 << KEY_BITS) - 1
            cutoff_tokens[expert] = -1

        with when(missing > 0):
            key, missing_of_key, count = self.search(KEY_BITS, lambda key, _: key, missing)
            with when(first):
                cutoff_keys[expert] = key
                cutoff_tokens[expert] = self.last_token
            with when(missing_of_key < count):  # the lower ids of them

                def place(of_token, token):
                    return select(of_token.equals(key), self.last_token - token, -1)

                last = self.search(self.token_bits, place, missing_of_key)[0]
                with when(first):
                    cutoff_tokens[expert] = self.last_token - last

    def search(self, bits: int, value_of, missing):
        """The `missing`-th largest of the values `value_of(key, token)` of so many bits; negative ones do not count.

        Returns it, how many are missing of those that equal it, and how many those are.
        """
        prefix, count = simt.Int(0), simt.Int(0)
        for shift in reversed(range(0, bits, DIGIT_BITS)):
            width = min(DIGIT_BITS, bits - shift)
            self.count_digits(value_of, prefix, shift, width)
            digit, missing, count = self.find_bin(missing)
            prefix = (prefix << width) | digit
        return prefix, missing, count

    def count_digits(self, value_of, prefix, shift, width):
        """Counts the values with the prefix by the digit that follows it."""
        simt.clear(self.histogram, BINS, THREADS)
        for start in indices(self.thread, self.num_tokens, THREADS * IN_FLIGHT):
            tokens = [start + i * THREADS for i in range(IN_FLIGHT)]
            loaded = [self.keys[minimum(token, self.num_tokens - 1)] for token in tokens]
            for token, key in zip(tokens, loaded, strict=True):
                value = value_of(key, token)
                counts = (token < self.num_tokens) & (value >> (shift + width)).equals(prefix)
                digit = (value >> shift) & ((1 << width) - 1)
                with when(counts):
                    self.histogram.add(digit, 1)
        block_barrier()

    def find_bin(self, missing):
        """The digit whose count reaches `missing`, from the largest down; what is missing of it; and its count."""
        highest = simt.Int(BINS - 1) - self.thread * BINS_PER_THREAD
        counts = [self.histogram[highest - i] for i in range(BINS_PER_THREAD)]
        before, of_warp = exclusive_warp_sum(total(counts), self.lane)
        with when(self.lane.equals(0)):
            self.warp_totals[self.warp] = of_warp
        block_barrier()
        for warp in range(WARPS):
            before = before + select(self.warp > warp, self.warp_totals[warp], 0)
        for i, count in enumerate(counts):
            with when((before < missing) & (before + count >= missing)):
                for slot, value in enumerate((highest - i, missing - before, count)):
                    self.found[slot] = value
            before = before + count
        block_barrier()
        out = [self.found[slot] for slot in range(3)]
        block_barrier()
        return out


@traced_once("chosen_key", "slots")
def experts_added(
    keys: Int[Array, "E T"], cutoffs: Cutoffs, chosen_key: int, slots: int
) -> tuple[Int[Array, "T slots"], Bool[Array, " E"]]:
    """For each token, the experts that take it though it did not choose them; see the portable twin.

    A thread walks over the experts of one token; its neighbours' keys are next to its own.
    """
    num_experts, num_tokens = keys.shape
    threads = 128
    blocks = -(-num_tokens // threads)
    at_once = min(16, num_experts)

    def body(keys, cutoff_keys, cutoff_tokens, experts, crowded, crowded_here):
        token = simt.block() * threads + simt.thread()
        real = token < num_tokens
        column = keys.at(minimum(token, num_tokens - 1))
        simt.clear(crowded_here, num_experts, threads)

        def look(start, used):
            # The last turn reaches back to experts that have been looked at, which then do not count.
            first = minimum(start, num_experts - at_once)
            loaded = [column[Long(first + i) * num_tokens] for i in range(at_once)]
            cutoffs = [cutoff_keys[first + i] for i in range(at_once)]
            for i, (key, cutoff) in enumerate(zip(loaded, cutoffs, strict=True)):
                take = partial(take_expert, first + i, start, key > cutoff, used)
                (used,) = branch((key >= cutoff) & (key < chosen_key), take, [used])  # rare
            return [used]

        def take_expert(expert, start, above, used):
            added = real & (expert >= start) & (above | (token <= cutoff_tokens[expert]))
            with when(added & (used < slots)):
                experts[Long(token) * slots + used] = expert
            with when(added & (used >= slots)):
                crowded_here.add(expert, 1)
            return [used + select(added, 1, 0)]

        (used,) = loop(0, num_experts, at_once, look, [0])
        for slot in range(slots):
            with when(real & (used <= slot)):
                experts[Long(token) * slots + slot] = -1

        block_barrier()
        for expert in indices(simt.thread(), num_experts, threads):
            crowded[simt.block() * num_experts + expert] = crowded_here[expert]

    outputs = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((num_tokens, slots), (blocks, num_experts))]
    options = {"blocks": blocks, "warpgroups": 1, "shared": [num_experts]}
    experts, crowded = simt.kernel(body, name="moe_experts_added", outputs=outputs, **options)(keys, *cutoffs)
    return experts, crowded.any(0)
