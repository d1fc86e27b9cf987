"""Which tile a block computes next: a number from a counter in device memory, handed to the block's three warpgroups.

Blocks that start late, because a collective's own blocks hold their SMs, find the work done instead of a share that
waits for them. Tile n is the same whoever computes it, so no result depends on who does.

One thread of the producer counts, finds out what the tile is, and writes that to shared memory, for its own warpgroup
too. It does so under the last steps of the tile before, where nobody waits for it; not earlier, or one block would have
two tiles while another has none. A launch takes `tiles + blocks` numbers, one for each tile and one for each block that
learns that none is left; after so many `atom.inc` begins again. The counter is zero when a kernel starts and ends.
"""

# pyright: reportCallIssue=false, reportAbstractUsage=false, reportArgumentType=false

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from pallas_kernels.hopper import inline_interpreter as forms
from pallas_kernels.hopper.inline import (
    SCALAR,
    c32,
    global_pointer,
    int_type,
    ptx,
    scalar,
    shared_address,
    thread_index,
)
from pallas_kernels.mosaic.interpreter import in_interpreter

FIELDS = 8
"""Words in shared memory that describe a tile, at most."""

PLACES = 4
"""Tiles that the producer may be ahead of the consumers: as many as slots of the ring, for tiles of one step."""


def memory() -> dict[str, Any]:
    """What a kernel needs in shared memory, by name."""
    return {
        "next_tiles": plgpu.SMEM((PLACES * FIELDS,), jnp.int32),
        "handed": plgpu.Barrier(num_arrivals=1, num_barriers=PLACES),
        "taken": plgpu.Barrier(num_arrivals=2, num_barriers=PLACES),
    }


class TileQueue(NamedTuple):
    """The tiles of a block, one after the other.

    Attributes:
      tiles: how many the blocks share out, in all.
      blocks: that share them.
      block: this one.
      dynamic: whether tiles are counted out; otherwise a block takes every `blocks`-th, from its own number on.
      refs: has `counter` and what `memory` names.
    """

    tiles: int
    blocks: int
    block: jax.Array
    dynamic: bool
    refs: Any

    def number(self, turn) -> jax.Array:
        """Of the block's tile of `turn`, in the producer's first thread; `tiles` or more if there is none."""
        if self.dynamic:
            return count(self.refs.counter, self, turn)
        return self.block + turn * self.blocks

    def hand(self, turn, number, tile: tuple) -> None:
        """The producer hands the `tile` of `turn` to all, which has that `number`."""
        place = lax.rem(turn, PLACES)
        pl.when(turn >= PLACES)(lambda: plgpu.barrier_wait(self.refs.taken.at[place]))
        is_one = (number < self.tiles).astype(jnp.int32)
        write_words(self.refs.next_tiles, place * FIELDS, (is_one, *tile))
        plgpu.barrier_arrive(self.refs.handed.at[place])

    def ahead(self, turn, find: Callable, take: Callable) -> tuple[Callable, ...]:
        """The producer's work for the tile of `turn`, in parts: each is given what the one before it returned.

        `find(number)` says what tile it is, and `take(turn)` waits for it and returns what the last part does.
        """

        def hand(found):
            self.hand(turn, *found)
            return take(turn)

        return lambda _: self.number(turn), lambda number: (number, find(number)), hand

    def wait(self, turn, kind):
        """The tile of `turn`, a `kind` of named tuple, and whether there is one."""
        place = lax.rem(turn, PLACES)
        plgpu.barrier_wait(self.refs.handed.at[place])
        is_one, *fields = (self.refs.next_tiles[place * FIELDS + i] for i in range(1 + len(kind._fields)))
        return kind(*fields), is_one > 0

    def take(self, turn, kind):
        """The same for a consumer, which makes room for another."""
        tile = self.wait(turn, kind)
        plgpu.barrier_arrive(self.refs.taken.at[lax.rem(turn, PLACES)])
        return tile


def _is_first_thread():
    return arith.cmpi(arith.CmpIPredicate.eq, thread_index(), c32(0))


@in_interpreter(forms.new_counter)
def new_counter(tiles: int, blocks: int) -> jax.Array:
    """The counter of a launch of so many blocks that share out `tiles`."""
    del tiles, blocks
    return jnp.zeros(1, jnp.int32)


def last_number(tiles: int, blocks: int) -> int:
    """The last that a launch takes; after it, the counter is zero again."""
    return tiles + blocks - 1


@in_interpreter(forms.count)
def count(counter, queue: TileQueue, turn):
    """The counter's next number, in the first thread, and 0 in the others."""
    del turn
    last = last_number(queue.tiles, queue.blocks)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))
    def run(ctx, counter):
        number = utils.inline_ptx(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0; @p atom.global.inc.u32 $0, [$1], $2; }",
            global_pointer(counter),
            c32(last),
            arith.extui(int_type(32), _is_first_thread()),
            result_types=int_type(32),
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(number, (), is_signed=True)

    return run(counter)


@in_interpreter(forms.write_words)
def write_words(words, first, values: tuple) -> None:
    """Writes `values` of the first thread to shared memory, from word `first` on."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, (SCALAR,) * len(values)))
    def run(ctx, words, first, values):
        address = shared_address(words, arith.muli(scalar(first), c32(4)))
        with utils.when(_is_first_thread()):
            for i, value in enumerate(values):
                ptx("st.shared.b32 [$0], $1;", arith.addi(address, c32(4 * i)), scalar(value), constraints="r,r")

    run(words, first, values)
