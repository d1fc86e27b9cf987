"""Stores of results through shared memory, and of a row tile whose last rows belong to the next expert."""

from contextlib import contextmanager

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.inline import PANEL, SWIZZLED
from pallas_kernels.hopper.stores import end_ragged_copy, store_panels
from pallas_kernels.mosaic.row_groups import GROUP_ROWS, ROW_ALIGNMENT, Where


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


def store_buffers(dtype, columns: int = PANEL):
    """Two buffers for `store_through` per consumer warpgroup."""
    return plgpu.SMEM((4, GROUP_ROWS, columns), dtype, transforms=SWIZZLED)


@contextmanager
def store_through(buffers, warpgroup, turn: int, values: jax.Array, *, transposed=False):
    """A buffer with `values` or their transpose, for the copies that are started inside.

    A warpgroup's two buffers take turns: the store before last must have left shared memory.
    """
    buffer = buffers.at[warpgroup * 2 + turn % 2]
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    store_panels(buffer, values, transposed=transposed)
    plgpu.commit_smem()
    yield buffer
    plgpu.commit_smem_to_gmem_group()


def store_rows(refs, where: Where, panel: int, values: jax.Array, output, column) -> None:
    """Stores the valid rows of a panel's `values` (64, 64) at `output[where.row :, column :]`."""
    with store_through(refs.buffers, where.warpgroup, panel, values) as buffer:
        ragged_copy(buffer, output, where, pl.ds(column, PANEL))
