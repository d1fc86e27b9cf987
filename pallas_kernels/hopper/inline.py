"""Inline code: what Pallas has no public form for on Hopper, a handful of instructions at a time.

Operands in shared memory are panels. Here they are multiplied on the tensor cores, with accumulators that are values in
registers; `panels` has what a warpgroup's threads read and write there, and the `gather` copies rows into them. The
kernels read as Pallas code on top. All of it leans on what jax does not document, so look here first when a release
breaks a kernel. Pallas's interpreter cannot run inline code: `inline_interpreter` has the same functions for it.
"""

# Pallas declares neither what `inline_mgpu` returns nor that its transforms are concrete.
# pyright: reportCallIssue=false, reportAbstractUsage=false, reportArgumentType=false

import math
from functools import partial

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxlib.mlir.dialects import math as math_ops

from pallas_kernels.contract import BYTE_OFFSET
from pallas_kernels.hopper import inline_interpreter as forms
from pallas_kernels.mosaic.interpreter import in_interpreter
from pallas_kernels.mosaic.row_groups import GROUP_ROWS

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

SCALAR = plgpu.Layout.WG_SPLAT
ACCUMULATOR = plgpu.Layout._WGMMA_ACC_32BIT


def int_type(bits):
    return ir.IntegerType.get_signless(bits)


def c32(value):
    return arith.constant(int_type(32), value)


def scalar(array):
    return array.registers.item()


def thread_index():
    return arith.remui(utils.thread_idx(), c32(WARPGROUP))


def global_pointer(ref):
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(ref))


def shared_address(ref, offset):
    return arith.addi(llvm.ptrtoint(int_type(32), utils.memref_ptr(ref)), offset)


def as_tiles(ref, *leading):
    """Panels one after the other, (rows, columns) in all, as the tiles (*leading, rows, columns) that Mosaic knows."""
    panels = ir.MemRefType(ref.type)
    rows = np.prod(panels.shape[:-1]) // np.prod(leading)
    shape = (*leading, int(rows), panels.shape[-1])
    tiles = ir.MemRefType.get(shape, panels.element_type, memory_space=panels.memory_space)
    return utils.ptr_as_memref(utils.memref_ptr(ref), tiles)


def row_tiles(ref):
    """A panel (rows, columns) as tiles of 8 rows, the period of the swizzle."""
    return as_tiles(ref, ir.MemRefType(ref.type).shape[0] // 8, 1)


def unpacked(ref):
    """A panel of 16-bit numbers as the pairs of e4m3 that they are."""
    panel = ir.MemRefType(ref.type)
    shape = (*panel.shape[:-1], 2 * panel.shape[-1])
    pairs = ir.MemRefType.get(shape, ir.Float8E4M3FNType.get(), memory_space=panel.memory_space)
    return utils.ptr_as_memref(utils.memref_ptr(ref), pairs)


def ptx(text, *operands, constraints=""):
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(operands), text, constraints, has_side_effects=True)


def value(text: str, *operands, constraints: str, has_side_effects: bool = False):
    """The register that an instruction gives."""
    return llvm.inline_asm(int_type(32), list(operands), text, constraints, has_side_effects=has_side_effects)


def load(kind: str, address, offset: int = 0):
    """A number of shared memory, "u16" or "b32", so many bytes past an address."""
    return value(f"ld.shared.{kind} $0, [$1 + {offset}];", address, constraints="=r,r", has_side_effects=True)


def load_matrices(address) -> list:
    """Four registers, of four transposed matrices (8, 8) of 16 bits; lane `8 m + r` has the address of m's row r."""
    text = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];"
    return [*utils.inline_ptx(text, address, result_types=[int_type(32)] * 4, has_side_effects=True)]


def transposed(panel):
    """A panel, as tiles, the other way round."""
    return utils.memref_transpose(row_tiles(panel), (1, 0, 3, 2))


@in_interpreter(forms.wgmma)
def wgmma(accumulator, lhs, rhs, *, first=False, transpose_lhs=False, transpose_rhs=False, packed=False):
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
      packed: whether each number of the panels is two of e4m3, along the contracted dimension, which must be the last.
    """
    result = plgpu.ShapeDtypeStruct(accumulator.shape, jnp.float32, layout=ACCUMULATOR)

    @plgpu.inline_mgpu(arg_types=(ACCUMULATOR, plgpu.RefType(SWIZZLED), plgpu.RefType(SWIZZLED)), return_type=result)
    def run(ctx, accumulator, lhs, rhs):
        if packed:
            lhs, rhs = unpacked(lhs), unpacked(rhs)
        lhs = transposed(lhs) if transpose_lhs else row_tiles(lhs)
        rhs = transposed(rhs) if transpose_rhs else as_tiles(rhs, 1, accumulator.shape[1] // PANEL)
        value = mgpu.WGMMAAccumulator(_value=accumulator, _original_layout=accumulator.layout, _sync=first)
        if not first:
            ptx("wgmma.fence.sync.aligned;")
        out = mgpu.wgmma(value, lhs, rhs, swizzle=128)
        ptx("wgmma.commit_group.sync.aligned;")
        return out._value

    return run(accumulator, lhs, rhs)


@in_interpreter(partial(forms.wgmma, transpose_rhs=True))
def wgmma_of_values(accumulator, lhs, rhs, *, first=False):
    """See `wgmma`: the left operand (64, 64) is in registers, and the right one the transpose of a panel (columns, 64).

    The left operand's registers must not be written again before the product is waited for.
    """
    result = plgpu.ShapeDtypeStruct(accumulator.shape, jnp.float32, layout=ACCUMULATOR)
    arguments = ACCUMULATOR, plgpu.Layout.WGMMA, plgpu.RefType(SWIZZLED)

    @plgpu.inline_mgpu(arg_types=arguments, return_type=result)
    def run(ctx, accumulator, lhs, rhs):
        value = mgpu.WGMMAAccumulator(_value=accumulator, _original_layout=accumulator.layout, _sync=first)
        out = mgpu.wgmma(value, lhs, transposed(rhs), swizzle=128)
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


def zeros(columns: int, dtype=jnp.float32, layout=plgpu.Layout.WGMMA) -> jax.Array:
    """`(64, columns)` zeros in registers; a chain of `wgmma` starts with them, laid out as `ACCUMULATOR`."""
    return plgpu.layout_cast(jnp.zeros((GROUP_ROWS, columns), dtype), layout)


def of_bfloat16(register) -> list:
    """The two numbers of bfloat16 in a register, as float32."""
    halves = arith.shli(register, c32(16)), arith.andi(register, c32(-(2**16)))
    return [arith.bitcast(ir.F32Type.get(), half) for half in halves]


def permuted_bytes(low, high, order: int):
    """The bytes of two registers whose numbers, 0 to 7, are the hexadecimal digits of `order`, the last one first."""
    text = f"prmt.b32 $0, $1, $2, {order:#x};"
    return llvm.inline_asm(int_type(32), [low, high], text, "=r,r,r", has_side_effects=False)


@in_interpreter(forms.pack_bytes)
def pack_bytes(low, high, factor, dtype):
    """The whole numbers next to `low * factor` and `high * factor`, a byte each in every number of a 16-bit `dtype`.

    They are from -127 to 127, or may be any where something is not finite; all are `(64, columns)` in float32.
    """
    result = plgpu.ShapeDtypeStruct(low.shape, dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,) * 3, return_type=result)
    def run(ctx, low, high, factor):
        f32, i32 = ir.F32Type.get(), int_type(32)
        pair = ir.VectorType.get((2,), utils.dtype_to_ir_type(jnp.dtype(dtype)))

        def ends(register, factors):
            of_pair = ([vector.extract(v, [], [i]) for v in (register, factors)] for i in range(2))
            return [arith.bitcast(i32, math_ops.fma(x, by, mgpu.c(BYTE_OFFSET, f32))) for x, by in of_pair]

        def packed(low, high, factors):
            first, second = map(permuted_bytes, ends(low, factors), ends(high, factors), (0x0040, 0x4000))
            return llvm.bitcast(pair, permuted_bytes(first, second, 0x7610))

        registers = map(packed, low.registers.flat, high.registers.flat, factor.registers.flat)
        registers = np.array([*registers], dtype=object).reshape(low.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return run(low, high, factor)


@in_interpreter(forms.pack_e4m3)
def pack_e4m3(low, high, dtype):
    """`low` and `high`, `(64, columns)` in float32, as e4m3, a byte each in every number of a 16-bit `dtype`."""
    result = plgpu.ShapeDtypeStruct(low.shape, dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,) * 2, return_type=result)
    def run(ctx, low, high):
        pair = ir.VectorType.get((2,), utils.dtype_to_ir_type(jnp.dtype(dtype)))
        halves = "".join(f"cvt.rn.satfinite.e4m3x2.f32 {half}, ${i + 3}, ${i + 1}; " for i, half in enumerate("ab"))
        text = f"{{ .reg .b16 a, b; {halves}mov.b32 $0, {{a, b}}; }}"

        def packed(*registers):
            numbers = [vector.extract(register, [], [i]) for register in registers for i in range(2)]
            return llvm.bitcast(
                pair, llvm.inline_asm(int_type(32), numbers, text, "=r,f,f,f,f", has_side_effects=False)
            )

        registers = np.array([*map(packed, low.registers.flat, high.registers.flat)], dtype=object)
        shape = low.registers.shape
        return mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return run(low, high)


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


def _is_first_thread():
    return arith.cmpi(arith.CmpIPredicate.eq, thread_index(), c32(0))


@in_interpreter(forms.count)
def count(counter, block, turn):
    """The counter's next number, in the first thread, and 0 in the others."""
    del block, turn

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))
    def take(ctx, counter):
        number = utils.inline_ptx(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p atom.global.add.u32 $0, [$1], 1; }",
            global_pointer(counter),
            arith.extui(int_type(32), _is_first_thread()),
            result_types=int_type(32),
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(number, (), is_signed=True)

    return take(counter)


@in_interpreter(forms.write_words)
def write_words(words, first, values: tuple) -> None:
    """Writes `values` of the first thread to shared memory, from word `first` on."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, (SCALAR,) * len(values)))
    def write(ctx, words, first, values):
        address = shared_address(words, arith.muli(scalar(first), c32(4)))
        with utils.when(_is_first_thread()):
            for i, value in enumerate(values):
                ptx("st.shared.b32 [$0], $1;", arith.addi(address, c32(4 * i)), scalar(value), constraints="r,r")

    write(words, first, values)
