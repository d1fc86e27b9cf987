"""Products of panels on the tensor cores, whose accumulators are values in registers."""

# pyright: reportCallIssue=false, reportAbstractUsage=false, reportArgumentType=false

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import inline_interpreter as forms
from pallas_kernels.hopper.inline import PANEL, SWIZZLED, as_tiles, ptx, row_tiles
from pallas_kernels.mosaic.interpreter import in_interpreter

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
