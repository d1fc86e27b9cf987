"""Kernels that multiply, in persistent blocks, one per SM: a producer warpgroup that copies and two that multiply.

A `TileKernel` is what all of them have in common: the launch and its memory, and each warpgroup's walk over the tiles
of its block. The producer fills the ring with a tile's operands, and gets the next tile under the last copies of one. A
consumer multiplies what is in the ring, and stores what it holds of one tile under the products of the next. What a
tile is, and what is copied, multiplied and stored of it, is each kernel's own.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import gather, tile_queue
from pallas_kernels.hopper.inline import K_STEP, SWIZZLED
from pallas_kernels.hopper.ring import Ring
from pallas_kernels.hopper.tile_queue import TileQueue
from pallas_kernels.mosaic import interpreter, launches
from pallas_kernels.mosaic.device import num_sms
from pallas_kernels.mosaic.row_groups import TILE_COLUMNS, TILE_ROWS
from pallas_kernels.tuning.parameters import TileTuning

PRODUCER = 2  # the warpgroup


class TileKernel:
    """A kernel by its tiles. The walks are the same for all kernels; the methods before them are a kernel's own.

    `refs` are the operands, results and memory of the launch, each by its name, with the `ring` that operands come
    through and the `warpgroup` that runs: 0 and 1 multiply, 2 is the producer.
    """

    tile: ClassVar[Any]
    """The kind of named tuple of scalars that a tile is."""

    num_tiles: int
    """How many tiles the blocks share out."""

    operands: Mapping[str, Any]
    """Arrays or tuples of them, by name."""

    dtype: Any
    """The type of the ring's operands."""

    gather: Any
    """The `RowGather` that brings rows into the slots, or None."""

    tuning: TileTuning
    """Slots of the ring, the order of the tiles, and how they are shared out."""

    buffers: Any = None
    """Shared memory that results leave from."""

    barriers: Mapping[str, Any] = {}
    """Other barriers than the ring's, by name."""

    def find(self, refs, number) -> Any:
        """The tile of a number, and whether there is one; past the last it may be any."""

    def first_tokens(self, refs, tile) -> Any:
        """Which tokens the producer gathers first: what it must know before it fills the ring."""

    def fill(self, refs, tile, tokens, step, ahead: Callable, known_after: Callable) -> Any:
        """Fills the ring with a tile's operands, from `step` on, and finds the tile that follows meanwhile.

        `ahead(begin)` is `TileQueue.ahead` of that tile, and `known_after()` the one after it, where shares are fixed.
        Returns the step after the last, the tile that follows with its tokens, and what `known_after` returned.
        """

    def part(self, refs, tile) -> Any:
        """The tile as its consumer needs to know it."""

    def nothing_held(self) -> Any:
        """A consumer's values before its first tile: as many as it holds of a tile."""

    def multiply(self, refs, turn, step, held, part, take: Callable) -> Any:
        """Multiplies a tile's operands, from `step` on, and stores what is held of the one before.

        Returns the step after the last, what is held now, and what `take()` returned, which the next tile comes from.
        """

    def store_held(self, refs, turns, held) -> None:
        """Stores what is held after the last of `turns` tiles."""

    def produce(self, refs, queue: TileQueue) -> None:
        """The producer's walk."""

        def fill_tile(carry):
            turn, step, (tile, _), tokens, known = carry
            ahead, known_after = partial(queue.ahead, turn + 1, known), lambda: queue.known(turn + 2)
            step, following, known = self.fill(refs, tile, tokens, step, ahead, known_after)
            return turn + 1, step, *following, known

        zero = jnp.int32(0)
        carry: Any = (zero, zero, *queue.first(partial(self.first_tokens, refs)), queue.known(zero + 1))
        lax.while_loop(lambda carry: carry[2][1], fill_tile, carry)

    def consume(self, refs, queue: TileQueue) -> None:
        """A consumer's walk."""

        def multiply_tile(carry):
            turn, step, held, (tile, _) = carry
            part = self.part(refs, tile)
            known = queue.known(turn + 1)
            take = partial(queue.take, turn + 1, known)
            step, held, taken = self.multiply(refs, turn, step, held, part, take)
            return turn + 1, step, held, known or taken

        zero, held = jnp.int32(0), self.nothing_held()
        known = queue.known(zero)
        carry = (zero, zero, held, known or queue.take(zero, known))
        turns, _, held, _ = lax.while_loop(lambda carry: carry[-1][1], multiply_tile, carry)
        self.store_held(refs, turns, held)

    def run(
        self,
        name: str,
        *,
        results: Mapping[str, Any],
        copies: int,
        aliases: Sequence[tuple[str, str]] = (),
        registers: tuple[int, int] = (72, 216),
    ) -> SimpleNamespace:
        """Computes all tiles and returns the results by name.

        Args:
          name: of the kernel in profiles.
          results: shapes and dtypes or tuples of them, by name.
          copies: bulk copies that fill a slot.
          aliases: pairs of operands and results that may take their memory.
          registers: how many a thread of the producer has, and one of a consumer. `setmaxnreg` shares out the 168 that
            the launch gave to each of three warpgroups; asking for more hangs.
        """
        operands, gathers, stages = self.operands, self.gather is not None, self.tuning.stages
        blocks, dynamic = interpreter.blocks(num_sms()), tile_queue.is_dynamic(self.tuning.shares)
        if dynamic:
            counter = tile_queue.new_counter(self.num_tiles, blocks)
            operands = {**operands, "counter": counter}
            results = {**results, "counter_after": jax.ShapeDtypeStruct(counter.shape, counter.dtype)}
            aliases = [*aliases, ("counter", "counter_after")]
        memory = {
            **(tile_queue.memory() if dynamic else {}),
            "lhs": plgpu.SMEM((stages, TILE_ROWS, K_STEP), self.dtype, transforms=SWIZZLED),
            "rhs": plgpu.SMEM((stages, TILE_COLUMNS, K_STEP), self.dtype, transforms=SWIZZLED),
            "buffers": self.buffers,
            "landed": gather.landed_barriers(stages),
            "full": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            **self.barriers,
        }

        def body(*flat):
            refs = _named({**operands, **results, **memory}, flat)
            refs.ring = Ring(stages, gathers, refs.lhs, refs.rhs, refs.landed, refs.full, refs.empty)
            refs.warpgroup = lax.axis_index("wg")
            queue = TileQueue(blocks, lax.axis_index("sm"), dynamic, self.tile, self.find, refs)
            if gathers:
                gather.init_landed(refs.landed, stages)

            @pl.when(refs.warpgroup == PRODUCER)
            def _():
                plgpu.set_max_registers(registers[0], action="decrease")
                self.produce(refs, queue)

            @pl.when(refs.warpgroup < PRODUCER)
            def _():
                plgpu.set_max_registers(registers[1], action="increase")
                self.consume(refs, queue)
                plgpu.wait_smem_to_gmem(0)

        body.__name__ = name
        number, result_number = (vars(_named(trees, range(len(_leaves(trees))))) for trees in (operands, results))
        pairs = [zip(jax.tree.leaves(number[a]), jax.tree.leaves(result_number[b]), strict=True) for a, b in aliases]
        flat = launches.kernel(
            body,
            in_place={operand: result for pair in pairs for operand, result in pair},
            out_type=_leaves(results),
            scratch_types=_leaves(memory),
            grid=(blocks,),
            grid_names=("sm",),
            num_threads=3,
            thread_name="wg",
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                unsafe_no_auto_barriers=True,
                lowering_semantics=plgpu.LoweringSemantics.Lane,
                reduction_scratch_bytes=1024,  # two operand tiles are worth more than room for sums across warps
            ),
        )(*_leaves(operands))
        return _named(results, flat)


def _leaves(trees: Mapping[str, Any]) -> list:
    """In the order of the names as they are given; jax would sort them."""
    return jax.tree.leaves(list(trees.values()))


def _named(trees: Mapping[str, Any], leaves) -> SimpleNamespace:
    """`leaves` in place of those of `trees`."""
    values = jax.tree.unflatten(jax.tree.structure(list(trees.values())), leaves)
    return SimpleNamespace(**dict(zip(trees, values, strict=True)))
