"""The row kernels' common skeleton: tiles of rows of one expert times a block of that expert's weight columns.

One persistent block per SM walks over (row tile, column tile) pairs. Warpgroup 2 produces operands, k step by k step,
into a ring of shared-memory slots. Warpgroups 0 and 1 own 64 rows each and multiply, one wgmma chain of 64 x 256 a k
step. A finished tile is packed to 16 bits in registers, which frees the accumulators; its chunks are stored while the
next tile's first k steps run on the tensor cores.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import inline
from pallas_kernels.hopper.inline import K_STEP, PANEL, SWIZZLED, RowGather
from pallas_kernels.mosaic import in_place, interpreter
from pallas_kernels.mosaic.device import num_sms
from pallas_kernels.mosaic.row_groups import GROUP_ROWS, TILE_COLUMNS, TILE_ROWS, TileSchedule, Where
from pallas_kernels.tuning.parameters import TileTuning


def tile_panel(accumulator, panel: int, where: Where, bias=None):
    """64 columns of a tile, plus their part of `bias` `(E, column tiles, 256)` float32 if there is one."""
    columns = accumulator[:, panel * PANEL : (panel + 1) * PANEL]
    if bias is None:
        return columns
    own = bias.at[where.expert, where.column_tile, pl.ds(panel * PANEL, PANEL)]
    own = plgpu.load(own, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return columns + lax.broadcast_in_dim(own, columns.shape, (1,))


def _nothing(*arguments) -> None:
    pass


class RowMatmul(NamedTuple):
    """What distinguishes one row kernel from another.

    Attributes:
      name: of the kernel in profiles.
      inputs: arrays of the kernel.
      outputs: shapes and dtypes of its results.
      in_place: inputs whose memory an output may take, and that output.
      num_column_tiles: how many blocks of 256 columns.
      k_steps: steps of 64 along the contracted dimension.
      gathers: whether the left operand's rows are gathered: then the inputs start with tokens and row indices.
      transposed_weights: the weight tile is (columns, k) in shared memory instead of (k, columns) in panels.
      copies: bulk copies that `load` starts per k step.
      load: `(inputs, expert, row, column_tile, k, lhs_slot, rhs_slot, barrier)`, starts the bulk copies of one k step.
      panels: entries of the ring after a tile's k steps, for what its end reads.
      load_panel: `(inputs, row, column_tile, panel, rhs_slot, barrier)`, starts the bulk copies of such an entry, as
        many as for a k step.
      begin: `(where, inputs) -> begun`, at the start of a tile.
      panel: `(accumulator, begun, panel, where, lhs_slot, rhs_slot, inputs, outputs)`, at the end of a tile for each of
        its panels. It may start bulk copies to device memory from the slots, one commit group a panel.
      finish: `(accumulator, where, inputs, outputs, scratch) -> held`, at the end of a tile.
      store: `(held, chunk, where, inputs, outputs, scratch)`, one chunk of a tile, under the next's products.
      held: shapes, dtypes and layouts of what a finished tile keeps in registers.
      chunks: chunks of a tile.
      scratch: shared memory for `finish` and `store`.
      tuning: slots of the ring, and the order of the tiles.
      registers: a thread of the producer has, and one of a consumer. `setmaxnreg` shares out the 168 that the launch
        gave to each of three warpgroups; asking for more hangs.
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
    in_place: Mapping[int, int] = MappingProxyType({})
    scratch: tuple = ()
    finish: Callable | None = None
    panels: int = 0
    load_panel: Callable = _nothing
    begin: Callable = _nothing
    panel: Callable = _nothing
    store: Callable = _nothing
    held: Any = ()
    chunks: int = 0
    tuning: TileTuning = TileTuning()
    registers: tuple[int, int] = (72, 216)


def row_matmul(op: RowMatmul, schedule: TileSchedule) -> tuple[jax.Array, ...]:
    """Runs a row kernel over the whole schedule."""
    num_inputs, num_outputs = len(op.inputs), len(op.outputs)
    total = schedule.num_tiles * op.num_column_tiles
    stages, dtype, blocks = op.tuning.stages, op.inputs[0].dtype, interpreter.blocks(num_sms())
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
        num_mine = (total - block + blocks - 1) // blocks

        def place_of(i):
            """Row and column tile of this block's turn `i`."""
            shape = (schedule.num_tiles, op.num_column_tiles)
            return plgpu.planar_snake(block + i * blocks, shape, op.tuning.minor_dim, op.tuning.tile_width)

        def rows_of(i):
            """Expert, first row and valid rows; past the end the last tile is repeated, its values are not used."""
            row_tile = jnp.clip(place_of(jnp.minimum(i, num_mine - 1))[0], 0, schedule.num_tiles - 1)
            return expert_ref[row_tile], row_ref[row_tile], valid_ref[row_tile]

        zero = jnp.int32(0)
        if gather:
            inline.init_landed(landed, stages)

        @pl.when(warpgroup == 2)
        def produce():
            plgpu.set_max_registers(op.registers[0], action="decrease")

            def tokens_of(row):
                return gather.load_tokens(inputs[1], row) if gather else ()

            def free_slot(step):
                """The slot of that step, once the consumers are done with it."""
                slot = lax.rem(step, stages)
                pl.when(step >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
                return slot

            def produce_tile(i, carry):
                step, tokens, (expert, row, valid), following = carry
                column_tile = place_of(i)[1]

                def run(step):
                    offsets = gather.row_chunks(tokens, valid) if gather else None

                    def k_step(k, step):
                        slot = free_slot(step)
                        op.load(inputs, expert, row, column_tile, k, lhs.at[slot], rhs.at[slot], full.at[slot])
                        if gather:
                            gather.copy(inputs[0], offsets, lhs.at[slot], landed, slot, k * K_STEP)
                        return step + 1

                    def panel(i, step):
                        slot = free_slot(step)
                        op.load_panel(inputs, row, column_tile, i, rhs.at[slot], full.at[slot])
                        if gather:
                            gather.arrive(landed, slot)
                        return step + 1

                    step = lax.fori_loop(0, op.k_steps, k_step, step)
                    return lax.fori_loop(0, op.panels, panel, step) if op.panels else step

                following_tokens = tokens_of(following[1])  # a tile ahead: the loads finish under this tile's copies
                after = rows_of(i + 2)
                return lax.cond(valid > 0, run, lambda s: s, step), following_tokens, following, after

            first = rows_of(zero)
            lax.fori_loop(0, num_mine, produce_tile, (zero, tokens_of(first[1]), first, rows_of(jnp.int32(1))))

        @pl.when(warpgroup < 2)
        def consume():
            plgpu.set_max_registers(op.registers[1], action="increase")
            refs = (inputs, outputs, scratch)

            def store(done, chunks):
                for chunk in chunks:
                    op.store(done[0], chunk, done[1], *refs)

            def release(step):
                plgpu.barrier_arrive(empty.at[lax.rem(step, stages)])

            def left(step, pending):
                """Releases a panel's slot when its copies have left, all but the last `pending` groups."""
                plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
                release(step)

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
                step, done, (expert, row, valid) = carry
                row_tile, column_tile = place_of(i)
                first = warpgroup * GROUP_ROWS
                rows = jnp.clip(valid - first, 0, GROUP_ROWS)
                where = Where(warpgroup, expert, row + first, rows, row_tile, column_tile)

                def run(step):
                    # Chunks share out the products' time; more chunks than k steps are stored at once.
                    overlapped = min(op.chunks, op.k_steps)
                    apart = max(1, (op.k_steps - 1) // max(overlapped, 1))
                    at_once = op.chunks - overlapped

                    def k_steps(count, products):
                        return lax.fori_loop(0, count, lambda _, p: k_step(*p), products)

                    store(done, range(at_once))
                    begun = op.begin(where, inputs)
                    products = k_step(step, inline.zero_accumulator(GROUP_ROWS, TILE_COLUMNS), first=True)
                    if op.panels:
                        pl.when(step > 0)(lambda: left(step - 1, 0))
                    ahead = op.k_steps - 1
                    for chunk in range(at_once, op.chunks):
                        store(done, (chunk,))
                        products = k_steps(min(ahead, apart), products)
                        ahead -= min(ahead, apart)
                    step, accumulator = k_steps(ahead, products)
                    accumulator = inline.finish_wgmma(accumulator)
                    release(step + stages - 1)
                    for panel in range(op.panels):
                        slot = lax.rem(step, stages)
                        plgpu.barrier_wait(full.at[slot])
                        op.panel(accumulator, begun, panel, where, lhs.at[slot], rhs.at[slot], inputs, outputs)
                        if panel > 0:
                            left(step - 1, 1)
                        step += 1
                    if not op.finish:
                        return step, ()
                    return step, (op.finish(accumulator, where, *refs), where)

                following = rows_of(i + 1)
                return *lax.cond(valid > 0, run, lambda s: (s, done), step), following

            nothing = jax.tree.map(lambda h: plgpu.layout_cast(jnp.zeros(h.shape, h.dtype), h.layout), op.held)
            done = (nothing, Where(warpgroup, zero, zero, zero, zero, zero)) if op.finish else ()
            _, done, _ = lax.fori_loop(0, num_mine, consume_tile, (zero, done, rows_of(zero)))
            store(done, range(op.chunks))
            plgpu.wait_smem_to_gmem(0)

    kernel.__name__ = op.name
    return in_place.kernel(
        kernel,
        in_place={len(schedule) + i: output for i, output in op.in_place.items()},
        out_type=list(op.outputs),
        scratch_types=[
            plgpu.SMEM((stages, TILE_ROWS, K_STEP), dtype, transforms=SWIZZLED),
            plgpu.SMEM((stages, TILE_COLUMNS, K_STEP), dtype, transforms=SWIZZLED),
            *op.scratch,
            inline.landed_barriers(stages),
            plgpu.Barrier(num_arrivals=max(1, op.copies), num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ],
        grid=(blocks,),
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
