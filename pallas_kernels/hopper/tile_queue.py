"""Which tile a block computes next: one of a fixed share, or what a counter in device memory says.

With fixed shares, a block takes every `blocks`-th tile from its own number on, and each warpgroup finds them itself.
Where shares are dynamic, blocks that start late, because a collective's own blocks hold their SMs, find the work done
instead of a share that waits for them. Tile n is the same whoever computes it, so no result depends on who does.

For that, one thread of the producer counts, finds out what the tile is, and writes that to shared memory, for its own
warpgroup too. It does so under the last steps of the tile before, where nobody waits for it; not earlier, or one block
would have two tiles while another has none. A block stops at the first number that is no tile's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.inline import count, write_words
from pallas_kernels.mosaic.interpreter import is_interpreted, tiles_taken

FIELDS = 8
"""Words in shared memory that describe a tile, at most."""

PLACES = 4
"""Tiles that the producer may be ahead of the consumers: as many as slots of the ring, for tiles of one step."""


def is_dynamic(shares: str | None) -> bool:
    """Whether tiles are counted out, with `TileTuning.shares`."""
    if shares is not None:
        return shares == "dynamic"
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[axis] > 1 for axis in mesh.manual_axes)  # only there are collectives beside the kernels


def new_counter(tiles: int, blocks: int) -> jax.Array:
    """The counter of a launch of so many blocks that share out `tiles` at most.

    In the interpreter, where blocks run one after the other, it holds the numbers that each block gets.
    """
    return jnp.asarray(tiles_taken(tiles, blocks)) if is_interpreted() else jnp.zeros(1, jnp.int32)


def memory() -> dict[str, Any]:
    """Shared memory and barriers of a kernel whose tiles are handed over, by name."""
    return {
        "next_tiles": plgpu.SMEM((PLACES * FIELDS,), jnp.int32),
        "handed": plgpu.Barrier(num_arrivals=1, num_barriers=PLACES),
        "taken": plgpu.Barrier(num_arrivals=2, num_barriers=PLACES),
    }


class TileQueue(NamedTuple):
    """The tiles of a block, one after the other; each comes with whether there is one.

    Attributes:
      blocks: how many share the tiles.
      block: this one.
      dynamic: whether tiles are counted out; otherwise a block takes every `blocks`-th, from its own number on.
      kind: the named tuple that a tile is.
      find: `(refs, number) -> tile, whether there is one`; past the end some tile, its values are not used.
      refs: has `counter` and what `memory` names.
    """

    blocks: int
    block: jax.Array
    dynamic: bool
    kind: Any
    find: Callable
    refs: Any

    def known(self, turn):
        """The tile of `turn` where shares are fixed: any warpgroup finds it, at any time. None where it is handed."""
        if self.dynamic:
            return None
        return self.find(self.refs, self.block + turn * self.blocks)

    def ahead(self, turn, known, begin: Callable) -> tuple[Any, tuple[Callable, ...]]:
        """For the producer: the tile of `turn` and `begin(tile)`, and what is left to do for it.

        If it is not `known`, that is None, and parts of work: each is given what the one before it returned, and the
        last returns it.
        """
        if known is not None:
            return (known, begin(known[0])), ()

        def hand(found):
            self._hand(turn, *found)
            tile = self._wait(turn)
            return tile, begin(tile[0])

        return None, (lambda _: count(self.refs.counter, self.block, turn), partial(self.find, self.refs), hand)

    def first(self, begin: Callable):
        """For the producer: its first tile, and `begin(tile)`."""
        found, work = self.ahead(jnp.int32(0), self.known(jnp.int32(0)), begin)
        for part in work:
            found = part(found)
        return found

    def take(self, turn, known) -> Any:
        """For a consumer: the tile of `turn`, which makes room for another; None if it is `known`."""
        if known is not None:
            return None
        tile = self._wait(turn)
        plgpu.barrier_arrive(self.refs.taken.at[lax.rem(turn, PLACES)])
        return tile

    def _hand(self, turn, tile: tuple, is_one) -> None:
        place = lax.rem(turn, PLACES)
        pl.when(turn >= PLACES)(lambda: plgpu.barrier_wait(self.refs.taken.at[place]))
        write_words(self.refs.next_tiles, place * FIELDS, (is_one.astype(jnp.int32), *tile))
        plgpu.barrier_arrive(self.refs.handed.at[place])

    def _wait(self, turn):
        place = lax.rem(turn, PLACES)
        plgpu.barrier_wait(self.refs.handed.at[place])
        is_one, *fields = (self.refs.next_tiles[place * FIELDS + i] for i in range(1 + len(self.kind._fields)))
        return self.kind(*fields), is_one > 0
