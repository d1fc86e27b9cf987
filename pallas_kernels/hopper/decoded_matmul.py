"""Rows of experts times compressed weights: what `row_matmul` does, where consumers decode.

A consumer has every other block of 64 of a tile's columns, and all of its rows: what `decoding` gives is the left
operand, and results are the transpose of such blocks. Tiles are stored at their end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.decoding import TileDecoder
from pallas_kernels.hopper.inline import (
    K_STEP,
    PANEL,
    interleaved,
    read_values,
    store_buffers,
    store_interleaved,
    store_through,
    wgmma_of_values,
    write_values,
    zeros,
)
from pallas_kernels.hopper.row_matmul import PanelRowMatmul, RowMatmul, RowTile, ragged_copy
from pallas_kernels.hopper.tile_kernel import PANELS
from pallas_kernels.mosaic.row_groups import TILE_COLUMNS, TILE_ROWS, paired
from pallas_kernels.tuning.parameters import NARROW_COLUMNS, STORE_BYTES, TileTuning, most_stages

ROWS_TOGETHER = 32
"""Of a block, that are worked on together: what the registers have room for in addition to a tile."""


@dataclass(kw_only=True)
class DecodedRowMatmul(RowMatmul):
    """A row matmul of compressed weights, whose tiles are stored at their end.

    A tile has 256 columns and 128 rows, or 128 columns and 256 rows: then each number is decoded for twice as many.

    Attributes:
      store: `(refs, part, blocks, number, turn) -> turn`, stores block `number` of those that a weight has in a tile,
        with `store_block`, from that turn on. For each of the weights side by side there is a function `(first, count)`
        in `blocks`; it returns so many rows of the part from the first on, `(64, count)` in float32, plus their part of
        `refs.bias` (`of_blocks`), if any.
    """

    store: Callable

    def __post_init__(self):
        self.columns, self.rows = self.decoder.blocks * PANEL, TILE_ROWS * 2 // self.decoder.own_blocks
        if self.rows > TILE_ROWS:
            self.schedule = paired(self.schedule)
            if "row_chunks" in self.operands:  # a tile's are read whole
                chunks = jnp.pad(self.operands["row_chunks"], (0, TILE_ROWS), constant_values=-1)
                self.operands = {**self.operands, "row_chunks": chunks}
        super().__post_init__()
        self.buffers = store_buffers(self.dtype, rows=TILE_ROWS)
        if self.exchanges:
            self.scratch = {"exchanged": plgpu.Barrier(num_arrivals=2)}

    @property
    def exchanges(self) -> bool:
        """Whether consumers have different weights of those side by side, and exchange halves of their rows."""
        return self.decoder.side_by_side > self.decoder.own_blocks

    @property
    def stages(self):
        slot = self.decoder.slot_bytes + (self.rows - TILE_ROWS) * K_STEP * 2
        return min(4, most_stages(0, slot, stores=2 * STORE_BYTES))  # a power of two: see `Ring`

    def right_operands(self):
        return None

    def part(self, refs, tile: RowTile):
        return tile, tile

    def multiply_rows(self, refs, part: RowTile, held, take, step):
        def multiply(halves: int, step):
            return decoded_products(self, refs, step, halves=halves, last=take)

        if self.rows == TILE_ROWS:
            step, accumulators, taken = multiply(1, step)
            stored = [(part, [own], 2 * i + refs.warpgroup) for i, own in enumerate(accumulators)]
            if self.decoder.side_by_side == 2:
                stored = [(part, accumulators, refs.warpgroup)]
        else:

            def one_half(step):
                step, (own,), taken = multiply(1, step)
                return step, (own, zeros(TILE_ROWS)), taken

            both = partial(multiply, 2)
            step, accumulators, taken = lax.cond(part.rows > TILE_ROWS, both, one_half, step)
            parts = [part.half(i, TILE_ROWS) for i in range(2)]
            stored = [(half, [own], refs.warpgroup) for half, own in zip(parts, accumulators, strict=True)]
            if self.exchanges:
                stored = [(part.half(refs.warpgroup, TILE_ROWS), self.exchanged(refs, accumulators), 0)]
        turn = 0
        for rows, own, number in stored:
            blocks = [partial(self.block, refs, rows, values, i, number) for i, values in enumerate(own)]
            turn = self.store(refs, rows, blocks, number, turn)
        return step, held, taken

    def exchanged(self, refs, halves) -> list[jax.Array]:
        """A consumer's half of the rows, of both weights, from its weight's halves of rows."""
        is_first = refs.warpgroup == 0
        own, other = (refs.buffers.at[pl.ds(2 * w, 2)] for w in (refs.warpgroup, 1 - refs.warpgroup))
        given, kept = (lax.select(is_first, *pair) for pair in (halves[::-1], halves))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        write_values(own, given)
        self.meet(refs)
        found = read_values(other, given.shape)
        self.meet(refs)
        return [lax.select(is_first, *pair) for pair in ((kept, found), (found, kept))]

    def meet(self, refs) -> None:
        """Waits until both consumers are here."""
        plgpu.barrier_arrive(refs.exchanged)
        plgpu.barrier_wait(refs.exchanged)

    def block(self, refs, part: RowTile, values, weight: int, number, first: int, count: int) -> jax.Array:
        """Rows of a block, plus their bias."""
        values = values[:, first : first + count]
        if refs.bias is None:
            return values
        bias = refs.bias.at[part.expert, part.column_tile, weight, number]
        bias = plgpu.load(bias, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        return values + lax.broadcast_in_dim(bias, values.shape, (0,))


def decoder_for(weight, num_rows: int, tuning: TileTuning, **form) -> TileDecoder:
    """The decoder of one of a product's weights, for tiles of so many columns as the tuning says.

    If that leaves it open, 128 where an expert has more rows than the 128 of a wide tile, on average.
    """
    rows_each = num_rows // weight.shape[0]
    columns = tuning.columns or (NARROW_COLUMNS if rows_each > TILE_ROWS else TILE_COLUMNS)
    return TileDecoder(weight, columns=columns, **form)


def decoded_products(
    kernel: RowMatmul, refs, step, *, halves: int = 1, under: Sequence[Callable] = (), last: Callable = lambda: None
):
    """A tile's chain of products; see `Ring.multiply`.

    Its parts are (64, 128): a consumer's blocks, transposed, of so many `halves` of 128 rows each.
    """
    decoder = kernel.decoder
    assert decoder

    def product(slot, carry, accumulators, first):
        accumulators = [*accumulators]
        for own in range(decoder.own_blocks):
            weights = decoder.decode(refs, slot, own)
            if own == 0:
                slot.wait_for_rows()
            for half in range(halves):
                rows, i = slot.lhs.at[pl.ds(half * TILE_ROWS, TILE_ROWS)], own * halves + half
                accumulators[i] = wgmma_of_values(accumulators[i], weights, rows, first=first)
            plgpu.wgmma_wait(halves)  # for the registers that are written next
        return carry, tuple(accumulators)

    parts = decoder.own_blocks * halves
    return refs.ring.multiply(
        step, kernel.k_steps, product, under=under, last=last, parts=(TILE_ROWS,) * parts, groups=halves
    )


def of_blocks(values: jax.Array, side_by_side: int) -> jax.Array:
    """Numbers of columns `by_tiles`, by `(E, column tiles, weights side by side, blocks, 64)`, `interleaved`."""
    return interleaved(values.reshape(*values.shape[:2], side_by_side, -1, PANEL).T).T


def store_block(refs, part: RowTile, turn: int, values: Callable, output, column) -> None:
    """Stores the valid rows of a block of 64 columns at `output[part.row :, column :]`.

    Those are what `values(first, count)` returns of so many rows, `(64, count)`, of the output's dtype.
    """

    def write(buffer):
        for first in range(0, TILE_ROWS, ROWS_TOGETHER):
            store_interleaved(buffer, first, values(first, ROWS_TOGETHER))

    with store_through(refs.buffers, refs.warpgroup, turn, write) as buffer:
        ragged_copy(buffer, output, part, pl.ds(column, PANEL))


@dataclass(kw_only=True)
class DecodedPanelRowMatmul(PanelRowMatmul):
    """A `PanelRowMatmul` of compressed weights. `end_panel` is called by the consumer that has the panel's block.

    `refs.own_row_weights` `(consumers, rows)` is memory for it.
    """

    def __post_init__(self):
        super().__post_init__()
        self.scratch = {"own_row_weights": plgpu.SMEM((2, TILE_ROWS), jnp.float32)}

    @property
    def stages(self):
        return min(self.tuning.stages, most_stages(self.columns, self.decoder.slot_bytes, stores=0))

    def part(self, refs, tile: RowTile):
        return tile, tile

    def nothing_held(self):
        return jnp.int32(0)  # steps, after which a consumer's last slot is still to be released

    def stores(self, refs, turn, held):
        return [lambda: pl.when(held > 0)(lambda: self.release(refs, held - 2 + refs.warpgroup))]

    def multiply_rows(self, refs, part: RowTile, held, take, step):
        end_panel = self.begin(refs, part)
        step, accumulators, _ = decoded_products(self, refs, step, under=self.stores(refs, None, held))
        for panel in range(PANELS):
            slot, own = refs.ring.slot(step), refs.warpgroup == panel % 2
            plgpu.barrier_wait(slot.full)

            @pl.when(own)
            def _(panel=panel, slot=slot, step=step):
                end_panel(accumulators[panel // 2], panel, slot)
                if panel > 1:
                    self.release(refs, step - 2, pending=1)

            pl.when(~own)(lambda step=step: refs.ring.release(step))
            step += 1
        return step, step, take()
