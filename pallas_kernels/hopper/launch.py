"""Launches the kernels that multiply: persistent blocks, one per SM, of a producer and two consumer warpgroups."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import gather, tile_queue
from pallas_kernels.hopper.inline import K_STEP, SWIZZLED
from pallas_kernels.hopper.ring import Ring
from pallas_kernels.hopper.tile_queue import TileQueue
from pallas_kernels.mosaic import in_place, interpreter
from pallas_kernels.mosaic.device import num_sms
from pallas_kernels.mosaic.row_groups import TILE_COLUMNS, TILE_ROWS
from pallas_kernels.tuning.parameters import TileTuning

PRODUCER = 2  # the warpgroup


def launch(
    name: str,
    kind: type,
    find_tile: Callable,
    produce: Callable,
    consume: Callable,
    *,
    tiles: int,
    operands: Mapping[str, Any],
    results: Mapping[str, Any],
    aliases: Sequence[tuple[str, str]] = (),
    tuning: TileTuning,
    dtype,
    copies: int,
    gathers: bool,
    buffers=None,
    barriers: Mapping[str, Any] | None = None,
    registers: tuple[int, int] = (72, 216),
) -> SimpleNamespace:
    """Runs a kernel on `tiles` tiles and returns its results by name.

    Args:
      name: of the kernel in profiles.
      kind: of named tuple that a tile is.
      find_tile: `(refs, number) -> tile`; past the last tile any will do.
      produce: `(refs, ring, queue)`, fills the ring. `refs` has all that is named here, each by its name.
      consume: `(refs, ring, queue, warpgroup)`, reads the ring, in warpgroups 0 and 1.
      tiles: how many the blocks share out.
      operands: arrays or tuples of them, by name.
      results: shapes and dtypes or tuples of them, by name.
      aliases: pairs of operands and results that may take their memory.
      tuning: slots of the ring, and how tiles are shared out.
      dtype: of what is in the slots.
      copies: bulk copies that fill a slot.
      gathers: whether rows are gathered into the slots, too.
      buffers: shared memory that results leave from.
      barriers: others than the ring's, by name.
      registers: a thread of the producer has, and one of a consumer. `setmaxnreg` shares out the 168 that the launch
        gave to each of three warpgroups; asking for more hangs.
    """
    stages, blocks, dynamic = tuning.stages, interpreter.blocks(num_sms()), tile_queue.is_dynamic(tuning.shares)
    if dynamic:
        counter = tile_queue.new_counter(tiles, blocks)
        operands = {**operands, "counter": counter}
        results = {**results, "counter_after": jax.ShapeDtypeStruct(counter.shape, counter.dtype)}
        aliases = [*aliases, ("counter", "counter_after")]
    memory = {
        **(tile_queue.memory() if dynamic else {}),
        "lhs": plgpu.SMEM((stages, TILE_ROWS, K_STEP), dtype, transforms=SWIZZLED),
        "rhs": plgpu.SMEM((stages, TILE_COLUMNS, K_STEP), dtype, transforms=SWIZZLED),
        "buffers": buffers,
        "landed": gather.landed_barriers(stages),
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "empty": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        **(barriers or {}),
    }

    def kernel(*flat):
        refs = _named({**operands, **results, **memory}, flat)
        ring = Ring(stages, gathers, refs.lhs, refs.rhs, refs.landed, refs.full, refs.empty)
        warpgroup, block = lax.axis_index("wg"), lax.axis_index("sm")
        queue = TileQueue(blocks, block, dynamic, kind, find_tile, refs)
        if gathers:
            gather.init_landed(refs.landed, stages)

        @pl.when(warpgroup == PRODUCER)
        def _():
            plgpu.set_max_registers(registers[0], action="decrease")
            produce(refs, ring, queue)

        @pl.when(warpgroup < PRODUCER)
        def _():
            plgpu.set_max_registers(registers[1], action="increase")
            consume(refs, ring, queue, warpgroup)
            plgpu.wait_smem_to_gmem(0)

    kernel.__name__ = name
    number, result_number = (vars(_named(trees, range(len(_leaves(trees))))) for trees in (operands, results))
    pairs = [zip(jax.tree.leaves(number[a]), jax.tree.leaves(result_number[b]), strict=True) for a, b in aliases]
    flat = in_place.kernel(
        kernel,
        in_place={operand: result for pair in pairs for operand, result in pair},
        out_type=_leaves(results),
        scratch_types=_leaves(memory),
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
    )(*_leaves(operands))
    return _named(results, flat)


def _leaves(trees: Mapping[str, Any]) -> list:
    """In the order of the names as they are given; jax would sort them."""
    return jax.tree.leaves(list(trees.values()))


def _named(trees: Mapping[str, Any], leaves) -> SimpleNamespace:
    """`leaves` in place of those of `trees`."""
    values = jax.tree.unflatten(jax.tree.structure(list(trees.values())), leaves)
    return SimpleNamespace(**dict(zip(trees, values, strict=True)))
