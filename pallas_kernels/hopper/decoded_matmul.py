"""Rows of experts times compressed weights: what `row_matmul` does, where consumers decode.

A consumer has every other block of 64 of a tile's columns, and all of its rows: what `decoding` gives is the transpose
of such blocks. Tiles are stored at their end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.decoding import OWN_BLOCKS
from pallas_kernels.hopper.inline import ACCUMULATOR, PANEL, finish_wgmma, wgmma_of_values, zeros
from pallas_kernels.hopper.panels import interleaved, store_buffers, store_interleaved, store_through
from pallas_kernels.hopper.row_matmul import PanelRowMatmul, RowMatmul, RowTile, ragged_copy
from pallas_kernels.mosaic.row_groups import TILE_ROWS
from pallas_kernels.tuning.parameters import STORE_BYTES, most_stages

ROWS_TOGETHER = 32
"""Of a block, that are worked on together: what the registers have room for in addition to a tile."""


@dataclass(kw_only=True)
class DecodedRowMatmul(RowMatmul):
    """A row matmul of compressed weights, whose tiles are stored at their end.

    A consumer has every other block of 64 of a tile's columns, of all of its rows; see `decoding`.

    Attributes:
      store: `(refs, tile, blocks)`, stores a consumer's blocks with `store_block`. Each is a function `(first, count)`,
        which returns so many rows from the first on, `(64, count)` in float32, plus their part of `refs.bias`
        (`of_blocks`), if any.
    """

    store: Callable

    shifts = True

    def __post_init__(self):
        super().__post_init__()
        self.buffers = store_buffers(self.dtype, rows=TILE_ROWS)

    @property
    def stages(self):
        return min(4, most_stages(0, self.decoder.slot_bytes, stores=2 * STORE_BYTES))

    def right_operands(self):
        return None

    def multiply_rows(self, refs, part: RowTile, held, take, step):
        step, accumulators, taken = decoded_products(self, refs, step, last=take)

        def block(own: int, first: int, count: int):
            values = accumulators[own][:, first : first + count]
            if refs.bias is None:
                return values
            bias = refs.bias.at[part.expert, part.column_tile, own, refs.warpgroup]
            bias = plgpu.load(bias, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            return values + lax.broadcast_in_dim(bias, values.shape, (0,))

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # its buffers' turns begin anew
        self.store(refs, part, [partial(block, own) for own in range(OWN_BLOCKS)])
        return step, held, taken


def decoded_products(kernel: RowMatmul, refs, step, under: Callable = lambda: None, last: Callable = lambda: None):
    """A tile's chain of products over the slots of its k steps, from `step` on.

    A block is decoded under the product of the one before, and its codes are loaded one block earlier still: there are
    too few warps to hide what a load takes. `under` is called under the first product, and `last` under the last.
    Returns the step after the last, a consumer's blocks, (64, 128) in float32, transposed, and what `last` returned.
    """
    ring, decoder = refs.ring, kernel.decoder

    def load_first(step):
        slot = ring.slot(step)
        plgpu.barrier_wait(slot.full)
        return decoder.load(refs, slot, 0)

    def multiply(step, loaded, accumulators, *, first: bool = False, final: bool = False):
        slot, accumulators = ring.slot(step), [*accumulators]
        for own in range(OWN_BLOCKS):
            following = loaded
            if own + 1 < OWN_BLOCKS:
                following = decoder.load(refs, slot, own + 1)
            elif not final:
                following = load_first(step + 1)
            weights, loaded = decoder.decode(refs, loaded), following
            if own == 0:
                slot.wait_for_rows()
            accumulators[own] = wgmma_of_values(accumulators[own], weights, slot.lhs, first=first)
            plgpu.wgmma_wait(1)  # for the registers that are written next
            if own == 0:
                under() if first else ring.release(step - 1)
        return step + 1, loaded, tuple(accumulators)

    steps = kernel.k_steps
    products = step, load_first(step), (zeros(TILE_ROWS, layout=ACCUMULATOR),) * OWN_BLOCKS
    products = multiply(*products, first=True, final=steps == 1)
    if steps > 1:
        products = lax.fori_loop(0, steps - 2, lambda _, p: multiply(*p), products)
        products = multiply(*products, final=True)
    step, _, accumulators = products
    found = last()
    accumulators = tuple(map(finish_wgmma, accumulators))
    ring.release(step - 1)
    return step, accumulators, found


def of_blocks(values: jax.Array) -> jax.Array:
    """Numbers of columns `by_tiles`, as consumers have them: `(E, column tiles, own blocks, consumers, 64)`."""
    blocks = values.reshape(*values.shape[:2], OWN_BLOCKS, 2, PANEL)
    return interleaved(blocks.T).T


def store_block(refs, part: RowTile, turn: int, values: Callable, output, column) -> None:
    """Stores the valid rows of a block of 64 columns at `output[part.row :, column :]`.

    Those are what `values(first, count)` returns of so many rows, `(64, count)`, in the output's dtype.
    """

    def write(buffer):
        for first in range(0, TILE_ROWS, ROWS_TOGETHER):
            store_interleaved(buffer, first, values(first, ROWS_TOGETHER).astype(output.dtype))

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

    def nothing_held(self):
        return jnp.int32(0)  # steps, of which the second consumer has not released the last

    def stores(self, refs, turn, held):
        return [lambda: pl.when((held > 0) & (refs.warpgroup == 1))(lambda: self.release(refs, held - 1))]

    def multiply_rows(self, refs, part: RowTile, held, take, step):
        end_panel = self.begin(refs, part)
        (release_last,) = self.stores(refs, None, held)
        step, accumulators, _ = decoded_products(self, refs, step, release_last)

        def pass_on(step):
            plgpu.barrier_wait(refs.ring.slot(step).full)
            refs.ring.release(step)

        def end_own(own, carry):
            """Of every two panels a consumer ends one, of the first block that is left."""
            step, (block, *others) = carry
            pl.when(refs.warpgroup == 1)(partial(pass_on, step))
            mine = step + refs.warpgroup
            slot = refs.ring.slot(mine)
            plgpu.barrier_wait(slot.full)
            end_panel(block, 2 * own + refs.warpgroup, slot)
            pl.when(refs.warpgroup == 0)(partial(pass_on, step + 1))
            pl.when((refs.warpgroup == 0) | (own + 1 < OWN_BLOCKS))(partial(self.release, refs, mine))
            return step + 2, (*others, block)

        # A loop, since code for each panel does not stay in the instruction cache from tile to tile.
        step, _ = lax.fori_loop(0, OWN_BLOCKS, end_own, (step, accumulators))
        return step, step, take()
