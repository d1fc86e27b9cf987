"""The pipeline of a block: copies several slots ahead, registers half a product ahead, and products in between.

Tensor cores have work while a block waits at its barrier, and while copies are started: what they multiply next is in
registers by then, and the copies of a slot are spread over the products of another. Everything in a turn of the loop is
in one piece without branches, which the assembler can mix.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from pallas_kernels import simt
from pallas_kernels.ampere.operands import Sums, Tile, add_products
from pallas_kernels.simt.matrices import commit_copies, wait_for_copies
from pallas_kernels.simt.threads import branch, loop
from pallas_kernels.simt.values import Float, Int, Pointer, minimum


class Slots(NamedTuple):
    """The slots that a block's operands arrive in, in turns.

    Attributes:
      memory: all slots.
      tile: the block's.
    """

    memory: Pointer
    tile: Tile

    def slot(self, step) -> Pointer:
        return self.memory.at(step % self.tile.stages * self.tile.slot_words)

    def wait(self) -> None:
        """Until all threads see the oldest slot that is on its way, and have left the one before it."""
        wait_for_copies(self.tile.stages - 2)
        simt.block_barrier()


class Operands(NamedTuple):
    """Operands of a tile's products.

    Attributes:
      copies: each `(step, slot, *state)` starts a copy of the thread, to the slot of a step.
      left: `(slot, product)` loads the thread's part of the left operand, for each 16 rows.
      right: `(slot, step, product, half)` loads its part of the right one, of a half panel.
      state: `(step)` loads what the copies of a step need, before they do.
      behind: `(step)` may start other copies behind those of a step.
    """

    copies: Sequence[Callable]
    left: Callable
    right: Callable
    state: Callable = lambda step: []
    behind: Callable = lambda step: None


def start_copies(ring: Slots, operands: Operands) -> list[Int]:
    """Starts the copies of the first slots, and returns the state of the step that follows them."""
    *states, next_state = [operands.state(Int(step)) for step in range(ring.tile.stages)]
    for step, state in enumerate(states):
        for copy in operands.copies:
            copy(Int(step), ring.slot(step), *state)
        operands.behind(Int(step))
        commit_copies()
    return next_state


def sum_products(ring: Slots, operands: Operands, steps, state: Sequence[Int]) -> Sums:
    """The sums of the products of so many slots, after `start_copies`; the one that follows has been waited for."""
    ahead = ring.tile.stages - 1
    ring.wait()
    places = [(product, half) for product in range(ring.tile.products) for half in range(2)]
    held_ahead = ring.tile.kind != "float32"  # whose operands are converted, for which registers are few

    def load(slot: Pointer, step: Int, place: tuple[int, int], left: list) -> tuple[list, list]:
        product, half = place
        return left if half else operands.left(slot, product), operands.right(slot, step, product, half)

    def turn(k, *flat):
        sums, (left, right), state = jax.tree.unflatten(tree, flat)
        following, slot, step = k + ahead, ring.slot(k), k
        for number, place in enumerate(places):
            if not held_ahead:
                left, right = load(slot, step, place, left)
            if place == places[-1]:
                operands.behind(following)
                commit_copies()
                state = operands.state(following + 1)
                ring.wait()
                step = minimum(k + 1, steps - 1)
                slot = ring.slot(step)
            later = load(slot, step, places[(number + 1) % len(places)], left) if held_ahead else (left, right)
            if place != places[-1]:
                first, end = (len(operands.copies) * n // (len(places) - 1) for n in (number, number + 1))
                for copy in operands.copies[first:end]:
                    copy(following, ring.slot(following), *state)
            add_products(sums, place[1], left, right, ring.tile.kind)
            left, right = later
        return jax.tree.leaves((sums, (left, right) if held_ahead else ([], []), state))

    first = load(ring.slot(0), Int(0), places[0], []) if held_ahead else ([], [])
    no_sums = [[[[Float(0.0)] * 4 for _ in range(4)] for _ in range(2)] for _ in range(ring.tile.warp_rows // 16)]
    flat, tree = jax.tree.flatten((no_sums, first, list(state)))
    return jax.tree.unflatten(tree, loop(0, steps, 1, turn, flat))[0]


def sweep_columns(
    ring: Slots, sweep: Int, column_tiles: int, of_column: Callable, finish: Callable, *, ring_is_free: bool
) -> None:
    """Multiplies a block's column tiles, one after the other; the next one's first slots arrive while one ends.

    Args:
      ring: the block's.
      sweep: which column tiles are the block's.
      column_tiles: how many there are for all blocks.
      of_column: `(column)` gives a tile's operands and their number of steps.
      finish: `(column, sums)`, the end of a tile.
      ring_is_free: whether the next tile's copies may start before this one's end; else they wait for it.
    """
    each = ring.tile.sweep
    first, end = (sweep, sweep + 1) if each == 1 else (sweep * each, minimum((sweep + 1) * each, column_tiles))

    def turn(column, *state):
        operands, steps = of_column(column)
        sums = sum_products(ring, operands, steps, state)
        if not ring_is_free or each == 1:
            finish(column, sums)
        if each == 1:
            return []
        simt.block_barrier()  # all have left the slots that the next tile starts with
        state = branch(column + 1 < end, lambda: start_copies(ring, of_column(column + 1)[0]), state)
        if ring_is_free:
            finish(column, sums)
        return state

    state = start_copies(ring, of_column(first)[0])
    if each == 1:
        turn(first, *state)
    else:
        loop(first, end, 1, turn, state)
