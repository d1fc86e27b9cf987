"""Compressed weights of experts, decoded on their way to the tensor cores, in the registers of those who multiply.

A k step's codes and scales come to its slot by bulk copies, a quarter or half of the bytes that numbers would be. The
product is transposed: the weights are the left operand of a wgmma, which it takes from registers, and the rows are the
right one. So no number of a weight is ever in memory, and a consumer decodes under the products of what it decoded
before. It has every other block of 64 of a tile's columns; a k step of a block is (64, 64) numbers.

A register of the left operand has two numbers of one column, neighbours along k, and a thread has those of two columns.
These are neighbours, too: of every 16 columns of a block the even ones come first (`interleaved`), then the odd ones.
So four numbers of a thread are 16 bits of 4-bit codes side by side, and it stores two columns of a result at once.
"""

# pyright: reportCallIssue=false, reportAbstractUsage=false, reportArgumentType=false

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.hopper import inline_interpreter as forms
from pallas_kernels.hopper.codes import DECODE, powers_of_two, sum32
from pallas_kernels.hopper.inline import (
    K_STEP,
    SCALAR,
    WARPGROUP,
    c32,
    int_type,
    load,
    load_matrices,
    permuted_bytes,
    scalar,
    shared_address,
    thread_index,
    value,
)
from pallas_kernels.mosaic.interpreter import in_interpreter, is_interpreted
from pallas_kernels.mosaic.row_groups import TILE_COLUMNS

BLOCK = 64
"""Columns that a wgmma multiplies, and their bytes of codes of a row."""

BLOCKS = TILE_COLUMNS // BLOCK
OWN_BLOCKS = BLOCKS // 2  # of a consumer

CODES = (plgpu.SwizzleTransform(64),)
"""Shared-memory layout of codes: 64 bytes to a row, its 16-byte chunk c at place `c XOR (row / 2 mod 4)`."""

LEAST_COPY = 128
"""Bytes of a bulk copy, at least."""

REPEATS = 4
"""Of a scale of float8."""

EIGHTS = K_STEP // 8
"""Of a k step: what a thread's registers of a left operand come in."""


class TileDecoder:
    """Brings compressed weights `(E, in, out)` to the ring, and decodes them, a k step of a tile at a time.

    Args:
      weight: one of the weights, a `QuantizedWeight`; they are of one form and shape.
      transposed: whether a tile's columns are inputs, and outputs are contracted.
      side_by_side: how many weights share the columns of a tile.
    """

    def __init__(self, weight: Any, *, transposed: bool, side_by_side: int = 1):
        self.form, self.coding, self.transposed = weight.form, weight.coding, transposed
        self.side_by_side = side_by_side
        self.width = TILE_COLUMNS // side_by_side
        (self.code_inputs, _), (group, _) = self.coding.steps  # inputs of a byte of codes, and of a scale
        self.rows = K_STEP // self.code_inputs  # of a block's codes
        # One copy takes all of a weight's blocks, but in the interpreter, which has none to a reshaped part of memory.
        self.in_blocks = not (transposed or is_interpreted() or weight.shape[-1] % BLOCK)
        self.copies = side_by_side + (side_by_side if transposed or self.in_blocks else BLOCKS)  # of a k step
        if self.form == "float8":
            self.scales = 1, LEAST_COPY // 4
        else:
            self.scales = (TILE_COLUMNS // group, K_STEP) if transposed else (K_STEP // group, self.width)
        self.scale_dtype = self.coding.dtypes[1]
        # Of the scales of one of the weights side by side.
        self.side_bytes = int(np.prod(self.scales)) * jnp.dtype(self.scale_dtype).itemsize
        self.slot_bytes = BLOCKS * self.rows * BLOCK + side_by_side * self.side_bytes
        self.code_registers = EIGHTS if transposed or self.form == "float8" else EIGHTS // 2
        self.scale_registers = 1 if self.form == "float8" else EIGHTS if transposed else self.scales[0]
        self.registers = self.code_registers + self.scale_registers
        self.layout = plgpu.Layout.WG_STRIDED((self.registers * WARPGROUP,), vec_size=1)

    def operands(self, weight: Any) -> tuple[jax.Array, jax.Array]:
        """Codes and scales as the kernel takes them.

        Scales of float8 are those of each block and k step, repeated: a copy begins at a multiple of 16 bytes.
        """
        codes, scales = lax.bitcast_convert_type(weight.values, jnp.uint8), weight.scales
        if self.form == "float8":
            scales = scales.swapaxes(1, 2) if self.transposed else scales
            scales = jnp.repeat(jnp.repeat(scales, 2, axis=1), 2 * REPEATS, axis=2)
            scales = jnp.pad(scales, ((0, 0), (0, 0), (0, -scales.shape[2] % self.scales[1])))
        if self.in_blocks:
            codes = codes.reshape(*codes.shape[:2], -1, BLOCK)
        return codes, scales

    def memory(self, stages: int) -> dict:
        """Scratch for so many slots, by name."""
        return {
            "codes": plgpu.SMEM((stages, BLOCKS * self.rows, BLOCK), jnp.uint8, transforms=CODES),
            "code_scales": plgpu.SMEM((stages, self.side_by_side, *self.scales), self.scale_dtype),
        }

    def fetch(self, refs, slot, weights, expert, column, k) -> None:
        """Starts a k step's copies, of weights side by side, from each of which the tile has columns from `column` on.

        Past their ends they read zeros, which stand for finite numbers.
        """
        rows, columns = self.scales
        for i, (codes, scales) in enumerate(weights):
            own = refs.codes.at[slot.number]
            if self.transposed:
                part = codes.at[
                    expert, pl.ds(lax.div(column, self.code_inputs), own.shape[0]), pl.ds(k * K_STEP, BLOCK)
                ]
                slot.fetch(part, own)
                place = lax.div(column * rows, TILE_COLUMNS), k * K_STEP
            else:
                steps, of_each = pl.ds(k * self.rows, self.rows), BLOCKS // self.side_by_side
                own = own.at[pl.ds(i * of_each * self.rows, of_each * self.rows)]
                if self.in_blocks:
                    part = codes.at[expert, steps, pl.ds(lax.div(column, BLOCK), of_each)]
                    slot.fetch(part, own.reshape(of_each, self.rows, BLOCK).transpose((1, 0, 2)))
                else:
                    for block in range(of_each):
                        part = codes.at[expert, steps, pl.ds(column + block * BLOCK, BLOCK)]
                        slot.fetch(part, own.at[pl.ds(block * self.rows, self.rows)])
                place = k * rows, column
            if self.form == "float8":
                place = k, lax.div(column, BLOCK) * REPEATS
            part = scales.at[expert, pl.ds(place[0], rows), pl.ds(place[1], columns)]
            slot.fetch(part, refs.code_scales.at[slot.number, i])

    def numbers(self, codes, scales, block):
        """A k step of a block's numbers, from its codes and all scales of its weights; it is `block` of them."""
        rows, columns = self.scales
        if self.form == "float8":
            codes, size = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), (1, 1)
            start = 0, block * REPEATS
        elif self.transposed:
            size = rows // BLOCKS, columns
            start = block * size[0], 0
        else:
            size = rows, BLOCK
            start = 0, block * BLOCK
        return self.coding.decode(codes, lax.dynamic_slice(scales, start, size), jnp.bfloat16)

    @in_interpreter(forms.load_block)
    def load(self, refs, slot, own: int) -> jax.Array:
        """A thread's codes and scales of a consumer's own block, as registers, which `decode` takes."""
        result = plgpu.ShapeDtypeStruct((self.registers * WARPGROUP,), jnp.int32, layout=self.layout)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(CODES), plgpu.RefType(), SCALAR), return_type=result)
        def run(ctx, codes, scales, warpgroup):
            one = ir.VectorType.get((1,), int_type(32))
            loaded = ThreadLoads(self, codes, scales, scalar(warpgroup)).block(own)
            registers = np.array([vector.broadcast(one, register) for register in loaded], dtype=object)
            return mgpu.FragmentedArray(_registers=registers, _layout=self.layout.to_mgpu(), _is_signed=True)

        return run(refs.codes.at[slot.number], refs.code_scales.at[slot.number], refs.warpgroup)

    @in_interpreter(forms.decode)
    def decode(self, refs, loaded: jax.Array) -> jax.Array:
        """`(64, 64)` bfloat16: the `interleaved` columns of a loaded block, along k, as a slot has them."""
        result = plgpu.ShapeDtypeStruct((BLOCK, K_STEP), jnp.bfloat16, layout=plgpu.Layout.WGMMA)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(CODES), self.layout), return_type=result)
        def run(ctx, codes, loaded):
            # A zero of which the compiler does not know it: it would move constants to registers anew for each use.
            zero = value("shr.u32 $0, $1, 31;", shared_address(codes, thread_index()), constraints="=r,r")
            pair = ir.VectorType.get((2,), ir.BF16Type.get())
            registers = [llvm.extractelement(register, c32(0)) for register in loaded.registers]
            codes, scales = registers[: self.code_registers], self.scales_of_steps(registers[self.code_registers :])
            decode = DECODE[self.form](zero, transposed=self.transposed)
            steps = zip(self.codes_of_steps(codes), scales, strict=True)
            numbers = [number for codes, scales in steps for number in decode(codes, *scales)]
            registers = np.array([llvm.bitcast(pair, number) for number in numbers], dtype=object)
            registers = registers.reshape(mgpu.WGMMA_LAYOUT.registers_shape((BLOCK, K_STEP)))
            return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

        return run(refs.codes, loaded)

    def codes_of_steps(self, codes: list) -> list:
        """A thread's loaded codes as registers for each 8 along k, of whose halves 4-bit codes are the lower one."""
        if len(codes) == EIGHTS:
            return codes
        return [half for both in codes for half in (both, arith.shrui(both, c32(16)))]

    def scales_of_steps(self, scales: list) -> list:
        """A thread's loaded scales as those of both its columns, for each 8 along k."""
        if self.form == "float8":
            return [scales * 2] * EIGHTS
        if self.form == "mxfp4":
            scales = [powers_of_two(pair) for pair in scales]
        if self.transposed:
            return [[pair] * 2 for pair in scales]
        apart = [[permuted_bytes(pair, pair, order) for order in (0x1010, 0x3232)] for pair in scales]
        return [apart[j * len(apart) // EIGHTS] for j in range(EIGHTS)]


class ThreadLoads:
    """A thread's part of a slot's codes: lane `4 g + t` of warp w has columns `16 w + 2 g` and the next of each block.

    Along k it has `8 j + 2 t` and the next, for each j.
    """

    def __init__(self, decoder: TileDecoder, codes, scales, warpgroup):
        self.lane = arith.andi(thread_index(), c32(31))
        self.g, self.t = arith.shrui(self.lane, c32(2)), arith.andi(self.lane, c32(3))
        self.warp = arith.shrui(thread_index(), c32(5))
        self.columns = sum32((self.warp, 16), (self.g, 2))
        self.decoder, self.warpgroup = decoder, warpgroup
        self.codes, self.scales = shared_address(codes, c32(0)), shared_address(scales, c32(0))

    def block(self, own: int) -> list:
        """The codes of a consumer's own block, and then its scales."""
        block = sum32((self.warpgroup, 1), (c32(1), 2 * own))
        of_weights = (self.warpgroup, own) if self.decoder.side_by_side == 2 else (block, 0)
        return [*self.codes_of(block), *self.scales_of(*of_weights)]

    def codes_of(self, block) -> list:
        """Codes of a block, of each 8 along k: 16 bits, or 32 of float8; see `codes_of_steps`."""
        block = sum32((self.codes, 1), (block, self.decoder.rows * BLOCK))
        return self.along_columns(block) if self.decoder.transposed else self.along_k(block)

    def along_k(self, block) -> list:
        """Rows of codes are along k: `ldmatrix` takes 8 of them at a time, of the 16 columns of a warp.

        A thread gets its two columns of rows 2 t and 2 t + 1, in the order that lanes name rows in. Of 8 bits these are
        neighbours along k. Of 4 bits a row has two k, and the order is such that they are rows t and t + 4 of the 8, of
        which each belongs to another 8 along k.
        """
        matrix, row = arith.shrui(self.lane, c32(3)), arith.andi(self.lane, c32(7))
        if self.decoder.form != "float8":
            row = sum32((arith.shrui(row, c32(1)), 1), (arith.andi(row, c32(1)), 4))
        chunk = arith.xori(self.warp, arith.shrui(row, c32(1)))
        first = sum32((block, 1), (matrix, 8 * BLOCK), (row, BLOCK), (chunk, 16))
        loads = [load_matrices(sum32((first, 1), (c32(1), i * BLOCK))) for i in range(0, self.decoder.rows, 32)]
        return [register for loaded in loads for register in loaded]

    def along_columns(self, block) -> list:
        """Rows of codes are along columns: a halfword has those of two k, for both columns, or for one of float8."""
        of_8_bits = self.decoder.form == "float8"
        row = self.columns if of_8_bits else sum32((self.warp, 8), (self.g, 1))
        first, swizzle = sum32((block, 1), (row, BLOCK), (self.t, 2)), arith.andi(arith.shrui(row, c32(1)), c32(3))

        def at(j: int, row: int = 0):
            """The halfword of a row after this thread's first one."""
            place, offset = arith.xori(swizzle, c32(j // 2)), row * BLOCK + j % 2 * 8
            return load("u16", sum32((first, 1), (place, 16), (c32(1), offset)))

        if of_8_bits:
            return [permuted_bytes(at(j), at(j, 1), 0x5410) for j in range(EIGHTS)]
        return [at(j) for j in range(EIGHTS)]

    def scales_of(self, block, side: int) -> list:
        """Scales of a block of one of the weights: of two neighbours, or one of float8.

        Those are of both columns, for each group along k; or, transposed, where the columns have the same one, of two
        neighbours along k.
        """
        decoder = self.decoder
        rows, columns = decoder.scales
        size = jnp.dtype(decoder.scale_dtype).itemsize
        scales = sum32((self.scales, 1), (c32(1), side * decoder.side_bytes))
        if decoder.form == "float8":
            return [load("b32", sum32((scales, 1), (block, REPEATS * size)))]
        if decoder.transposed:
            of_block = rows // BLOCKS
            row = sum32((block, of_block), (arith.shrui(self.warp, c32(1)), of_block - 1))
            first, apart = sum32((scales, 1), (row, columns * size), (self.t, 2 * size)), 8 * size
        else:
            first, apart = sum32((scales, 1), (block, BLOCK * size), (self.columns, size)), columns * size
        kind = "b32" if size == 2 else "u16"
        return [load(kind, sum32((first, 1), (c32(1), i * apart))) for i in range(decoder.scale_registers)]
