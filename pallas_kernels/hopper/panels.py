"""Panels: multiplied on the tensor cores, read and written by the threads of a warpgroup, and stored through.

Accumulators are values in registers.
"""

# pyright: reportCallIssue=false, reportAbstractUsage=false, reportArgumentType=false

from contextlib import contextmanager

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.hopper import inline_interpreter as forms
from pallas_kernels.hopper.inline import (
    CHUNK_BYTES,
    PANEL,
    PANEL_BYTES,
    SCALAR,
    SWIZZLED,
    as_tiles,
    c32,
    int_type,
    ptx,
    row_tiles,
    scalar,
    shared_address,
    thread_index,
)
from pallas_kernels.mosaic.interpreter import in_interpreter
from pallas_kernels.mosaic.row_groups import GROUP_ROWS

ACCUMULATOR = plgpu.Layout._WGMMA_ACC_32BIT


@in_interpreter(forms.wgmma)
def wgmma(accumulator, lhs, rhs, *, first=False, transpose_lhs=False, transpose_rhs=False):
    """`accumulator + lhs · rhs`, asynchronous, one commit group; `first` starts the chain.

    The accumulator is a value in registers, so that a loop can carry it while other values are stored.

    Args:
      accumulator: `(64, columns)` float32.
      lhs: a panel (64, 64), the transpose of the left operand if `transpose_lhs`.
      rhs: panels (64, 64) side by side in the columns, one after the other in shared memory; or, if `transpose_rhs`,
        the transpose of the right operand as a panel (columns, 64).
      first: whether there is no wgmma before it.
      transpose_lhs: see `lhs`.
      transpose_rhs: see `rhs`.
    """
    result = plgpu.ShapeDtypeStruct(accumulator.shape, jnp.float32, layout=ACCUMULATOR)

    @plgpu.inline_mgpu(arg_types=(ACCUMULATOR, plgpu.RefType(SWIZZLED), plgpu.RefType(SWIZZLED)), return_type=result)
    def run(ctx, accumulator, lhs, rhs):
        def transpose(panel):
            return utils.memref_transpose(row_tiles(panel), (1, 0, 3, 2))

        lhs = transpose(lhs) if transpose_lhs else row_tiles(lhs)
        rhs = transpose(rhs) if transpose_rhs else as_tiles(rhs, 1, accumulator.shape[1] // PANEL)
        value = mgpu.WGMMAAccumulator(_value=accumulator, _original_layout=accumulator.layout, _sync=first)
        if not first:
            ptx("wgmma.fence.sync.aligned;")
        out = mgpu.wgmma(value, lhs, rhs, swizzle=128)
        ptx("wgmma.commit_group.sync.aligned;")
        return out._value

    return run(accumulator, lhs, rhs)


@in_interpreter(forms.finish_wgmma)
def finish_wgmma(accumulator):
    """Waits for every wgmma and returns the accumulator as an ordinary value."""
    result = plgpu.ShapeDtypeStruct(accumulator.shape, jnp.float32, layout=ACCUMULATOR)

    @plgpu.inline_mgpu(arg_types=(ACCUMULATOR,), return_type=result)
    def run(ctx, accumulator):
        ptx("wgmma.wait_group.sync.aligned 0;")
        return mgpu.fragmented_array.optimization_barrier(accumulator)

    return plgpu.layout_cast(run(accumulator), plgpu.Layout.WGMMA)


@in_interpreter(forms.zero_accumulator)
def zero_accumulator(rows, columns) -> jax.Array:
    """Where a chain of `wgmma` starts."""
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), ACCUMULATOR)


@in_interpreter(forms.zero_rows)
def zero_rows(panel, panels, first_row):
    """Zeroes rows `first_row` to 64 of `panels` panels (64, 64), for wgmma issued after this by any warpgroup."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED), SCALAR))
    def run(ctx, panel, first_row):
        row, half = arith.shrui(thread_index(), c32(1)), arith.andi(thread_index(), c32(1))
        wanted = arith.extui(int_type(32), arith.cmpi(arith.CmpIPredicate.sge, row, scalar(first_row)))
        start = shared_address(panel, arith.addi(arith.muli(row, c32(128)), arith.muli(half, c32(64))))
        for i in range(panels * 4):
            ptx(
                "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p st.shared.v4.b32 [$0], {0, 0, 0, 0}; }",
                arith.addi(start, c32(i // 4 * PANEL_BYTES + i % 4 * CHUNK_BYTES)),
                wanted,
                constraints="r,r",
            )
        ptx("fence.proxy.async.shared::cta;")
        utils.warpgroup_barrier()

    run(panel, first_row)


def _matrix_address(panel, first_column):
    """Address of the row of 16 bytes that this lane names to ldmatrix and stmatrix, for 16 columns of a panel (64, 64).

    A warp's 16 rows of them are four matrices (8, 8), in the order of the registers of a wgmma result.
    """
    lane, warp = arith.andi(thread_index(), c32(31)), arith.shrui(thread_index(), c32(5))
    row = arith.addi(arith.muli(warp, c32(16)), arith.andi(lane, c32(15)))
    swizzled = arith.xori(arith.shrui(lane, c32(4)), arith.andi(lane, c32(7)))
    chunk = arith.xori(swizzled, c32(first_column // 8))
    return shared_address(panel, arith.addi(arith.muli(row, c32(128)), arith.muli(chunk, c32(CHUNK_BYTES))))


@in_interpreter(forms.load_columns)
def load_columns(panel, first_column: int):
    """Columns `first_column` to `first_column + 16` of a panel (64, 64) of 16-bit values, in registers."""
    result = plgpu.ShapeDtypeStruct((PANEL, 16), panel.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED),), return_type=result)
    def run(ctx, panel):
        pair = ir.VectorType.get((2,), ir.MemRefType(panel.type).element_type)
        loaded = utils.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
            _matrix_address(panel, first_column),
            result_types=[int_type(32)] * 4,
            has_side_effects=True,
        )
        registers = np.array([llvm.bitcast(pair, r) for r in loaded], dtype=object)
        shape = mgpu.WGMMA_LAYOUT.registers_shape((PANEL, 16))
        return mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return run(panel)


@in_interpreter(forms.store_columns)
def store_columns(panel, first_column: int, values) -> None:
    """Writes `values` (64, 16), 16-bit, to columns of a panel (64, 64)."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED), plgpu.Layout.WGMMA))
    def run(ctx, panel, values):
        ptx(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
            _matrix_address(panel, first_column),
            *(llvm.bitcast(int_type(32), r) for r in values.registers.flat),
            constraints="r,r,r,r,r",
        )

    run(panel, values)


@in_interpreter(forms.store_panels)
def store_panels(panels, values, *, transposed=False):
    """Writes `values` (rows, columns), or their transpose, to panels (rows, 128 bytes), one after the other."""
    layout = plgpu.Layout.WGMMA_TRANSPOSED if transposed else plgpu.Layout.WGMMA
    rows, columns = values.shape[::-1] if transposed else values.shape
    width = panels.shape[-1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED), layout))
    def run(ctx, panels, values):
        tiles = as_tiles(panels, columns // width, rows // 8)  # panel, row tile, row, column
        order = (0, 1, 3, 2) if transposed else (1, 0, 2, 3)
        values.store_tiled(utils.memref_transpose(tiles, order), swizzle=128)

    run(panels, plgpu.layout_cast(values, layout))


@in_interpreter(forms.end_ragged_copy)
def end_ragged_copy():
    """Nothing, on a GPU: it counts stores under way by groups of copies, of which one may have none or several."""


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
