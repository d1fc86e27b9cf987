"""Numbers of bfloat16 from compressed ones, four at a time, with a few instructions of a thread.

A decoder of `DECODE` gives two registers of the left operand of a wgmma: each has the two numbers of a column that are
neighbours along k. Bytes of numbers of 4 bits are looked up, four by one instruction, in tables of eight.
"""

# pyright: reportArgumentType=false

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxlib.mlir.dialects import arith

from pallas_kernels.codings import E2M1, NORMAL_FLOAT4
from pallas_kernels.hopper.inline import c32, permuted_bytes, value


def sum32(*terms):
    """The sum of products of a register and a constant."""
    total = None
    for register, factor in terms:
        product = register if factor == 1 else arith.muli(register, c32(factor))
        total = product if total is None else arith.addi(total, product)
    return total


def times(numbers, scales):
    """Two products of bfloat16."""
    return value("mul.rn.bf16x2 $0, $1, $2;", numbers, scales, constraints="=r,r,r")


def bytes_of(numbers) -> list[np.ndarray]:
    """The lower bytes of numbers of bfloat16, and the upper ones."""
    bits = np.asarray(numbers, np.float32).astype(jnp.bfloat16).view(np.uint8)
    return [bits[0::2], bits[1::2]]


def lookup(table: np.ndarray, zero) -> Callable:
    """A function that gives the bytes of a table of 8 for four codes, of the lower half of a register.

    Where the upper one of a code's four bits is set, it is the byte's sign, repeated.
    """
    low, high = map(c32, np.ascontiguousarray(table).view(np.int32).tolist())
    low = arith.addi(low, zero)
    return lambda codes: value("prmt.b32 $0, $1, $2, $3;", low, high, codes, constraints="=r,r,r,r")


def scaled(low, high, scales: list, transposed: bool) -> list:
    """The numbers of two columns, by the lower and upper bytes of four, times their scales.

    Codes of a byte, which follow each other, are of one column; or, transposed, of one k.
    """
    orders = (0x6240, 0x7351) if transposed else (0x5140, 0x7362)
    return [times(permuted_bytes(low, high, order), scale) for order, scale in zip(orders, scales, strict=True)]


def nf4_decoder(zero, *, transposed: bool) -> Callable:
    """A function of four codes and the scales of two columns; see `scaled`."""
    tables = []
    for table in bytes_of(NORMAL_FLOAT4):
        # Of the other table there comes a sign, repeated: those of the first are undone in the second, which has none.
        last_codes = table[8:] ^ np.where(table[:8] >> 7, 255, 0).astype(np.uint8)
        tables.append((lookup(table[:8], zero), lookup(last_codes[::-1], zero)))
    minus_one = arith.addi(zero, c32(-1))

    def decode(codes, *scales):
        # Every bit is flipped, by a unit that has less to do than the one of bits.
        flipped = value("mad.lo.s32 $0, $1, $2, $2;", codes, minus_one, constraints="=r,r,r")
        low, high = (arith.xori(first(codes), last(flipped)) for first, last in tables)
        return scaled(low, high, list(scales), transposed)

    return decode


def mxfp4_decoder(zero, *, transposed: bool) -> Callable:
    """See `nf4_decoder`. Magnitudes are looked up, and so are signs, all ones behind the place where one belongs."""
    lower, upper = (lookup(table, zero) for table in bytes_of(E2M1))
    repeated = lookup(np.full(8, 128, np.uint8), zero)

    def decode(codes, *scales):
        magnitudes = arith.andi(codes, c32(0x7777))
        signs = arith.andi(arith.shli(repeated(codes), c32(1)), c32(-0x7F7F7F80))
        return scaled(lower(magnitudes), arith.ori(upper(magnitudes), signs), list(scales), transposed)

    return decode


def powers_of_two(exponents):
    """The scales of two exponents, of the lower bytes of a register: 0 is 2^-127, and 255 is NaN."""
    text = (
        "{ .reg .b32 powers, least, zero; mov.b32 least, 0x00400040; mov.b32 zero, 0; shr.u32 powers, $1, 1; "
        "max.bf16x2 least, powers, least; fma.rn.bf16x2 $0, powers, zero, least; }"
    )
    return value(text, permuted_bytes(exponents, c32(0), 0x1404), constraints="=r,r")


def float8_decoder(zero, *, transposed: bool) -> Callable:
    """A function of four codes and the scale of all; each product is rounded from float32.

    Codes that follow each other are of one k, those of two columns; or, transposed, of one column.
    """
    del zero
    text = (
        "{{ .reg .b16 low, high; .reg .b32 both; .reg .f32 a, b; mov.b32 {{low, high}}, $1; "
        "cvt.rn.f16x2.e4m3x2 both, {half}; mov.b32 {{low, high}}, both; cvt.f32.f16 a, low; cvt.f32.f16 b, high; "
        "mul.rn.f32 a, a, $2; mul.rn.f32 b, b, $2; cvt.rn.bf16x2.f32 $0, b, a; }}"
    )

    def decode(codes, scale, _):
        codes = codes if transposed else permuted_bytes(codes, codes, 0x3120)
        return [value(text.format(half=half), codes, scale, constraints="=r,r,r") for half in ("low", "high")]

    return decode


DECODE = {"nf4": nf4_decoder, "mxfp4": mxfp4_decoder, "float8": float8_decoder}
