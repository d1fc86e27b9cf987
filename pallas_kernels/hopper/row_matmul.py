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
from pallas_kernels.hopper.launch import PRODUCER, Share, launch
from pallas_kernels.hopper.ragged_store import store_buffers, store_rows
from pallas_kernels.hopper.ring import PANELS, Ring
from pallas_kernels.hopper.wgmma import wgmma
from pallas_kernels.mosaic.row_groups import GROUP_ROWS, TILE_COLUMNS, TILE_ROWS, TileSchedule, Where
from pallas_kernels.tuning.parameters import TileTuning


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
      tuning: slots of the ring, and the order of the tiles.
      options: of `launch`: `results`, `copies` and others.
    """
    dtype = jax.tree.leaves(list(operands.values()))[0].dtype
    gather = RowGather(operands["tokens"], rows=TILE_ROWS, columns=K_STEP) if "tokens" in operands else None

    def place_of(share: Share, i):
        """Row and column tile of a block's turn `i`."""
        shape = (schedule.num_tiles, column_tiles)
        return plgpu.planar_snake(share.tile(i), shape, tuning.minor_dim, tuning.tile_width)

    def rows_of(refs, share: Share, i) -> TileSchedule:
        """Expert, first row and valid rows; past the end the last tile is repeated, its values are not used."""
        row_tile = jnp.clip(place_of(share, jnp.minimum(i, share.turns - 1))[0], 0, schedule.num_tiles - 1)
        return TileSchedule(*(of_tiles[row_tile] for of_tiles in refs.schedule))

    def produce(refs, ring: Ring, share: Share):
        def tokens_of(tile):
            return gather.load_tokens(refs.token_indices, tile.first_row) if gather else ()

        def produce_tile(i, carry):
            step, tokens, tile, following = carry
            row_tile, column_tile = place_of(share, i)
            where = Where(PRODUCER, tile.expert, tile.first_row, tile.valid_rows, row_tile, column_tile)

            def run(step):
                offsets = gather.row_chunks(tokens, tile.valid_rows) if gather else None

                def load_step(k, slot, _):
                    load(refs, where, k, slot)
                    if gather:
                        gather.copy(refs.tokens, offsets, slot.lhs, ring.landed, slot.number, k * K_STEP)

                def load_panel(end: RingEnd, panel, slot, _):
                    end.load(refs, where, panel, slot)
                    if gather:
                        gather.arrive(ring.landed, slot.number)

                step, _ = ring.fill(step, k_steps, load_step)
                return ring.fill(step, PANELS, partial(load_panel, end))[0] if isinstance(end, RingEnd) else step

            following_tokens = tokens_of(following)  # a tile ahead: the loads finish under this tile's copies
            after = rows_of(refs, share, i + 2)
            return lax.cond(tile.valid_rows > 0, run, lambda s: s, step), following_tokens, following, after

        first = rows_of(refs, share, jnp.int32(0))
        carry = (jnp.int32(0), tokens_of(first), first, rows_of(refs, share, jnp.int32(1)))
        lax.fori_loop(0, share.turns, produce_tile, carry)

    def consume(refs, ring: Ring, share: Share, warpgroup):
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

        def consume_tile(i, carry):
            step, done, tile = carry
            row_tile, column_tile = place_of(share, i)
            first = warpgroup * GROUP_ROWS
            rows = jnp.clip(tile.valid_rows - first, 0, GROUP_ROWS)
            where = Where(warpgroup, tile.expert, tile.first_row + first, rows, row_tile, column_tile)

            def run_held(end: HeldEnd, step):
                under = stores(done)
                while len(under) > k_steps:  # those are stored at once
                    under.pop(0)()
                step, accumulator = ring.multiply(step, k_steps, product, under=under)
                return step, (end.finish(refs, where, accumulator), where)

            def run_ring(end: RingEnd, step):
                end_panel = end.begin(refs, where)
                step, accumulator = ring.multiply(step, k_steps, product, under=[partial(last_left, step)])
                for panel in range(PANELS):
                    slot = ring.slot(step)
                    plgpu.barrier_wait(slot.full)
                    end_panel(accumulator, panel, slot)
                    if panel > 0:
                        left(step - 1, 1)
                    step += 1
                return step, ()

            following = rows_of(refs, share, i + 1)
            run = partial(run_held, end) if isinstance(end, HeldEnd) else partial(run_ring, end)
            return *lax.cond(tile.valid_rows > 0, run, lambda s: (s, done), step), following

        zero, done = jnp.int32(0), ()
        if isinstance(end, HeldEnd):
            nothing = plgpu.layout_cast(jnp.zeros((GROUP_ROWS, end.columns), dtype), plgpu.Layout.WGMMA)
            done = (nothing, Where(warpgroup, zero, zero, zero, zero, zero))
        _, done, _ = lax.fori_loop(0, share.turns, consume_tile, (zero, done, rows_of(refs, share, zero)))
        for store in stores(done):
            store()

    return launch(
        name,
        produce,
        consume,
        tiles=schedule.num_tiles * column_tiles,
        operands={"schedule": schedule, **operands},
        stages=tuning.stages,
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
