"""What Pallas has no public form for on Hopper, in one place: `cp.async` gathers, register accumulators, a few fences.

Everything here is a thin wrapper that emits a handful of instructions through `plgpu.inline_mgpu`; the kernels read as
Pallas code on top of it. It leans on what jax does not document, so look here first when a release breaks a kernel.
Pallas's interpreter cannot run inline code: `inline_interpreter` has the same functions for it.
"""

# Pallas declares neither what `inline_mgpu` returns nor that its transforms are concrete.
# pyright: reportCallIssue=false, reportAbstractUsage=false, reportArgumentType=false

import math

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels.hopper import inline_interpreter as forms
from pallas_kernels.mosaic.interpreter import in_interpreter

WARPGROUP = 128  # threads
CHUNK_BYTES = 16  # one cp.async
PANEL = K_STEP = 64
"""16-bit columns of a panel, 128 bytes. An operand in shared memory is panels one after the other."""

PANEL_BYTES = PANEL * 128

SWIZZLED = (plgpu.SwizzleTransform(128),)
"""Shared-memory layout of every panel: 128 bytes to a row, its 16-byte chunk c at place `c XOR (row mod 8)`.

Panels are not tiled as Pallas would have them, since bulk copies to and from tiles need widths that are whole tiles. A
bulk copy of a panel may reach past any edge of its array: it reads zeros there, and writes nothing.
"""

ACCUMULATOR = plgpu.Layout._WGMMA_ACC_32BIT
_SCALAR = plgpu.Layout.WG_SPLAT


def _int(bits):
    return ir.IntegerType.get_signless(bits)


def _c32(value):
    return arith.constant(_int(32), value)


def _scalar(array):
    return array.registers.item()


def _register(value):
    return vector.broadcast(ir.VectorType.get((1,), _int(32)), value)


def _thread():
    return arith.remui(utils.thread_idx(), _c32(WARPGROUP))


def _global(ref):
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(ref))


def _shared(ref, offset):
    return arith.addi(llvm.ptrtoint(_int(32), utils.memref_ptr(ref)), offset)


def _as_tiles(ref, *leading):
    """Panels one after the other, (rows, columns) in all, as the tiles (*leading, rows, columns) that Mosaic knows."""
    panels = ir.MemRefType(ref.type)
    rows = np.prod(panels.shape[:-1]) // np.prod(leading)
    shape = (*leading, int(rows), panels.shape[-1])
    tiles = ir.MemRefType.get(shape, panels.element_type, memory_space=panels.memory_space)
    return utils.ptr_as_memref(utils.memref_ptr(ref), tiles)


def _row_tiles(ref):
    """A panel (rows, columns) as tiles of 8 rows, the period of the swizzle."""
    return _as_tiles(ref, ir.MemRefType(ref.type).shape[0] // 8, 1)


def _ptx(text, *operands, constraints=""):
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(operands), text, constraints, has_side_effects=True)


@in_interpreter(forms.landed_barriers)
def landed_barriers(stages):
    """Scratch for `stages` mbarriers of the gather, 8 bytes each: Pallas barriers cannot be named in inline code."""
    return plgpu.SMEM((2 * stages,), jnp.int32)


@in_interpreter(forms.init_landed)
def init_landed(landed, stages):
    """Makes the mbarriers of `landed_barriers`, each completed by the copies of one warpgroup.

    All threads of the block must call this.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(ctx, landed):
        first = utils.single_thread_predicate(scope=utils.ThreadSubset.BLOCK)
        for stage in range(stages):
            barrier = utils.getelementptr(utils.memref_ptr(landed), [stage], _int(64))
            nvvm.mbarrier_init(barrier, _c32(WARPGROUP), predicate=first)
        _ptx("fence.mbarrier_init.release.cluster;")
        _ptx("barrier.sync 0;")

    run(landed)


@in_interpreter(forms.wait_landed)
def wait_landed(landed, slot, parity):
    """Waits until the slot's gathered rows are in shared memory, and orders them before this thread's wgmma."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, _SCALAR))
    def run(ctx, landed, slot, parity):
        barrier = utils.getelementptr(utils.memref_ptr(landed), [_scalar(slot)], _int(64))
        nvvm.mbarrier_try_wait_parity(barrier, _scalar(parity), _c32(10000000))
        _ptx("fence.proxy.async.shared::cta;")

    run(landed, slot, parity)


@in_interpreter(forms.end_ragged_copy)
def end_ragged_copy():
    """Nothing, on a GPU: it counts stores under way by groups of copies, of which one may have none or several."""


class RowGather:
    """Copies `rows` gathered rows, `columns` wide, into a swizzled tile, 16 bytes a thread at a time.

    Thread t copies chunk `t % c` of rows `t // c + i · (128 / c)`, c chunks to a row. The tile is made of panels
    (rows, 64) one after the other.

    Args:
      tokens: the array read from, its width a multiple of 8; rows and columns past its end read zeros.
      rows: of a tile.
      columns: of a tile, 64 or a multiple.
    """

    def __init__(self, tokens: jax.Array, *, rows: int, columns: int):
        self.rows, self.columns, (self.num_tokens, self.width) = rows, columns, tokens.shape
        self.chunks = columns // 8
        self.rows_apart = WARPGROUP // self.chunks
        self.per_thread = rows // self.rows_apart
        self.layout = plgpu.Layout.WG_STRIDED((self.per_thread * WARPGROUP,), vec_size=1)
        self.result = plgpu.ShapeDtypeStruct((self.per_thread * WARPGROUP,), jnp.int32, layout=self.layout)

    def _array(self, registers):
        registers = np.array([_register(r) for r in registers], dtype=object)
        return mgpu.FragmentedArray(_registers=registers, _layout=self.layout.to_mgpu(), _is_signed=True)

    @in_interpreter(forms.load_tokens)
    def load_tokens(self, indices, first_row):
        """Indices of the rows that this thread copies."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR), return_type=self.result)
        def run(ctx, indices, first_row):
            row = arith.addi(_scalar(first_row), arith.divui(_thread(), _c32(self.chunks)))
            rows = [arith.addi(row, _c32(self.rows_apart * i)) for i in range(self.per_thread)]
            pointer = _global(indices)
            return self._array([llvm.load(_int(32), utils.getelementptr(pointer, [r], _int(32))) for r in rows])

        return run(indices, first_row)

    @in_interpreter(forms.row_chunks)
    def row_chunks(self, tokens, valid_rows):
        """First chunk of every row in the source, in units of 16 bytes; -1 for rows that read zeros."""

        @plgpu.inline_mgpu(arg_types=(self.layout, _SCALAR), return_type=self.result)
        def run(ctx, tokens, valid_rows):
            row = arith.divui(_thread(), _c32(self.chunks))
            offsets = []
            for i, register in enumerate(tokens.registers):
                token = llvm.extractelement(register, _c32(0))
                known = arith.cmpi(arith.CmpIPredicate.ult, token, _c32(self.num_tokens))
                mine = arith.cmpi(
                    arith.CmpIPredicate.slt, arith.addi(row, _c32(self.rows_apart * i)), _scalar(valid_rows)
                )
                start = arith.muli(token, _c32(self.width // 8))
                offsets.append(arith.select(arith.andi(known, mine), start, _c32(-1)))
            return self._array(offsets)

        return run(tokens, valid_rows)

    @in_interpreter(forms.copy_rows)
    def copy(self, source, offsets, panel, landed, slot, first_column):
        """Starts the copies, to the tile whose first panel is `panel`; they arrive on `landed[slot]` as they land."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), self.layout, plgpu.RefType(SWIZZLED), _SCALAR))
        def run(ctx, source, offsets, panel_ref, first_column):
            chunk = arith.remui(_thread(), _c32(self.chunks))
            row = arith.divui(_thread(), _c32(self.chunks))
            column = arith.addi(_scalar(first_column), arith.muli(chunk, _c32(8)))
            panel = arith.shrui(chunk, _c32(3))  # of 64 columns
            in_panel = arith.andi(chunk, _c32(7))

            def destination(row_in_tile):
                swizzled = arith.xori(in_panel, arith.andi(row_in_tile, _c32(7)))
                in_row = arith.addi(arith.muli(panel, _c32(self.rows * 128)), arith.muli(swizzled, _c32(CHUNK_BYTES)))
                return arith.addi(arith.muli(row_in_tile, _c32(128)), in_row)

            base = utils.getelementptr(_global(source), [arith.muli(column, _c32(2))], _int(8))
            in_width = arith.cmpi(arith.CmpIPredicate.slt, column, _c32(self.width))
            bytes_here = (
                arith.select(in_width, _c32(CHUNK_BYTES), _c32(0)) if self.width % self.columns else _c32(CHUNK_BYTES)
            )
            for i, register in enumerate(offsets.registers):
                offset = llvm.extractelement(register, _c32(0))
                reads = arith.cmpi(arith.CmpIPredicate.sge, offset, _c32(0))
                size = arith.select(reads, bytes_here, _c32(0))  # of no bytes, no address matters
                # 64-bit bytes: tokens · width passes 2^31.
                start = arith.shli(arith.extui(_int(64), offset), arith.constant(_int(64), 4))
                _ptx(
                    "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;",
                    _shared(panel_ref, destination(arith.addi(row, _c32(self.rows_apart * i)))),
                    utils.getelementptr(base, [start], _int(8)),
                    size,
                    constraints="r,l,r",
                )

        run(source, offsets, panel, first_column)
        self.arrive(landed, slot)

    @in_interpreter(forms.arrive)
    def arrive(self, landed, slot):
        """Lets `landed[slot]` complete when the copies that were started have landed."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR))
        def run(ctx, landed, slot):
            barrier = _shared(landed, arith.muli(_scalar(slot), _c32(8)))
            _ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", barrier, constraints="r")

        run(landed, slot)


@in_interpreter(forms.zero_rows)
def zero_rows(panel, panels, first_row):
    """Zeroes rows `first_row` to 64 of `panels` panels (64, 64), for wgmma issued after this by any warpgroup."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED), _SCALAR))
    def run(ctx, panel, first_row):
        row, half = arith.shrui(_thread(), _c32(1)), arith.andi(_thread(), _c32(1))
        wanted = arith.extui(_int(32), arith.cmpi(arith.CmpIPredicate.sge, row, _scalar(first_row)))
        start = _shared(panel, arith.addi(arith.muli(row, _c32(128)), arith.muli(half, _c32(64))))
        for i in range(panels * 4):
            _ptx(
                "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p st.shared.v4.b32 [$0], {0, 0, 0, 0}; }",
                arith.addi(start, _c32(i // 4 * PANEL_BYTES + i % 4 * CHUNK_BYTES)),
                wanted,
                constraints="r,r",
            )
        _ptx("fence.proxy.async.shared::cta;")
        utils.warpgroup_barrier()

    run(panel, first_row)


def _matrix_address(panel, first_column):
    """Address of the row of 16 bytes that this lane names to ldmatrix and stmatrix, for 16 columns of a panel (64, 64).

    A warp's 16 rows of them are four matrices (8, 8), in the order of the registers of a wgmma result.
    """
    lane, warp = arith.andi(_thread(), _c32(31)), arith.shrui(_thread(), _c32(5))
    row = arith.addi(arith.muli(warp, _c32(16)), arith.andi(lane, _c32(15)))
    swizzled = arith.xori(arith.shrui(lane, _c32(4)), arith.andi(lane, _c32(7)))
    chunk = arith.xori(swizzled, _c32(first_column // 8))
    return _shared(panel, arith.addi(arith.muli(row, _c32(128)), arith.muli(chunk, _c32(CHUNK_BYTES))))


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
            result_types=[_int(32)] * 4,
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
        _ptx(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
            _matrix_address(panel, first_column),
            *(llvm.bitcast(_int(32), r) for r in values.registers.flat),
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
        tiles = _as_tiles(panels, columns // width, rows // 8)  # panel, row tile, row, column
        order = (0, 1, 3, 2) if transposed else (1, 0, 2, 3)
        values.store_tiled(utils.memref_transpose(tiles, order), swizzle=128)

    run(panels, plgpu.layout_cast(values, layout))


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
            return utils.memref_transpose(_row_tiles(panel), (1, 0, 3, 2))

        lhs = transpose(lhs) if transpose_lhs else _row_tiles(lhs)
        rhs = transpose(rhs) if transpose_rhs else _as_tiles(rhs, 1, accumulator.shape[1] // PANEL)
        value = mgpu.WGMMAAccumulator(_value=accumulator, _original_layout=accumulator.layout, _sync=first)
        if not first:
            _ptx("wgmma.fence.sync.aligned;")
        out = mgpu.wgmma(value, lhs, rhs, swizzle=128)
        _ptx("wgmma.commit_group.sync.aligned;")
        return out._value

    return run(accumulator, lhs, rhs)


@in_interpreter(forms.finish_wgmma)
def finish_wgmma(accumulator):
    """Waits for every wgmma and returns the accumulator as an ordinary value."""
    result = plgpu.ShapeDtypeStruct(accumulator.shape, jnp.float32, layout=ACCUMULATOR)

    @plgpu.inline_mgpu(arg_types=(ACCUMULATOR,), return_type=result)
    def run(ctx, accumulator):
        _ptx("wgmma.wait_group.sync.aligned 0;")
        return mgpu.fragmented_array.optimization_barrier(accumulator)

    return plgpu.layout_cast(run(accumulator), plgpu.Layout.WGMMA)


@in_interpreter(forms.zero_accumulator)
def zero_accumulator(rows, columns) -> jax.Array:
    """Where a chain of `wgmma` starts."""
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), ACCUMULATOR)


@in_interpreter(forms.sigmoid)
def sigmoid(x):
    """`1 / (1 + exp(-x))` of a float32 tile, in 4 instructions an element; Pallas's own division takes 4 more."""
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)
    def run(ctx, x):
        f32 = ir.F32Type.get()
        minus_log2_e = mgpu.c(-math.log2(math.e), f32)
        one_and_exp = (x * minus_log2_e).exp2(approx=True) + mgpu.c(1.0, f32)
        return one_and_exp._pointwise(one_and_exp._lift_fast_instr("rcp.approx.ftz.f32"))

    return run(x)
