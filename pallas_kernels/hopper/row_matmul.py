"""The row kernels' walk: tiles of rows of one expert times a block of that expert's weight columns.

Persistent blocks walk over (row tile, column tile) pairs; each consumer owns 64 of a tile's rows. A finished tile is
packed to 16 bits in registers, which frees the accumulators; its panels are stored while the next tile's first k steps
run on the tensor cores. Or a tile ends with more operands, which follow its k steps through the ring.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.gather import RowGather
from pallas_kernels.hopper.inline import K_STEP, PANEL
from pallas_kernels.hopper.launch import PRODUCER, launch
from pallas_kernels.hopper.ragged_store import store_buffers, store_rows
from pallas_kernels.hopper.ring import PANELS, Ring
from pallas_kernels.hopper.tile_queue import TileQueue, is_dynamic
from pallas_kernels.hopper.wgmma import wgmma
from pallas_kernels.mosaic.row_groups import GROUP_ROWS, TILE_COLUMNS, TILE_ROWS, TileSchedule, Where
from pallas_kernels.tuning.parameters import TileTuning

FEW_STEPS = 8
"""LLVM unrolls a loop of fewer steps whole, and the producer spills: they get a count of which it knows no limit."""


class HeldEnd(NamedTuple):
    """The end of a tile that is stored under the next one's products.

    Attributes:
      finish: `(refs, where, accumulator) -> held`, `(64, columns)` of the operands' dtype.
      store: `(refs, where, panel, values)`, stores a panel `(64, 64)` of what was held.
      columns: of what is held.
    """

    finish: Callable
    store: Callable
    columns: int = TILE_COLUMNS


class RingEnd(NamedTuple):
    """The end of a tile that needs more operands: they come through the ring, a panel of 64 columns in a slot.

    Attributes:
      load: `(refs, where, panel, slot)`, starts the bulk copies of a panel, as many as for a k step.
      begin: `(refs, where) -> end_panel`, at the start of a tile. `end_panel(accumulator, panel, slot)` may start bulk
        copies from the slot to device memory, one commit group a panel.
    """

    load: Callable
    begin: Callable


class _Tile(NamedTuple):
    """A tile of the results: rows of one expert, and a block of columns."""

    expert: jax.Array
    first_row: jax.Array
    valid_rows: jax.Array
    row_tile: jax.Array
    column_tile: jax.Array


def row_matmul(
    name: str,
    schedule: TileSchedule,
    *,
    operands: Mapping[str, Any],
    column_tiles: int,
    k_steps: int,
    load: Callable,
    end: HeldEnd | RingEnd,
    transposed_weights: bool = False,
    tuning: TileTuning,
    **options,
) -> SimpleNamespace:
    """Runs a row kernel over the whole schedule and returns its results by name.

    Args:
      name: of the kernel in profiles.
      schedule: the row tiles.
      operands: arrays by name. With `tokens` `(T, d)` and `token_indices` `(R,)`, the left operand is gathered.
      column_tiles: how many blocks of 256 columns.
      k_steps: steps of 64 along the contracted dimension.
      load: `(refs, where, k, slot)`, starts the bulk copies of one k step, `where` being the whole tile.
      end: of a tile.
      transposed_weights: the weight tile is (columns, k) in shared memory instead of (k, columns) in panels.
      tuning: slots of the ring, the order of the tiles, and how they are shared out.
      options: of `launch`: `results`, `copies` and others.
    """
    dtype = jax.tree.leaves(list(operands.values()))[0].dtype
    gather = RowGather(operands["tokens"], rows=TILE_ROWS, columns=K_STEP) if "tokens" in operands else None

    used = None
    if is_dynamic(tuning.shares):  # a tile without rows would cost as long as it takes to get the next one
        used = schedule.count_used()

    def find_tile(refs, number):
        """Tile `number`, and whether there is one; past the end it is any."""
        row_tiles = schedule.num_tiles if refs.used is None else refs.used[0]
        tiles = row_tiles * column_tiles
        is_one, number = number < tiles, jnp.clip(number, 0, tiles - 1)
        shape = (row_tiles if used is None else jnp.maximum(row_tiles, 1), column_tiles)
        place = plgpu.planar_snake(number, shape, tuning.minor_dim, tuning.tile_width)
        row_tile = jnp.clip(place[0], 0, schedule.num_tiles - 1)
        expert, first_row, valid_rows = (of_tiles[row_tile] for of_tiles in refs.schedule)
        return _Tile(expert, first_row, valid_rows, row_tile, place[1]), is_one

    def produce(refs, ring: Ring, queue: TileQueue):
        def tokens_of(tile):
            return gather.load_tokens(refs.token_indices, tile.first_row) if gather else ()

        def produce_tile(carry):
            turn, step, (tile, _), tokens, known = carry
            where = Where(PRODUCER, tile.expert, tile.first_row, tile.valid_rows, tile.row_tile, tile.column_tile)
            offsets = gather.row_chunks(tokens, tile.valid_rows) if gather else None
            following, work = queue.ahead(turn + 1, known, tokens_of)
            after = queue.known(turn + 2)  # two ahead: its loads, and then its tokens', finish under this tile's copies

            def load_step(k, slot, *_):
                load(refs, where, k, slot)
                if gather:
                    gather.copy(refs.tokens, offsets, slot.lhs, ring.landed, slot.number, k * K_STEP)

            def load_panel(end: RingEnd, panel, slot, *_):
                end.load(refs, where, panel, slot)
                if gather:
                    gather.arrive(ring.landed, slot.number)

            def fill_tile(step, steps: Callable = int):
                last, count = load_step, k_steps
                if isinstance(end, RingEnd):
                    step, *_ = ring.fill(step, steps(k_steps), load_step)
                    last, count = partial(load_panel, end), PANELS
                step, _, found = ring.fill(step, steps(count), last, under=work)
                return step, found

            def steps(count):
                return lax.select(tile.valid_rows > 0, jnp.int32(count), jnp.int32(0))

            if work:  # also where the tile has no rows; static counts would have their last steps unrolled, and spill
                step, following = fill_tile(step, steps)
            elif k_steps < FEW_STEPS:
                step, _ = fill_tile(step, lambda count: -(-tile.valid_rows // TILE_ROWS) * count)
            else:
                step = lax.cond(tile.valid_rows > 0, lambda s: fill_tile(s)[0], lambda s: s, step)
            return turn + 1, step, *following, after

        zero = jnp.int32(0)
        carry: Any = (zero, zero, *queue.first(tokens_of), queue.known(zero + 1))
        lax.while_loop(lambda carry: carry[2][1], produce_tile, carry)

    def consume(refs, ring: Ring, queue: TileQueue, warpgroup):
        def product(slot, carry, accumulator, first):
            own = slot.lhs.at[pl.ds(warpgroup * GROUP_ROWS, GROUP_ROWS)]
            return carry, wgmma(accumulator, own, slot.rhs, first=first, transpose_rhs=transposed_weights)

        def stores(done):
            if not isinstance(end, HeldEnd):
                return []
            held, where = done
            panels = [held[:, column : column + PANEL] for column in range(0, end.columns, PANEL)]
            return [partial(end.store, refs, where, panel, values) for panel, values in enumerate(panels)]

        def left(step, pending):
            """Releases a panel's slot when its copies have left, all but the last `pending` groups."""
            plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
            ring.release(step)

        def last_left(step):
            """The same for the last panel of the tile before, if there is one."""
            pl.when(step > 0)(lambda: left(step - 1, 0))

        def consume_tile(carry):
            turn, step, done, (tile, _) = carry
            first = warpgroup * GROUP_ROWS
            rows = jnp.clip(tile.valid_rows - first, 0, GROUP_ROWS)
            where = Where(warpgroup, tile.expert, tile.first_row + first, rows, tile.row_tile, tile.column_tile)
            known = queue.known(turn + 1)
            take = partial(queue.take, turn + 1, known)

            def run_held(end: HeldEnd, step):
                under = stores(done)
                while len(under) > k_steps:  # those are stored at once
                    under.pop(0)()
                step, accumulator, taken = ring.multiply(step, k_steps, product, under=under, last=take)
                return step, (end.finish(refs, where, accumulator), where), taken

            def run_ring(end: RingEnd, step):
                end_panel = end.begin(refs, where)
                step, accumulator, _ = ring.multiply(step, k_steps, product, under=[partial(last_left, step)])
                for panel in range(PANELS):
                    slot = ring.slot(step)
                    plgpu.barrier_wait(slot.full)
                    end_panel(accumulator, panel, slot)
                    if panel > 0:
                        left(step - 1, 1)
                    step += 1
                return step, (), take()

            run_tile = partial(run_held, end) if isinstance(end, HeldEnd) else partial(run_ring, end)
            step, done, taken = lax.cond(tile.valid_rows > 0, run_tile, lambda s: (s, done, take()), step)
            return turn + 1, step, done, known or taken

        zero, done = jnp.int32(0), ()
        if isinstance(end, HeldEnd):
            nothing = plgpu.layout_cast(jnp.zeros((GROUP_ROWS, end.columns), dtype), plgpu.Layout.WGMMA)
            done = (nothing, Where(warpgroup, zero, zero, zero, zero, zero))
        known = queue.known(zero)
        carry = (zero, zero, done, known or queue.take(zero, known))
        done = lax.while_loop(lambda carry: carry[-1][1], consume_tile, carry)[2]
        for store in stores(done):
            store()

    return launch(
        name,
        _Tile,
        find_tile,
        produce,
        consume,
        tiles=schedule.num_tiles * column_tiles,
        operands={"schedule": schedule.arrays, "used": used, **operands},
        tuning=tuning,
        dtype=dtype,
        gathers=gather is not None,
        buffers=store_buffers(dtype) if isinstance(end, HeldEnd) else None,
        **options,
    )


def tile_panel(refs, where: Where, accumulator, panel: int):
    """64 columns of a tile, plus their part of `refs.bias` `(E, column tiles, 256)` float32 unless that is None."""
    columns = accumulator[:, panel * PANEL : (panel + 1) * PANEL]
    if refs.bias is None:
        return columns
    own = refs.bias.at[where.expert, where.column_tile, pl.ds(panel * PANEL, PANEL)]
    own = plgpu.load(own, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return columns + lax.broadcast_in_dim(own, columns.shape, (1,))


def _round(refs, where: Where, accumulator):
    panels = [tile_panel(refs, where, accumulator, panel) for panel in range(PANELS)]
    return lax.concatenate([panel.astype(refs.rows.dtype) for panel in panels], 1)


def _store(refs, where: Where, panel: int, values):
    store_rows(refs, where, panel, values, refs.rows, where.column_tile * TILE_COLUMNS + panel * PANEL)


ROUNDED_ROWS = HeldEnd(_round, _store)
"""Of a tile that is the only result, `rows`, as it is or with a bias."""
