"""Rows of experts times the weights of their expert: the walk of the up and down projections and their backward.

A tile is up to 128 rows of one expert times 256 columns of its weights, or 128, and each consumer owns 64 of its rows.
A finished tile is packed to 16 bits in registers, which frees the accumulators; its panels are stored while the next
tile's first k steps run on the tensor cores (`HeldRowMatmul`). Or a tile ends with more operands, which follow its k
steps through the ring (`PanelRowMatmul`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.gather import RowGather
from pallas_kernels.hopper.inline import K_STEP, PANEL, wgmma, zeros
from pallas_kernels.hopper.panels import store_buffers, store_panels, store_through
from pallas_kernels.hopper.tile_kernel import PANELS, TileKernel
from pallas_kernels.hopper.tile_queue import is_dynamic
from pallas_kernels.mosaic.interpreter import is_interpreted
from pallas_kernels.mosaic.row_groups import GROUP_ROWS, ROW_ALIGNMENT, TILE_COLUMNS, TILE_ROWS, TileSchedule
from pallas_kernels.tuning.parameters import TileTuning

FEW_STEPS = 8
"""LLVM unrolls a loop of fewer steps whole, and the producer spills: they get a count of which it knows no limit."""


class RowTile(NamedTuple):
    """A tile of the results: rows of one expert, and a block of columns.

    Attributes:
      expert: whose rows they are.
      row: the first.
      rows: how many are valid, a multiple of 8.
      row_tile: number of the tile in the schedule.
      column_tile: number of the block of columns.
    """

    expert: jax.Array
    row: jax.Array
    rows: jax.Array
    row_tile: jax.Array
    column_tile: jax.Array

    def half(self, warpgroup) -> "RowTile":
        """The 64 rows of a consumer."""
        first = warpgroup * GROUP_ROWS
        rows = jnp.clip(self.rows - first, 0, GROUP_ROWS)
        return self._replace(row=self.row + first, rows=rows)


@dataclass(kw_only=True)
class RowMatmul(TileKernel):
    """Every row of the schedule times the weights of its expert, a block of columns at a time.

    Attributes:
      schedule: the row tiles.
      operands: arrays or tuples of them by name. With `tokens`, `(T, d)` in a tuple, and `row_chunks` `(R,)`, the
        left operand is gathered.
      columns: of a tile, 256 or 128.
      column_tiles: how many blocks of so many columns.
      k_steps: steps of 64 along the contracted dimension.
      load: `(refs, tile, k, slot)`, starts the bulk copies of one k step.
      load_panel: `(refs, tile, panel, slot)`, as many of a panel of the operands that a tile ends with; None for none.
      tuning: slots of the ring, the order of the tiles, and how they are shared out.
      transposed_weights: the weight tile is (columns, k) in shared memory instead of (k, columns) in panels.
      packed: the operands' numbers are pairs of e4m3 along k; the weights must be transposed.
      decoder: the `TileDecoder` of compressed weights, or None.
    """

    schedule: TileSchedule
    operands: Mapping[str, Any]
    columns: int = TILE_COLUMNS
    column_tiles: int
    k_steps: int
    load: Callable
    load_panel: Callable | None = None
    tuning: TileTuning
    transposed_weights: bool = False
    packed: bool = False
    decoder: Any = None

    tile = RowTile

    def __post_init__(self):
        self.dtype = jax.tree.leaves(list(self.operands.values()))[0].dtype
        tokens = self.operands.get("tokens")
        self.gather = None if tokens is None else RowGather(tokens, rows=TILE_ROWS, columns=K_STEP)
        self.num_tiles = self.schedule.num_tiles * self.column_tiles
        # Counted out, a tile without rows would cost as long as it takes to get the next one.
        self.used = self.schedule.count_used() if is_dynamic(self.tuning.shares) else None
        self.operands = {"schedule": self.schedule.arrays, "used": self.used, **self.operands}

    def find(self, refs, number):
        row_tiles = self.schedule.num_tiles if self.used is None else refs.used[0]
        tiles = row_tiles * self.column_tiles
        is_one, number = number < tiles, jnp.clip(number, 0, tiles - 1)
        shape = (row_tiles if self.used is None else jnp.maximum(row_tiles, 1), self.column_tiles)
        place = plgpu.planar_snake(number, shape, self.tuning.minor_dim, self.tuning.tile_width)
        row_tile = jnp.clip(place[0], 0, self.schedule.num_tiles - 1)
        expert, row, rows = (of_tiles[row_tile] for of_tiles in refs.schedule)
        return RowTile(expert, row, rows, row_tile, place[1]), is_one

    def first_tokens(self, refs, tile: RowTile):
        return self.gather.load_chunks(refs.row_chunks, tile.row) if self.gather else ()

    def fill(self, refs, tile: RowTile, tokens, step, ahead, known_after):
        offsets = self.gather.only_valid(tokens, tile.rows) if self.gather else None
        following, find_following = ahead(partial(self.first_tokens, refs))
        after = known_after()  # its loads, and then its tokens', finish under this tile's copies

        def load_step(k, slot, *_):
            self.load(refs, tile, k, slot)
            if self.gather:
                self.gather.copy(refs.tokens, offsets, slot.lhs, refs.landed, slot.number, k * K_STEP)

        def load_panel(load: Callable, panel, slot, *_):
            load(refs, tile, panel, slot)
            if self.gather:
                self.gather.arrive(refs.landed, slot.number)

        def fill_tile(step, steps: Callable = int):
            load, count = load_step, self.k_steps
            if self.load_panel:
                step, *_ = refs.ring.fill(step, steps(count), load)
                load, count = partial(load_panel, self.load_panel), PANELS
            step, _, found = refs.ring.fill(step, steps(count), load, under=find_following)
            return step, found

        # What finds the next tile runs also where this one has no rows. With static counts, the last steps would be
        # unrolled, and spill.
        if find_following:
            step, following = fill_tile(step, lambda n: lax.select(tile.rows > 0, jnp.int32(n), jnp.int32(0)))
        elif self.k_steps < FEW_STEPS:
            step, _ = fill_tile(step, lambda n: -(-tile.rows // TILE_ROWS) * n)
        else:
            step = lax.cond(tile.rows > 0, lambda s: fill_tile(s)[0], lambda s: s, step)
        return step, following, after

    def part(self, refs, tile: RowTile):
        return tile, tile if self.decoder else tile.half(refs.warpgroup)

    def multiply(self, refs, turn, step, held, part: tuple[RowTile, RowTile], take):
        tile, half = part
        run = partial(self.multiply_rows, refs, half, held, take)
        return lax.cond(tile.rows > 0, run, lambda step: (step, held, take()), step)

    def multiply_rows(self, refs, part: RowTile, held, take: Callable, step) -> Any:
        """Does what `multiply` does for a tile with rows; `part` are a consumer's own."""

    def products(self, refs, step, under: Sequence[Callable], last: Callable = lambda: None):
        """A tile's chain of products; see `Ring.multiply`."""

        def product(slot, carry, accumulator, first):
            slot.wait_for_rows()
            own = slot.lhs.at[pl.ds(refs.warpgroup * GROUP_ROWS, GROUP_ROWS)]
            form = {"transpose_rhs": self.transposed_weights, "packed": self.packed}
            return carry, wgmma(accumulator, own, slot.rhs, first=first, **form)

        return refs.ring.multiply(step, self.k_steps, product, under=under, last=last)


@dataclass(kw_only=True)
class HeldRowMatmul(RowMatmul):
    """A row matmul whose tiles are stored under the products of the next.

    Attributes:
      finish: `(refs, part, accumulator) -> held`, `(64, held_columns)` of the operands' dtype, for a consumer's part.
      store: `(refs, part, panel, values)`, stores a panel `(64, 64)` of what was held.
      held_columns: how many are held.
    """

    finish: Callable
    store: Callable
    held_columns: int = TILE_COLUMNS

    def __post_init__(self):
        super().__post_init__()
        self.buffers = store_buffers(self.dtype)

    def nothing_held(self):
        return zeros(self.held_columns, self.dtype), RowTile(*[jnp.int32(0)] * 5)

    def stores(self, refs, turn, held):
        values, part = held
        panels = [values[:, column : column + PANEL] for column in range(0, self.held_columns, PANEL)]
        return [partial(self.store, refs, part, panel, values) for panel, values in enumerate(panels)]

    def multiply_rows(self, refs, part: RowTile, held, take, step):
        under = self.stores(refs, None, held)
        while len(under) > self.k_steps:  # those are stored at once
            under.pop(0)()
        step, accumulator, taken = self.products(refs, step, under, take)
        return step, (self.finish(refs, part, accumulator), part), taken


@dataclass(kw_only=True)
class PanelRowMatmul(RowMatmul):
    """A row matmul whose tiles end with more operands, a panel of 64 columns of them in a slot (`load_panel`).

    Attributes:
      begin: `(refs, part) -> end_panel`, at the start of a tile. `end_panel(accumulator, panel, slot)` may start bulk
        copies from the slot to device memory, one commit group a panel.
    """

    begin: Callable

    def multiply_rows(self, refs, part: RowTile, held, take, step):
        first = step
        end_panel = self.begin(refs, part)
        under = [lambda: pl.when(first > 0)(lambda: self.release(refs, first - 1))]
        step, accumulator, _ = self.products(refs, step, under)
        for panel in range(PANELS):
            slot = refs.ring.slot(step)
            plgpu.barrier_wait(slot.full)
            end_panel(accumulator, panel, slot)
            if panel > 0:
                self.release(refs, step - 1, pending=1)
            step += 1
        return step, held, take()

    def release(self, refs, step, pending: int = 0) -> None:
        """Releases a panel's slot when its copies have left, all but the last `pending` groups."""
        plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
        refs.ring.release(step)


def ragged_copy(buffer, output, part: RowTile, columns) -> None:
    """Starts copies of the valid rows of `buffer` (rows, ...) to `output[part.row :, columns]`.

    One bulk copy, or, where fewer are valid, one for every 8: groups start at multiples of 8 rows.
    """
    all_rows = buffer.shape[0]

    def copy(first, rows):
        target = output.at[pl.ds(part.row + first, rows), columns]
        plgpu.copy_smem_to_gmem(buffer.at[pl.ds(first, rows)], target, commit_group=False)

    @pl.when(part.rows == all_rows)
    def _():
        copy(0, all_rows)

    @pl.when(part.rows < all_rows)
    def _():
        @pl.loop(0, part.rows // ROW_ALIGNMENT)
        def _(i):
            copy(pl.multiple_of(i * ROW_ALIGNMENT, ROW_ALIGNMENT), ROW_ALIGNMENT)

        if is_interpreted():  # it counts copies, not groups of them: what is not one copy must not be waited for so
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def store_rows(refs, part: RowTile, panel: int, values: jax.Array, output, column) -> None:
    """Stores the valid rows of a panel's `values` (64, 64) at `output[part.row :, column :]`."""
    with store_through(refs.buffers, refs.warpgroup, panel, partial(store_panels, values=values)) as buffer:
        ragged_copy(buffer, output, part, pl.ds(column, PANEL))


def tile_panel(refs, part: RowTile, accumulator, panel: int):
    """64 columns of a tile, `decoded`, plus their part of `refs.bias` `(E, column tiles, columns)` float32, if any."""
    columns = accumulator[:, panel * PANEL : (panel + 1) * PANEL]
    columns = decoded(refs, part, columns, panel * PANEL)
    if refs.bias is not None:
        columns = columns + of_own_columns(refs.bias, part, panel * PANEL, columns.shape)
    return columns


def decoded(refs, part: RowTile, columns, first: int):
    """Columns of a tile, from its column `first` on, times `refs.scales`, if the operands have some.

    Those are of rows `(R,)`, and of columns `(E, column tiles, columns)`; float32 both.
    """
    if refs.scales is None:
        return columns
    of_rows, of_columns = refs.scales
    columns = columns * of_own_rows(of_rows, part, columns.shape)
    return columns * of_own_columns(of_columns, part, first, columns.shape)


def of_own_rows(values, part: RowTile, shape: tuple[int, int]) -> jax.Array:
    """A consumer's part of `values` `(R,)`, in each column."""
    return lax.broadcast_in_dim(of_rows(values, part), shape, (0,))


def of_rows(values, part: RowTile) -> jax.Array:
    """A consumer's part of `values` `(R,)`."""
    own = values.at[pl.ds(part.row, GROUP_ROWS)]
    return plgpu.load(own, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def of_own_columns(values, part: RowTile, first: int, shape: tuple[int, int]) -> jax.Array:
    """The tile's part of `values` `(E, column tiles, columns)`, from its column `first` on, in each row."""
    own = values.at[part.expert, part.column_tile, pl.ds(first, shape[1])]
    own = plgpu.load(own, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return lax.broadcast_in_dim(own, shape, (1,))


def by_tiles(arrays: Sequence[jax.Array], column_tiles: int, columns: int = TILE_COLUMNS) -> jax.Array:
    """Numbers of columns, `(E, n)`, as `(E, column tiles, columns)`: side by side, as columns of several arrays are."""
    width = columns // len(arrays)
    padded = [jnp.pad(a.astype(jnp.float32), ((0, 0), (0, column_tiles * width - a.shape[1]))) for a in arrays]
    return jnp.concatenate([a.reshape(-1, column_tiles, width) for a in padded], axis=2)
