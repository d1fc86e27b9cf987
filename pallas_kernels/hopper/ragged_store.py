"""Stores of a row tile whose last rows belong to the next expert."""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.inline import PANEL, SWIZZLED, end_ragged_copy, store_panels
from pallas_kernels.mosaic.row_groups import GROUP_ROWS, ROW_ALIGNMENT, TILE_COLUMNS, Where


def ragged_copy(buffer, output, where: Where, columns) -> None:
    """Starts copies of the valid rows of `buffer` (64, ...) to `output[where.row :, columns]`.

    One bulk copy of 64 rows, or, where fewer are valid, one for every 8: groups start at multiples of 8 rows.
    """

    def copy(first, rows):
        target = output.at[pl.ds(where.row + first, rows), columns]
        plgpu.copy_smem_to_gmem(buffer.at[pl.ds(first, rows)], target, commit_group=False)

    @pl.when(where.rows == GROUP_ROWS)
    def _():
        copy(0, GROUP_ROWS)

    @pl.when(where.rows < GROUP_ROWS)
    def _():
        @pl.loop(0, where.rows // ROW_ALIGNMENT)
        def _(i):
            copy(pl.multiple_of(i * ROW_ALIGNMENT, ROW_ALIGNMENT), ROW_ALIGNMENT)

        end_ragged_copy()


def store_rows(values: jax.Array, buffer, output, where: Where, column) -> None:
    """Stores the valid rows of `values` (64, 64) at `output[where.row :, column :]` through `buffer`.

    Two buffers take turns: the store before last must have left shared memory.
    """
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    store_panels(buffer, values)
    plgpu.commit_smem()
    ragged_copy(buffer, output, where, pl.ds(column, values.shape[1]))
    plgpu.commit_smem_to_gmem_group()


def store_buffers(dtype):
    """Two buffers for `store_rows` per consumer warpgroup."""
    return plgpu.SMEM((4, GROUP_ROWS, PANEL), dtype, transforms=SWIZZLED)


def store_buffer(buffers, panel: int, where: Where):
    """The buffer whose turn it is."""
    return buffers.at[where.warpgroup * 2 + panel % 2]


def packed_tile(dtype, columns: int = TILE_COLUMNS):
    """What `pack` returns; or so many columns of it."""
    return plgpu.ShapeDtypeStruct((GROUP_ROWS, columns), dtype, layout=plgpu.Layout.WGMMA)


def pack(accumulator, where, inputs, outputs, scratch):
    """Ends a tile by rounding it."""
    return accumulator.astype(outputs[0].dtype)


def store_packed(packed, panel, where, inputs, outputs, scratch):
    """Stores 64 columns of a tile that is the only output as it is."""
    columns = packed[:, panel * PANEL : (panel + 1) * PANEL]
    column = where.column_tile * TILE_COLUMNS + panel * PANEL
    store_rows(columns, store_buffer(scratch[0], panel, where), outputs[0], where, column)
