"""Kernels that multiply, in persistent blocks, one per SM: a producer warpgroup that copies and two that multiply.

A `TileKernel` is what all of them have in common: the launch and its memory, and each warpgroup's walk over the tiles
of its block. The producer fills the ring with a tile's operands, and gets the next tile under the last copies of one. A
consumer multiplies what is in the ring, and stores what it holds of one tile under the products of the next. What a
tile is, and what is copied, multiplied and stored of it, is each kernel's own.

The `Ring` that operands come through is slots of shared memory, filled by one warpgroup and read by two. A slot holds a
k step, 128 x 64 of the left operand and 256 x 64 of the right one, or 128 x 64 of it for narrow tiles. `full` completes
with the bulk copies into it and `landed` with the rows that are gathered and the weights that are decoded; the
consumers arrive at `empty` when their products have read it.

It is not `plgpu.emit_pipeline_warp_specialized`, which (in jax 0.11 and 0.12) fills slots by bulk copies alone, so that
rows found by index and their barrier have no place in it; has the same blocks at every step of a loop; drains after one
whose length is not static and a multiple of the slots; and takes no results of two consumers out of shared memory. So
no kernel was timed with it. What is known is the price of a ring that ends with a tile's products: down backward took
0.40 ms with 3 slots and a tile's last operands fetched beside them, and 343 µs with 4 slots that carry those as well
(24576,1536,256,128,8; `docs/performance_log.md`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import gather, tile_queue
from pallas_kernels.hopper.inline import ACCUMULATOR, K_STEP, PANEL, SWIZZLED, finish_wgmma, zeros
from pallas_kernels.hopper.tile_queue import TileQueue
from pallas_kernels.mosaic import interpreter, launches
from pallas_kernels.mosaic.device import num_sms
from pallas_kernels.mosaic.row_groups import TILE_COLUMNS, TILE_ROWS
from pallas_kernels.tuning.parameters import TileTuning

PANELS = TILE_COLUMNS // PANEL
"""Panels of 64 columns in a wide tile, and of 64 rows in a slot's right operand."""

PRODUCER = 2  # the warpgroup

MOST_FOR_CONSUMERS = (56, 224)
"""Registers of a producer's and of a consumer's thread, where a producer does with few and consumers need many."""


class Slot(NamedTuple):
    """Slot `number`: `lhs` (128, 64) and `rhs` (columns, 64), if there is one, in shared memory; its barrier `full`.

    What multiplies calls `wait_for_rows` before it reads rows that a gather brings.
    """

    number: jax.Array
    lhs: Any
    rhs: Any
    full: Any
    wait_for_rows: Callable

    def fetch(self, source, target) -> None:
        """Starts one of the bulk copies that fill the slot, to a part of it."""
        plgpu.copy_gmem_to_smem(source, target, self.full)

    def fetch_panels(self, source, at: tuple, column, first: int, panels: int) -> None:
        """Starts the copies of `panels` panels of the right operand, from its panel `first` on.

        They are 64 rows of `source`, which `at` names with what comes before them, from `column` on. One copy takes
        them all if the source is `in_panels`, and `column` a multiple of 64.
        """
        if source.ndim == len(at) + 2:
            target = self.rhs.at[pl.ds(first * PANEL, panels * PANEL)].reshape(panels, PANEL, PANEL)
            self.fetch(source.at[*at, pl.ds(column // PANEL, panels)], target.transpose((1, 0, 2)))
            return
        for panel in range(panels):
            block = source.at[*at, pl.ds(column + panel * PANEL, PANEL)]
            self.fetch(block, self.rhs.at[pl.ds((first + panel) * PANEL, PANEL)])


def in_panels(arrays: tuple[jax.Array, ...], panels: int = PANELS) -> tuple[tuple[jax.Array, ...], int]:
    """Arrays `(..., columns)` as `(..., panels, 64)`, and how many bulk copies of them fill `panels` of a slot.

    As they are, where 64 does not divide their columns, and in the interpreter, which has no copies to a reshaped part
    of shared memory: each panel is a copy then.
    """
    if interpreter.is_interpreted() or arrays[0].shape[-1] % PANEL:
        return arrays, panels
    return tuple(array.reshape(*array.shape[:-1], -1, PANEL) for array in arrays), len(arrays)


class Ring(NamedTuple):
    """`stages` slots and barriers of `refs`; step s of a block uses number s modulo `stages`.

    Their products have `columns`.
    """

    refs: Any
    stages: int
    columns: int
    lands: bool  # whether a k step has anything that arrives at `landed`
    shifts: bool  # see `TileKernel`

    def slot(self, step) -> Slot:
        turn, number = self.turn_and_number(step)
        rhs = None if self.refs.rhs is None else self.refs.rhs.at[number]

        def wait_for_rows():
            if self.lands:
                gather.wait_landed(self.refs.landed, number, turn & 1)

        return Slot(number, self.refs.lhs.at[number], rhs, self.refs.full.at[number], wait_for_rows)

    def turn_and_number(self, step) -> tuple[Any, Any]:
        """How often the slot of a step was filled before, and its number."""
        if self.shifts:
            return lax.shift_right_logical(step, self.stages.bit_length() - 1), step & self.stages - 1
        return step // self.stages, lax.rem(step, self.stages)

    def release(self, step) -> None:
        """The warpgroup that calls has read the slot of `step`."""
        plgpu.barrier_arrive(self.refs.empty.at[self.turn_and_number(step)[1]])

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
                pl.when(step >= self.stages)(lambda: plgpu.barrier_wait(self.refs.empty.at[slot.number]))
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

    def multiply(
        self,
        step,
        count,
        product: Callable,
        carry=None,
        under: Sequence[Callable] = (),
        last: Callable = lambda: None,
    ):
        """The consumers' loop: a tile's chain of products over the slots of `count` steps, one or more, from `step`.

        `product(slot, carry, accumulator, first) -> carry, accumulator` starts one. The functions `under` share out the
        time that the tensor cores take, and `last` has that of the last product. Returns the step after the last, the
        tile's part (64, columns) in float32, and what `last` returned.
        """

        def one(step, carry, accumulator, first=False):
            slot = self.slot(step)
            plgpu.barrier_wait(slot.full)
            carry, accumulator = product(slot, carry, accumulator, first)
            plgpu.wgmma_wait(1)
            if not first:
                self.release(step + self.stages - 1)
            return step + 1, carry, accumulator

        def several(count, products):
            return lax.fori_loop(0, count, lambda _, p: one(*p), products)

        products = one(step, carry, zeros(self.columns, layout=ACCUMULATOR), first=True)
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
        accumulator = finish_wgmma(accumulator)
        self.release(step + self.stages - 1)
        return step, accumulator, found


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

    decoder: Any = None
    """The `TileDecoder` of compressed weights, or None."""

    tuning: TileTuning
    """Slots of the ring, the order of the tiles, and how they are shared out."""

    columns: int = TILE_COLUMNS
    """Of a tile."""

    buffers: Any = None
    """Shared memory that results leave from."""

    shifts: ClassVar[bool] = False
    """Whether a step's slot, of as many as a power of two, is found by shifts and not by divisions.

    Those of signed numbers take a dozen instructions each. But LLVM unrolls loops with shifts, and other kernels spill.
    """

    scratch: Mapping[str, Any] = {}
    """Barriers and memory beside these, by name."""

    @property
    def stages(self) -> int:
        """Slots of the ring."""
        return self.tuning.stages

    def right_operands(self) -> Any:
        """Scratch for those of the slots, or None."""
        return plgpu.SMEM((self.stages, self.columns, K_STEP), self.dtype, transforms=SWIZZLED)

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
        return ()

    def stores(self, refs, turn, held) -> Sequence[Callable]:
        """The stores that are left to do in a `turn` of what is held of the tile before."""
        return ()

    def multiply(self, refs, turn, step, held, part, take: Callable) -> Any:
        """Multiplies a tile's operands, from `step` on, and stores what is held of the one before.

        Returns the step after the last, what is held now, and what `take()` returned, which the next tile comes from.
        """

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
        for store in self.stores(refs, turns, held):
            store()

    def run(
        self,
        name: str,
        *,
        results: Mapping[str, Any],
        copies: int,
        in_place: Mapping[str, str] = {},
        registers: tuple[int, int] = (72, 216),
    ) -> SimpleNamespace:
        """Computes all tiles and returns the results by name.

        Args:
          name: of the kernel in profiles.
          results: shapes and dtypes or tuples of them, by name.
          copies: bulk copies that fill a slot, where there are any.
          in_place: the results that may take the memory of operands, by the operand's name, unless that is None.
          registers: how many a thread of the producer has, and one of a consumer. `setmaxnreg` shares out the 168 that
            the launch gave to each of three warpgroups; asking for more hangs.
        """
        operands, stages, lands = self.operands, self.stages, self.gather is not None
        blocks, dynamic = interpreter.blocks(num_sms()), tile_queue.is_dynamic(self.tuning.shares)
        if dynamic:
            counter = tile_queue.new_counter(self.num_tiles, blocks)
            operands = {**operands, "counter": counter}
            results = {**results, "counter_after": jax.ShapeDtypeStruct(counter.shape, counter.dtype)}
            in_place = {**in_place, "counter": "counter_after"}
        memory = {
            **(tile_queue.memory() if dynamic else {}),
            "lhs": plgpu.SMEM((stages, TILE_ROWS, K_STEP), self.dtype, transforms=SWIZZLED),
            "rhs": self.right_operands(),
            **(self.decoder.memory(stages) if self.decoder else {}),
            "buffers": self.buffers,
            "landed": gather.landed_barriers(stages),
            "full": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            **self.scratch,
        }
        names = (*operands, *results, *memory)

        def body(*trees):
            refs = SimpleNamespace(**dict(zip(names, trees, strict=True)))
            refs.ring = Ring(refs, stages, self.columns, lands, self.shifts)
            refs.warpgroup = lax.axis_index("wg")
            queue = TileQueue(blocks, lax.axis_index("sm"), dynamic, self.tile, self.find, refs)
            if lands:
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
        of_operand, of_result = list(operands).index, list(results).index
        written = launches.kernel(
            body,
            in_place={of_operand(a): of_result(b) for a, b in in_place.items() if operands[a] is not None},
            out_type=tuple(results.values()),
            scratch_types=tuple(memory.values()),
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
        )(*operands.values())
        return SimpleNamespace(**dict(zip(results, written, strict=True)))
