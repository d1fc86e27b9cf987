"""The router's losses and demand, from its blocks' counts and sums: the work of one thread block of the next launch."""

from operator import add
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.contract import Losses
from pallas_kernels.simt import language as simt
from pallas_kernels.simt.column_sums import ColumnSums
from pallas_kernels.simt.language import block_barrier, loop, when
from pallas_kernels.simt.values import Float, Int, multiply_add, total
from pallas_kernels.simt.warp import WARP, combine_lanes


class RouterSums:
    """Adds up `counts` (blocks, E) int32, `probabilities` (blocks, E) and `logs` (blocks, 2), both float32."""

    def __init__(self, num_tokens: int, slots: int, blocks: int, num_experts: int, threads: int):
        self.num_tokens, self.slots, self.num_experts, self.threads = num_tokens, slots, num_experts, threads
        self.blocks = blocks
        self.of_experts = ColumnSums(blocks, num_experts, threads)
        self.of_logs = ColumnSums(blocks, 2, threads)

    @property
    def outputs(self) -> tuple[jax.ShapeDtypeStruct, Losses]:
        """Demand, and the three losses."""
        loss: Any = jax.ShapeDtypeStruct((1,), jnp.float32)
        return jax.ShapeDtypeStruct((self.num_experts,), jnp.int32), Losses(loss, loss, loss)

    @property
    def shared_words(self) -> tuple[int, ...]:
        return self.of_experts.words, self.of_experts.words, self.of_logs.words, self.threads // WARP

    def run(self, counts, sums, outputs, shared) -> None:
        (probabilities, logs), (demand, losses) = sums, outputs
        count_sums, probability_sums, log_sums, warps = shared
        thread, num_experts = simt.thread(), self.num_experts
        begun = [(self.of_experts, counts, count_sums), (self.of_experts, probabilities, probability_sums)]
        begun += [(self.of_logs, logs, log_sums)]
        begun = [(of, of.begin(array, thread), sums) for of, array, sums in begun]
        for of, shares, sums in begun:
            of.finish(shares, sums)
        block_barrier()

        def balance(expert, so_far):
            count = self.of_experts.read(count_sums, expert)
            demand[expert] = count
            probability = self.of_experts.read(probability_sums, expert, floating=True)
            return [multiply_add(count.to_float(), probability, so_far)]

        (mine,) = loop(thread, num_experts, self.threads, balance, [Float(0.0)])
        mine = combine_lanes(add, mine, WARP)
        with when((thread % WARP).equals(0)):
            warps[thread // WARP] = mine.bits()
        block_barrier()

        with when(thread.equals(0)):
            every = total([warps[w].as_float() for w in range(self.threads // WARP)])
            losses.balance[0] = every * (num_experts / (self.slots * self.num_tokens**2))
            for loss, column in ((losses.squared_log, 0), (losses.entropy, 1)):
                loss[0] = self.of_logs.read(log_sums, Int(column), floating=True) * (1 / self.num_tokens)
