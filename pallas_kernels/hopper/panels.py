"""Panels of shared memory that the threads of a warpgroup read and write, and sums over a tile's rows or columns.

A panel is what `inline` multiplies on the tensor cores, swizzled. A tile's end reads its operands from panels into
registers and writes its results there, from where bulk copies take them to their rows.
"""

# Pallas declares neither what `inline_mgpu` returns nor that its transforms are concrete.
# pyright: reportCallIssue=false, reportAbstractUsage=false, reportArgumentType=false

from collections.abc import Callable
from contextlib import contextmanager

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.contract import BYTE_OFFSET
from pallas_kernels.hopper import inline_interpreter as forms
from pallas_kernels.hopper.inline import (
    CHUNK_BYTES,
    PANEL,
    PANEL_BYTES,
    SCALAR,
    SWIZZLED,
    as_tiles,
    c32,
    global_pointer,
    int_type,
    load,
    of_bfloat16,
    permuted_bytes,
    ptx,
    scalar,
    shared_address,
    thread_index,
)
from pallas_kernels.mosaic.interpreter import in_interpreter
from pallas_kernels.mosaic.row_groups import GROUP_ROWS


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
def load_columns(panel, first_column: int, byte: int | None = None):
    """Columns `first_column` to `first_column + 16` of a panel (64, 64) of 16-bit values, in registers, as float32.

    Half a register of bfloat16 is a float32's upper half: LLVM takes one instruction more for every other number. With
    `byte`, what `pack_bytes` made of its argument of that number: a byte is the end of 2^23 plus as much.
    """
    shifts = panel.dtype == jnp.bfloat16 or byte is not None
    dtype = jnp.float32 if shifts else panel.dtype
    result = plgpu.ShapeDtypeStruct((PANEL, 16), dtype, layout=plgpu.Layout.WGMMA)

    def unpacked(register):
        f32 = ir.F32Type.get()
        if byte is not None:
            ends = [permuted_bytes(register, mgpu.c(0x4B000000, int_type(32)), 0x7650 + byte + i) for i in (0, 2)]
            numbers = [arith.subf(arith.bitcast(f32, end), mgpu.c(BYTE_OFFSET, f32)) for end in ends]
            return vector.from_elements(ir.VectorType.get((2,), f32), numbers)
        return vector.from_elements(ir.VectorType.get((2,), f32), of_bfloat16(register))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED),), return_type=result)
    def run(ctx, panel):
        pair = ir.VectorType.get((2,), ir.MemRefType(panel.type).element_type)
        loaded = utils.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
            _matrix_address(panel, first_column),
            result_types=[int_type(32)] * 4,
            has_side_effects=True,
        )
        registers = np.array([unpacked(r) if shifts else llvm.bitcast(pair, r) for r in loaded], dtype=object)
        shape = mgpu.WGMMA_LAYOUT.registers_shape((PANEL, 16))
        return mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return run(panel).astype(jnp.float32)


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


interleaved = forms.interleaved


def _interleaved_address(panel, first_row: int, odd: int):
    """Address of two columns of a row that are this thread's, of accumulators in which they are `interleaved`.

    The row is the `odd` one of the two of each 8 that are this thread's, of the 8 from `first_row` on.
    """
    lane, warp = arith.andi(thread_index(), c32(31)), arith.shrui(thread_index(), c32(5))
    pair, row = arith.shrui(lane, c32(2)), arith.ori(arith.shli(arith.andi(lane, c32(3)), c32(1)), c32(odd))
    chunk = arith.addi(arith.shli(warp, c32(1)), arith.shrui(pair, c32(2)))
    place = arith.addi(arith.muli(arith.xori(chunk, row), c32(16)), arith.muli(arith.andi(pair, c32(3)), c32(4)))
    offset = arith.addi(arith.addi(arith.muli(row, c32(128)), place), c32(first_row * 128))
    return shared_address(panel, offset)


@in_interpreter(forms.store_interleaved)
def store_interleaved(panel, first_row: int, values) -> None:
    """Writes the transpose of `values` (64, rows), 16-bit and `interleaved`, to a panel (..., 64) from a row on."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED), plgpu.Layout.WGMMA))
    def run(ctx, panel, values):
        registers = [llvm.bitcast(int_type(32), r) for r in values.registers.flat]  # of two rows each
        for odd, order in enumerate((0x5410, 0x7632)):
            address = _interleaved_address(panel, first_row, odd)
            for i in range(0, len(registers), 2):
                both = permuted_bytes(registers[i], registers[i + 1], order)
                ptx(f"st.shared.b32 [$0 + {i // 2 * 1024}], $1;", address, both, constraints="r,r")

    run(panel, values)


@in_interpreter(forms.load_interleaved)
def load_interleaved(panel, first_row: int, rows: int):
    """The transpose of `rows` rows of a panel (..., 64) of bfloat16, from a row on, `interleaved`, as float32."""
    result = plgpu.ShapeDtypeStruct((PANEL, rows), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED),), return_type=result)
    def run(ctx, panel):
        pair, registers = ir.VectorType.get((2,), ir.F32Type.get()), []
        addresses = [_interleaved_address(panel, first_row, odd) for odd in range(2)]
        for i in range(rows // 8):
            words = [load("b32", address, i * 1024) for address in addresses]
            registers += [vector.from_elements(pair, [*n]) for n in zip(*map(of_bfloat16, words), strict=True)]
        registers = np.array(registers, dtype=object).reshape(mgpu.WGMMA_LAYOUT.registers_shape((PANEL, rows)))
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return run(panel)


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


def store_buffers(dtype, columns: int = PANEL, rows: int = GROUP_ROWS):
    """Two buffers for `store_through` per consumer warpgroup."""
    return plgpu.SMEM((4, rows, columns), dtype, transforms=SWIZZLED)


@contextmanager
def store_through(buffers, warpgroup, turn: int, write: Callable):
    """A buffer that `write` has filled, for the copies that are started inside.

    A warpgroup's two buffers take turns: the store before last must have left shared memory.
    """
    buffer = buffers.at[warpgroup * 2 + turn % 2]
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    write(buffer)
    plgpu.commit_smem()
    yield buffer
    plgpu.commit_smem_to_gmem_group()


@in_interpreter(forms.memory_to_add)
def memory_to_add(dtype, columns: int) -> dict:
    """Memory that `leave` needs among the launch's to add buffers of so many columns: none, but in the interpreter."""
    del dtype, columns
    return {}


@in_interpreter(forms.leave)
def leave(refs, buffer, target, *, add: bool) -> None:
    """Starts the bulk copy of a buffer, or adds it to what is there, and rounds each number of 16 bits once more."""
    del refs
    plgpu.copy_smem_to_gmem(buffer, target, commit_group=False, reduction_op="add" if add else None)


@in_interpreter(forms.store_of_rows)
def store_of_rows(array, line, first, values, rows) -> None:
    """Writes the first `rows` of `values` (64,), in float32, one for each row of a tile, to `array[line, first:]`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, plgpu.Layout.WGMMA.reduce(1), SCALAR))
    def run(ctx, array, line, first, values, rows):
        width = ir.MemRefType(array.type).shape[1]
        lane, warp = arith.andi(thread_index(), c32(31)), arith.shrui(thread_index(), c32(5))
        row = arith.addi(arith.muli(warp, c32(16)), arith.shrui(lane, c32(2)))
        own = arith.addi(arith.addi(arith.muli(scalar(line), c32(width)), scalar(first)), row)
        is_first = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(lane, c32(3)), c32(0))
        for i, value in enumerate(values.registers.flat):
            known = arith.cmpi(arith.CmpIPredicate.slt, arith.addi(row, c32(8 * i)), scalar(rows))
            place = arith.addi(own, c32(8 * i))
            value = vector.extract(value, [], [0]) if isinstance(value.type, ir.VectorType) else value
            ptx(
                "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.f32 [$0], $1; }",
                utils.getelementptr(global_pointer(array), [place], ir.F32Type.get()),
                value,
                arith.extui(int_type(32), arith.andi(known, is_first)),
                constraints="l,f,r",
            )

    run(array, line, first, values, rows)


@in_interpreter(forms.store_sums)
def store_sums(array, first_line, first, values) -> None:
    """Writes sums over the rows of `values` (64, 16), in float32, of each warp's 16 rows to a line of `array`.

    Lines begin with `first_line`, and the 16 sums are written from number `first` on.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, plgpu.Layout.WGMMA))
    def run(ctx, array, first_line, first, values):
        f32 = ir.F32Type.get()
        lane, warp = arith.andi(thread_index(), c32(31)), arith.shrui(thread_index(), c32(5))

        def bit(number):
            return arith.andi(arith.shrui(lane, c32(number)), c32(1))

        def halved(sums, number):
            # Lanes that differ in that bit share out the sums: each gives away one half, and adds to the other.
            upper = arith.cmpi(arith.CmpIPredicate.ne, bit(number), c32(0))
            half = len(sums) // 2
            for low, high in zip(sums[:half], sums[half:], strict=True):
                kept, given = arith.select(upper, high, low), arith.select(upper, low, high)
                yield arith.addf(kept, utils.shfl_bfly(given, c32(1 << number)))

        of_row = values.registers.flat  # of each 8 sums, two numbers of a row, and of the row 8 further on
        sums = [
            arith.addf(*(vector.extract(of_row[2 * i + row], [], [odd]) for row in range(2)))
            for i in range(2)
            for odd in range(2)
        ]
        (total,) = halved([*halved(sums, 2)], 3)
        total = arith.addf(total, utils.shfl_bfly(total, c32(16)))
        number = arith.addi(
            arith.muli(bit(2), c32(8)), arith.addi(arith.muli(arith.andi(lane, c32(3)), c32(2)), bit(3))
        )
        width = ir.MemRefType(array.type).shape[1]
        place = arith.addi(
            arith.muli(arith.addi(scalar(first_line), warp), c32(width)), arith.addi(scalar(first), number)
        )
        ptx(
            "{ .reg .pred p; setp.eq.b32 p, $2, 0; @p st.global.f32 [$0], $1; }",
            utils.getelementptr(global_pointer(array), [place], f32),
            total,
            bit(4),
            constraints="l,f,r",
        )

    run(array, jnp.asarray(first_line, jnp.int32), jnp.asarray(first, jnp.int32), values)
