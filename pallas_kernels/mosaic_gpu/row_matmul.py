"""The row kernels' common skeleton: tiles of rows of one expert times a block of that expert's weight columns.

One persistent block per SM walks over (row tile, column tile) pairs. Warpgroup 2 produces operands, k step by k step,
into a ring of shared-memory slots. Warpgroups 0 and 1 own 64 rows each and multiply, one wgmma chain of 64 x 256 a k
step. A finished tile is packed to 16 bits in registers, which frees the accumulators; its chunks are stored while the
next tile's first k steps run on the tensor cores.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import inline
from pallas_kernels.mosaic_gpu.inline import K_STEP, PANEL_TILES, ROW_TILES, RowGather
from pallas_kernels.mosaic_gpu.row_groups import GROUP_ROWS, TILE_COLUMNS, TILE_ROWS, TileSchedule, Where

NUM_SMS = 132
# setmaxnreg shares out what the launch gave the block, 168 registers a thread; asking for more hangs.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 72, 216


class RowMatmul(NamedTuple):
    """What distinguishes one row kernel from another.

    Attributes:
      name: of the kernel in profiles.
      inputs: arrays of the kernel.
      outputs: shapes and dtypes of its results.
      num_column_tiles: how many blocks of 256 columns.
      k_steps: steps of 64 along the contracted dimension.
      gathers: whether the left operand's rows are gathered: then the inputs start with tokens and row indices.
      transposed_weights: the weight tile is (columns, k) in shared memory instead of (k, columns).
      copies: bulk copies that `load` starts per k step.
      load: `(inputs, expert, row, column_tile, k, lhs_slot, rhs_slot, barrier)`, starts the bulk copies of one k step.
      finish: `(accumulator, where, inputs, outputs, scratch) -> held`, at the end of a tile.
      store: `(held, chunk, where, inputs, outputs, scratch) -> held`, one chunk of a tile, under the next's products.
      held: shapes, dtypes and layouts of what a finished tile keeps in registers.
      chunks: chunks of a tile.
      scratch: shared memory for `finish` and `store`.
      stages: slots of the ring.
      looped_chunks: the first so many chunks are stored in a loop; for the others `store` gets a Python integer.
    """

    name: str
    inputs: tuple
    outputs: tuple
    num_column_tiles: int
    k_steps: int
    gathers: bool
    transposed_weights: bool
    copies: int
    load: Callable
    finish: Callable
    store: Callable
    held: Any
    chunks: int
    scratch: tuple
    stages: int = 4
    looped_chunks: int = 0


def _loop_over_chunks(start: int, stop: int, looped: int, body: Callable, carry):
    """`body(chunk, carry)` for each chunk, the first `looped` ones as a loop, the others written out."""
    if start < min(stop, looped):
        carry = lax.fori_loop(start, min(stop, looped), body, carry)
    for chunk in range(max(start, looped), stop):
        carry = body(chunk, carry)
    return carry


def row_matmul(op: RowMatmul, schedule: TileSchedule) -> tuple[jax.Array, ...]:
    """Runs a row kernel over the whole schedule."""
    num_inputs, num_outputs = len(op.inputs), len(op.outputs)
    total = schedule.num_tiles * op.num_column_tiles
    stages, dtype = op.stages, op.inputs[0].dtype
    gather = None
    if op.gathers:
        num_tokens, width = op.inputs[0].shape
        gather = RowGather(rows=TILE_ROWS, columns=K_STEP, num_tokens=num_tokens, width=width)

    def kernel(*refs):
        expert_ref, row_ref, valid_ref, *refs = refs
        inputs, refs = refs[:num_inputs], refs[num_inputs:]
        outputs, refs = refs[:num_outputs], refs[num_outputs:]
        lhs, rhs, *scratch, landed, full, empty = refs
        warpgroup, block = lax.axis_index("wg"), lax.axis_index("sm")
        num_mine = (total - block + NUM_SMS - 1) // NUM_SMS

        def tile_at(i):  # past the end the last tile is repeated; its values are not used
            linear = jnp.maximum(block + jnp.minimum(i, num_mine - 1) * NUM_SMS, 0)
            row_tile, column_tile = plgpu.planar_snake(linear, (schedule.num_tiles, op.num_column_tiles), 0, 1)
            return expert_ref[row_tile], row_ref[row_tile], valid_ref[row_tile], row_tile, column_tile

        zero = jnp.int32(0)
        if gather:
            inline.init_landed(landed, stages)

        @pl.when(warpgroup == 2)
        def produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def tokens_of(row):
                return gather.load_tokens(inputs[1], row) if gather else ()

            def produce_tile(i, carry):
                step, tokens, (expert, row, valid, _, column_tile), following = carry

                def run(step):
                    offsets = gather.row_chunks(tokens, valid) if gather else None

                    def k_step(k, step):
                        slot = lax.rem(step, stages)
                        pl.when(step >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
                        op.load(inputs, expert, row, column_tile, k, lhs.at[slot], rhs.at[slot], full.at[slot])
                        if gather:
                            gather.copy(inputs[0], offsets, lhs.at[slot], landed, slot, k * K_STEP)
                        return step + 1

                    return lax.fori_loop(0, op.k_steps, k_step, step)

                following_tokens = tokens_of(following[1])  # a tile ahead: the loads finish under this tile's copies
                after = tile_at(i + 2)
                return lax.cond(valid > 0, run, lambda s: s, step), following_tokens, following, after

            first = tile_at(zero)
            lax.fori_loop(0, num_mine, produce_tile, (zero, tokens_of(first[1]), first, tile_at(jnp.int32(1))))

        @pl.when(warpgroup < 2)
        def consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            refs = (inputs, outputs, scratch)

            def for_chunks(start, stop, body, carry):
                return _loop_over_chunks(start, stop, op.looped_chunks, body, carry)

            def store(held, chunk, where):
                return op.store(held, chunk, where, *refs)

            def release(step):
                plgpu.barrier_arrive(empty.at[lax.rem(step, stages)])

            def k_step(step, accumulator, first=False):
                slot = lax.rem(step, stages)
                if op.copies:
                    plgpu.barrier_wait(full.at[slot])
                if gather:
                    inline.wait_landed(landed, slot, lax.rem(step // stages, 2))
                accumulator = inline.wgmma(
                    accumulator,
                    lhs.at[slot, pl.ds(warpgroup * GROUP_ROWS, GROUP_ROWS)],
                    rhs.at[slot],
                    first=first,
                    transpose_rhs=op.transposed_weights,
                )
                plgpu.wgmma_wait(1)
                if not first:
                    release(step + stages - 1)
                return step + 1, accumulator

            def consume_tile(i, carry):
                step, done, done_where, (_, row, valid, row_tile, column_tile) = carry
                first = warpgroup * GROUP_ROWS
                rows = jnp.clip(valid - first, 0, GROUP_ROWS)
                where = Where(warpgroup, row + first, rows, row_tile, column_tile)

                def run(step, held=done):
                    # Chunks share out the products' time; more chunks than k steps are stored at once.
                    overlapped = min(op.chunks, op.k_steps)
                    apart = max(1, (op.k_steps - 1) // overlapped)
                    at_once = op.chunks - overlapped
                    held = for_chunks(0, at_once, lambda chunk, held: store(held, chunk, done_where), held)

                    def k_steps(count, carry):
                        return lax.fori_loop(0, count, lambda _, c: k_step(*c), carry)

                    def overlapped_chunk(chunk, carry):
                        held, *products = carry
                        held = store(held, chunk, done_where)
                        left = op.k_steps - 1 - (chunk - at_once) * apart
                        return held, *k_steps(jnp.clip(left, 0, apart), tuple(products))

                    products = k_step(step, inline.zero_accumulator(GROUP_ROWS, TILE_COLUMNS), first=True)
                    held, *products = for_chunks(at_once, op.chunks, overlapped_chunk, (held, *products))
                    left = max(0, op.k_steps - 1 - overlapped * apart)
                    step, accumulator = k_steps(left, tuple(products))
                    accumulator = inline.finish_wgmma(accumulator)
                    release(step + stages - 1)
                    return step, op.finish(accumulator, where, *refs), where

                following = tile_at(i + 1)
                return *lax.cond(valid > 0, run, lambda s: (s, done, done_where), step), following

            nothing = jax.tree.map(lambda h: plgpu.layout_cast(jnp.zeros(h.shape, h.dtype), h.layout), op.held)
            carry = (zero, nothing, Where(warpgroup, zero, zero, zero, zero), tile_at(zero))
            _, done, done_where, _ = lax.fori_loop(0, num_mine, consume_tile, carry)
            for_chunks(0, op.chunks, lambda chunk, held: store(held, chunk, done_where), done)
            plgpu.wait_smem_to_gmem(0)

    kernel.__name__ = op.name
    rhs_shape, rhs_tiles = (
        ((stages, TILE_COLUMNS, K_STEP), ROW_TILES)
        if op.transposed_weights
        else ((stages, K_STEP, TILE_COLUMNS), PANEL_TILES)
    )
    return plgpu.kernel(
        kernel,
        out_type=list(op.outputs),
        scratch_types=[
            plgpu.SMEM((stages, TILE_ROWS, K_STEP), dtype, transforms=ROW_TILES),
            plgpu.SMEM(rhs_shape, dtype, transforms=rhs_tiles),
            *op.scratch,
            plgpu.SMEM((2 * stages,), jnp.int32),  # `landed`: 8-byte mbarriers of the gather
            plgpu.Barrier(num_arrivals=max(1, op.copies), num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ],
        grid=(NUM_SMS,),
        grid_names=("sm",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=1024,  # two operand tiles are worth more than room for sums across warps
        ),
    )(*schedule, *op.inputs)
