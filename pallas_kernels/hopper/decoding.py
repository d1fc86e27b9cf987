"""Compressed weights of experts, decoded on their way to the tensor cores, in the registers of those who multiply.

A k step's codes and scales come to its slot by bulk copies, a quarter or half of the bytes that numbers would be. The
product is transposed: the weights are the left operand of a wgmma, which it takes from registers, and the rows are the
right one. So no number of a weight is ever in memory, and a consumer decodes under the products of what it decoded
before. It has every other block of 64 of a tile's columns; a k step of a block is (64, 64) numbers.

A register of the left operand has two numbers of one column, neighbours along k, and a thread has those of two columns.
These are neighbours, too: of every 16 columns of a block the even ones come first (`interleaved`), then the odd ones.
So a thread loads 16 bits of 4-bit codes at once, four numbers, and stores two columns of a result at once.
"""

# pyright: reportCallIssue=false, reportAbstractUsage=false, reportArgumentType=false

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.hopper import inline_interpreter as forms
from pallas_kernels.hopper.codes import DECODE, powers_of_two, sum32
from pallas_kernels.hopper.inline import (
    K_STEP,
    SCALAR,
    c32,
    load,
    permuted_bytes,
    scalar,
    shared_address,
    thread_index,
    value,
)
from pallas_kernels.mosaic.interpreter import in_interpreter
from pallas_kernels.mosaic.row_groups import TILE_COLUMNS

REGISTERS = (72, 216)
"""Of a producer's thread, and of a consumer's."""

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
        self.copies = 2 if transposed else BLOCKS + side_by_side  # bulk copies of a k step
        if self.form == "float8":
            self.scales = 1, LEAST_COPY // 4
        else:
            self.scales = (TILE_COLUMNS // group, K_STEP) if transposed else (K_STEP // group, self.width)
        self.scale_dtype = self.coding.dtypes[1]
        # Of the scales of one of the weights side by side.
        self.side_bytes = int(np.prod(self.scales)) * jnp.dtype(self.scale_dtype).itemsize
        self.slot_bytes = BLOCKS * self.rows * BLOCK + side_by_side * self.side_bytes

    def operands(self, weight: Any) -> tuple[jax.Array, jax.Array]:
        """Codes and scales as the kernel takes them.

        Scales of float8 are those of each block and k step, repeated: a copy begins at a multiple of 16 bytes.
        """
        codes, scales = lax.bitcast_convert_type(weight.values, jnp.uint8), weight.scales
        if self.form == "float8":
            scales = scales.swapaxes(1, 2) if self.transposed else scales
            scales = jnp.repeat(jnp.repeat(scales, 2, axis=1), 2 * REPEATS, axis=2)
            scales = jnp.pad(scales, ((0, 0), (0, 0), (0, -scales.shape[2] % self.scales[1])))
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
                of_each = BLOCKS // self.side_by_side
                for block in range(of_each):
                    part = codes.at[expert, pl.ds(k * self.rows, self.rows), pl.ds(column + block * BLOCK, BLOCK)]
                    slot.fetch(part, own.at[pl.ds((i * of_each + block) * self.rows, self.rows)])
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

    @in_interpreter(forms.decode)
    def decode(self, refs, slot, own: int) -> jax.Array:
        """`(64, 64)` bfloat16: the `interleaved` columns of a consumer's own block, along k, as a slot has them."""
        result = plgpu.ShapeDtypeStruct((BLOCK, K_STEP), jnp.bfloat16, layout=plgpu.Layout.WGMMA)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(CODES), plgpu.RefType(), SCALAR), return_type=result)
        def run(ctx, codes, scales, warpgroup):
            pair = ir.VectorType.get((2,), ir.BF16Type.get())
            numbers = Thread(self, codes, scales, scalar(warpgroup)).numbers(own)
            registers = np.array([llvm.bitcast(pair, r) for r in numbers], dtype=object)
            registers = registers.reshape(mgpu.WGMMA_LAYOUT.registers_shape((BLOCK, K_STEP)))
            return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

        return run(refs.codes.at[slot.number], refs.code_scales.at[slot.number], refs.warpgroup)


class Thread:
    """A thread's part of a slot's codes: lane `4 g + t` of warp w has columns `16 w + 2 g` and the next of each block.

    Along k it has `8 j + 2 t` and the next, for each j.
    """

    def __init__(self, decoder: TileDecoder, codes, scales, warpgroup):
        lane = arith.andi(thread_index(), c32(31))
        self.g, self.t = arith.shrui(lane, c32(2)), arith.andi(lane, c32(3))
        self.warp = arith.shrui(thread_index(), c32(5))
        self.columns = sum32((self.warp, 16), (self.g, 2))
        self.decoder, self.warpgroup = decoder, warpgroup
        self.codes, self.scales = shared_address(codes, c32(0)), shared_address(scales, c32(0))
        # A zero of which the compiler does not know it: it would move constants to registers anew for each use.
        zero = value("shr.u32 $0, $1, 31;", sum32((self.codes, 1), (self.columns, 1)), constraints="=r,r")
        self.decode = DECODE[decoder.form](zero, transposed=decoder.transposed)

    def numbers(self, own: int) -> list:
        """The left operand's registers of a block: of each 8 along k, those of the first column, then of the second."""
        block = sum32((self.warpgroup, 1), (c32(1), 2 * own))
        of_weights = (self.warpgroup, own) if self.decoder.side_by_side == 2 else (block, 0)
        codes, scales = self.codes_of(block), self.scales_of(*of_weights)
        loaded = [(codes(j), scales(j)) for j in range(K_STEP // 8)]
        return [pair for codes, scales in loaded for pair in self.decode(*codes, *scales)]

    def codes_of(self, block) -> Callable[[int], list]:
        """Loads this thread's codes of a block, of each 8 along k: 16 bits of 4-bit codes, or twice as many of 8 bits.

        Those are of the first k of both columns, and of the second; or, transposed, of both k for each column.
        """
        decoder, of_8_bits = self.decoder, self.decoder.form == "float8"
        block = sum32((self.codes, 1), (block, decoder.rows * BLOCK))
        if decoder.transposed:
            row = self.columns if of_8_bits else sum32((self.warp, 8), (self.g, 1))
            first, chunk = sum32((block, 1), (row, BLOCK), (self.t, 2)), c32(0)
        else:
            row = sum32((self.t, 2 if of_8_bits else 1))
            first, chunk = sum32((block, 1), (row, BLOCK), (self.g, 2)), self.warp
        swizzle = arith.xori(chunk, arith.andi(arith.shrui(row, c32(1)), c32(3)))

        def at(j: int, row: int = 0):
            """The halfword of a row after this thread's first one."""
            if decoder.transposed:
                place, offset = arith.xori(swizzle, c32(j // 2)), row * BLOCK + j % 2 * 8
            else:
                row += j * (8 if of_8_bits else 4)
                place, offset = arith.xori(swizzle, c32(row // 2 % 4)), row * BLOCK
            return load("u16", sum32((first, 1), (place, 16), (c32(1), offset)))

        return lambda j: [at(j, row) for row in range(2 if of_8_bits else 1)]

    def scales_of(self, block, side: int) -> Callable[[int], list]:
        """Loads this thread's scales of a block of one of the weights: for each 8 along k, those of both columns.

        They are bfloat16, two in a register, or one of float32.
        """
        decoder = self.decoder
        rows, columns = decoder.scales
        size = jnp.dtype(decoder.scale_dtype).itemsize
        scales = sum32((self.scales, 1), (c32(1), side * decoder.side_bytes))
        if decoder.form == "float8":
            scale = load("b32", sum32((scales, 1), (block, REPEATS * size)))
            return lambda j: [scale, scale]
        if decoder.transposed:  # neighbours along k have different ones, and a thread's columns the same
            of_block = rows // BLOCKS
            row = sum32((block, of_block), (arith.shrui(self.warp, c32(1)), of_block - 1))
            first = sum32((scales, 1), (row, columns * size), (self.t, 2 * size))
            return lambda j: [self.two_scales(sum32((first, 1), (c32(1), 8 * j * size)))] * 2
        first = sum32((scales, 1), (block, BLOCK * size), (self.columns, size))
        both = [self.two_scales(sum32((first, 1), (c32(1), row * columns * size))) for row in range(rows)]
        apart = [[permuted_bytes(pair, pair, order) for order in (0x1010, 0x3232)] for pair in both]
        return lambda j: apart[j * rows // (K_STEP // 8)]

    def two_scales(self, address):
        """Two scales that are neighbours, as bfloat16."""
        if self.decoder.form == "nf4":
            return load("b32", address)
        return powers_of_two(load("u16", address))
