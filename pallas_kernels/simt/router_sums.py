"""The router's losses and demand, from its blocks' counts and sums: the work of one thread block of the next launch."""

import jax
import jax.numpy as jnp

from pallas_kernels.simt import language as simt
from pallas_kernels.simt.column_sums import ColumnSums
from pallas_kernels.simt.language import WARP, block_barrier, combine_lanes, loop, multiply_add, total, when


class RouterSums:
    """Adds up `counts` (blocks, E) int32, `probabilities` (blocks, E) and `logs` (blocks, 2), both float32."""

    num_inputs = 2  # in addition to the counts
    num_outputs = 4

    def __init__(self, num_tokens: int, slots: int, blocks: int, num_experts: int, threads: int):
        self.num_tokens, self.slots, self.num_experts, self.threads = num_tokens, slots, num_experts, threads
        self.blocks = blocks
        self.of_experts = ColumnSums(blocks, num_experts, threads)
        self.of_logs = ColumnSums(blocks, 2, threads)

    @property
    def outputs(self) -> list[jax.ShapeDtypeStruct]:
        """Demand, and the three losses."""
        return [jax.ShapeDtypeStruct((self.num_experts,), jnp.int32)] + [jax.ShapeDtypeStruct((1,), jnp.float32)] * 3

    @property
    def shared_words(self) -> list[int]:
        return [self.of_experts.words, self.of_experts.words, self.of_logs.words, self.threads // WARP]

    def run(self, counts, probabilities, logs, demand, balance_loss, squared_log, entropy, *shared) -> None:
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

        (mine,) = loop(thread, num_experts, self.threads, balance, [simt.Float(0.0)])
        mine = combine_lanes(simt.add, mine, WARP)
        when((thread % WARP).equals(0))(lambda: warps.__setitem__(thread // WARP, mine.bits()))
        block_barrier()

        @when(thread.equals(0))
        def _():
            every = total([warps[w].as_float() for w in range(self.threads // WARP)])
            balance_loss[0] = every * (num_experts / (self.slots * self.num_tokens**2))
            for loss, column in ((squared_log, 0), (entropy, 1)):
                loss[0] = self.of_logs.read(log_sums, simt.Int(column), floating=True) * (1 / self.num_tokens)
