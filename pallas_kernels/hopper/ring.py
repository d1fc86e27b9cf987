"""The ring that operands come through: slots of shared memory, filled by one warpgroup and read by two.

A slot holds a k step, 128 x 64 of the left operand and 256 x 64 of the right one. `full` completes with the bulk copies
into it and `landed` with the gathered rows; the consumers arrive at `empty` when their products have read it.

It is not `plgpu.emit_pipeline_warp_specialized`, which (in jax 0.11 and 0.12) fills slots by bulk copies alone, so that
rows found by index and their barrier have no place in it; has the same blocks at every step of a loop; drains after one
whose length is not static and a multiple of the slots; and takes no results of two consumers out of shared memory. So
no kernel was timed with it. What is known is the price of a ring that ends with a tile's products: down backward took
0.40 ms with 3 slots and a tile's last operands fetched beside them, and 343 µs with 4 slots that carry those as well
(24576,1536,256,128,8; `docs/performance_log.md`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import gather, panels
from pallas_kernels.hopper.inline import PANEL
from pallas_kernels.mosaic.row_groups import GROUP_ROWS, TILE_COLUMNS

PANELS = TILE_COLUMNS // PANEL
"""Panels of 64 columns in a tile, and of 64 rows in a slot's right operand."""


class Slot(NamedTuple):
    """Slot `number`: `lhs` (128, 64) and `rhs` (256, 64) in shared memory, and its barrier `full`."""

    number: jax.Array
    lhs: Any
    rhs: Any
    full: Any

    def fetch(self, source, target) -> None:
        """Starts one of the bulk copies that fill the slot, to a part of it."""
        plgpu.copy_gmem_to_smem(source, target, self.full)

    def rhs_panel(self, panel: int):
        return self.rhs.at[pl.ds(panel * PANEL, PANEL)]


class Ring(NamedTuple):
    """`stages` slots and barriers; step s of a block uses number s modulo `stages`."""

    stages: int
    gathers: bool  # whether anything arrives at `landed`
    lhs: Any
    rhs: Any
    landed: Any
    full: Any
    empty: Any

    def slot(self, step) -> Slot:
        number = lax.rem(step, self.stages)
        return Slot(number, self.lhs.at[number], self.rhs.at[number], self.full.at[number])

    def release(self, step) -> None:
        """The warpgroup that calls has read the slot of `step`."""
        plgpu.barrier_arrive(self.empty.at[lax.rem(step, self.stages)])

    def fill(
        self, step, count, load: Callable, carry=None, found=None, under: Sequence[Callable] = ()
    ) -> tuple[Any, Any, Any]:
        """The producer's loop: `load(k, slot, carry, found) -> carry` starts the copies of `count` steps from `step`.

        The functions `under` are called before the last steps, one after the other, each with what the one before it
        returned: whatever they wait for, the slots that are filled give them time. `found` is what the last of them
        returned, and before that what is given. Returns the step after the last, the carry, and `found`.
        """

        def fill_some(first, upto, loop, found):
            def fill_one(k, loop):
                step, carry = loop
                slot = self.slot(step)
                pl.when(step >= self.stages)(lambda: plgpu.barrier_wait(self.empty.at[slot.number]))
                carry = load(k, slot, carry, found)
                return step + 1, carry

            return lax.fori_loop(first, upto, fill_one, loop)

        apart = jnp.clip(count // (len(under) + 1), 1, 2)
        loop, filled, result = (step, carry), 0, found
        for i, work in enumerate(under):
            upto = jnp.maximum(count - (len(under) - i) * apart, 0)
            loop = fill_some(filled, upto, loop, found)
            filled, result = upto, work(result)
        return *fill_some(filled, count, loop, result), result

    def multiply(self, step, count, product: Callable, carry=None, under: Sequence[Callable] = (), last=lambda: None):
        """The consumers' loop: a tile's chain of products over the slots of `count` steps, one or more, from `step`.

        `product(slot, carry, accumulator, first) -> carry, accumulator` starts one. The functions `under` share out the
        time that the tensor cores take, and `last` has that of the last product. Returns the step after the last, the
        tile's (64, 256) part in float32, and what `last` returned.
        """

        def one(step, carry, accumulator, first=False):
            slot = self.slot(step)
            plgpu.barrier_wait(slot.full)
            if self.gathers:
                gather.wait_landed(self.landed, slot.number, lax.rem(step // self.stages, 2))
            carry, accumulator = product(slot, carry, accumulator, first)
            plgpu.wgmma_wait(1)
            if not first:
                self.release(step + self.stages - 1)
            return step + 1, carry, accumulator

        def several(count, products):
            return lax.fori_loop(0, count, lambda _, p: one(*p), products)

        products = one(step, carry, panels.zero_accumulator(GROUP_ROWS, TILE_COLUMNS), first=True)
        left = count - 1
        if under:
            least, most = (max, min) if isinstance(count, int) else (jnp.maximum, jnp.minimum)
            apart = least((count - 1) // len(under), 1)
            for i, work in enumerate(under):
                work()
                products = several(most(apart, least(count - 1 - i * apart, 0)), products)
            left = least(count - 1 - len(under) * apart, 0)
        step, _, accumulator = several(left, products)
        found = last()
        accumulator = panels.finish_wgmma(accumulator)
        self.release(step + self.stages - 1)
        return step, accumulator, found
