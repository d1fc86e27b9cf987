"""Compressed numbers, of public checkpoints and of frozen weights in memory: pure functions of arrays, for any device.

A `Coding` says how a matrix is stored, so that any part of it can be read and decoded by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import batched, pairwise
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt8

FLOAT8_BLOCK = 128
"""Rows, and columns, of float8 that share a scale, in the files of DeepSeek-V3 and of Qwen."""

MXFP4_BLOCK = 32
"""Values of MXFP4 that share a scale."""

MXFP4_NAN = 255
"""The scale of MXFP4 that is not a number."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of 4 bits (E2M1), by their lower three."""

NF4_GROUP = 64
"""Values of NF4 that share a scale."""

NORMAL_FLOAT4 = tuple(
    float(np.float32(value).astype(jnp.bfloat16))
    for value in (
        *(-1.0, -0.39491748809814453, -0.6961928009986877, -0.5250730514526367),
        *(0.07958029955625534, 0.33791524171829224, 0.16093020141124725, 0.24611230194568634),
        *(-0.28444138169288635, -0.09105003625154495, -0.18477343022823334, -0.0),
        *(0.44070982933044434, 1.0, 0.5626170039176941, 0.7229568362236023),
    )
)
"""The values of the NormalFloat of 4 bits, by code: quantiles of a normal distribution (QLoRA, arXiv 2305.14314).

They are rounded to bfloat16, so that its product with a scale is the number that float32 would be rounded to. Codes c
and c + 8 have the same sign and the same last bit of the exponent: kernels look up each byte of a value with the lower
three bits of its code, in two tables whose other bits then cancel.
"""

_IN_ORDER = sorted(range(16), key=NORMAL_FLOAT4.__getitem__)
"""The codes of NF4 by value."""

_E4M3_MAX = 448.0


def decode_mxfp4(
    blocks: UInt8[Array, "bytes n"], scales: UInt8[Array, "blocks n"], dtype: DTypeLike = jnp.bfloat16
) -> Float[Array, "values n"]:
    """Returns numbers of MXFP4, exactly: two of 4 bits (E2M1) in a byte, the lower bits first, times 2^(scale - 127).

    A scale of 255 is NaN, as the Open Compute Project defines it. bfloat16 has room for every such number, also those
    smaller than its normal ones. They are put together from bits, because devices may take such small ones for zero.

    Args:
      blocks: 16 bytes, 32 numbers, for each scale, along the first axis.
      scales: the exponents.
      dtype: the result's type; bfloat16 and float32 are exact.
    """
    codes = _halves(blocks).reshape(-1, MXFP4_BLOCK, *blocks.shape[1:]).astype(jnp.int32)
    sign, power, half = codes >> 3, codes >> 1 & 3, codes & 1
    scale = scales[:, None].astype(jnp.int32)
    # 0.5 is half of 1: without a leading one, but with the same exponent as 1 and 1.5.
    exponent = jnp.where(power == 0, scale - 1, scale + power - 1)
    fraction = _select(power == 0, 0, half << 6)
    too_small = (128 | fraction) >> jnp.clip(1 - exponent, 0, 8)
    bits = jnp.where(exponent > 0, exponent << 7 | fraction, too_small)
    bits = _select(exponent > 254, 0x7F80, bits)
    bits = _select(codes & 7 == 0, 0, bits) | sign << 15
    bits = _select(scale == MXFP4_NAN, 0x7FC0, bits).reshape(-1, *blocks.shape[1:])
    if jnp.dtype(dtype) == jnp.bfloat16:
        return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32).astype(dtype)


def decode_float8(
    values: Float[Array, "rows columns"], scales: Float[Array, "row_blocks column_blocks"], dtype: DTypeLike
) -> Float[Array, "rows columns"]:
    """Returns `values · scale` of each block of 128 × 128, computed in float32 and rounded once to `dtype`."""
    return (values.astype(jnp.float32) * _over_blocks(scales, values.shape)).astype(dtype)


def decode_nf4(
    codes: UInt8[Array, "bytes n"], scales: Float[Array, "groups n"], dtype: DTypeLike
) -> Float[Array, "values n"]:
    """Returns numbers of NF4: two codes in a byte, the lower bits first, times the scale of 64 along the first axis.

    Codes are places in `NORMAL_FLOAT4`.
    """
    pairs = _halves(codes).reshape(-1, NF4_GROUP, *codes.shape[1:]).astype(jnp.int32)
    numbers: list = np.array(NORMAL_FLOAT4, np.float32).view(np.int32).tolist()
    for bit in range(4):  # selections: a GPU would look each number up in memory otherwise
        is_odd = (pairs >> bit & 1).astype(bool)
        choose = jnp.where if bit else _select  # the first is among constants
        numbers = [choose(is_odd, odd, even) for even, odd in batched(numbers, 2)]
    decoded = lax.bitcast_convert_type(numbers[0], jnp.float32) * scales[:, None].astype(jnp.float32)
    return decoded.astype(dtype).reshape(-1, *codes.shape[1:])


def encode_mxfp4(values: Float[Array, "values n"]) -> tuple[UInt8[Array, "bytes n"], UInt8[Array, "blocks n"]]:
    """Returns the nearest numbers of MXFP4, ties to even, what is too large as the largest; see `decode_mxfp4`.

    A block's scale is the power of two by which its largest magnitude is from 4 to below 8, as the Open Compute Project
    recommends it.
    """
    groups = values.astype(jnp.float32).reshape(-1, MXFP4_BLOCK, *values.shape[1:])
    exponents = jnp.frexp(jnp.abs(groups).max(1))[1] - 3
    scales = jnp.clip(exponents + 127, 0, MXFP4_NAN - 1)
    magnitudes = jnp.ldexp(jnp.abs(groups), 127 - scales[:, None])
    ties = [(low + high) / 2 for low, high in pairwise(E2M1)]
    above = [magnitudes >= tie if code % 2 else magnitudes > tie for code, tie in enumerate(ties)]
    codes = sum(above, jnp.zeros(groups.shape, jnp.uint8)) | (groups < 0).astype(jnp.uint8) << 3
    return _in_bytes(codes.reshape(values.shape)), scales.astype(jnp.uint8)


def encode_float8(
    values: Float[Array, "rows columns"],
) -> tuple[Float[Array, "rows columns"], Float[Array, "row_blocks column_blocks"]]:
    """Returns numbers of e4m3, of which the largest of each block of 128 × 128 is 448, and what they are times."""
    values = values.astype(jnp.float32)
    padded = jnp.pad(jnp.abs(values), [(0, -size % FLOAT8_BLOCK) for size in values.shape])
    rows, columns = (size // FLOAT8_BLOCK for size in padded.shape)
    largest = padded.reshape(rows, FLOAT8_BLOCK, columns, FLOAT8_BLOCK).max((1, 3))
    scales = jnp.where(largest > 0, largest / _E4M3_MAX, 1)
    codes = jnp.clip(values / _over_blocks(scales, values.shape), -_E4M3_MAX, _E4M3_MAX)
    return codes.astype(jnp.float8_e4m3fn), scales


def encode_nf4(values: Float[Array, "values n"]) -> tuple[UInt8[Array, "bytes n"], Float[Array, "groups n"]]:
    """Returns codes of the nearest numbers of NF4, whose scales, the largest magnitudes, are bfloat16."""
    groups = values.astype(jnp.float32).reshape(-1, NF4_GROUP, *values.shape[1:])
    scales = jnp.abs(groups).max(1).astype(jnp.bfloat16)
    shares = groups / jnp.where(scales > 0, scales, 1).astype(jnp.float32)[:, None]
    above = (shares > (low + high) / 2 for low, high in pairwise(sorted(NORMAL_FLOAT4)))
    place = sum(above, jnp.zeros(groups.shape, jnp.uint8))
    return _in_bytes(jnp.asarray(_IN_ORDER, jnp.uint8)[place].reshape(values.shape)), scales


def _halves(codes: UInt8[Array, "bytes n"]) -> UInt8[Array, "bytes 2 n"]:
    """Returns the lower and the upper bits of each byte; not stacked, or XLA would keep what is made of them apart."""
    shifts = 4 * lax.broadcasted_iota(jnp.uint8, (1, 2, *(1 for _ in codes.shape[1:])), 1)
    return codes[:, None] >> shifts & 15


def _select(condition: Bool[Array, "..."], constant: int, other: Int[Array, "..."] | int) -> Int[Array, "..."]:
    """Returns the constant where the condition holds, otherwise the other; by arithmetic on their bits.

    `jnp.where` makes an array of the constant, which jax moves out of a differentiated loop over layers: it would be
    there, as large as the result, as long as the loop runs.
    """
    return other ^ (-condition.astype(jnp.int32) & (other ^ constant))


def _in_bytes(codes: UInt8[Array, "values n"]) -> UInt8[Array, "bytes n"]:
    return codes[0::2] | codes[1::2] << 4


def _over_blocks(scales: Float[Array, "row_blocks column_blocks"], shape: tuple[int, ...]) -> Float[Array, "r c"]:
    """Returns the scale of each number of a matrix of that shape."""
    for axis, size in enumerate(shape):
        scales = lax.slice_in_dim(jnp.repeat(scales, FLOAT8_BLOCK, axis), 0, size, axis=axis)
    return scales


class Coding(NamedTuple):
    """How the numbers of a matrix `(in, out)` are stored in one array, or in one with scales.

    Attributes:
      decode: the numbers, as a function of the arrays and of their type.
      steps: for each array, rows and columns of the matrix that one of its entries stands for.
      encode: the arrays, as a function of the numbers; None for numbers as they are.
      dtypes: of the arrays.
    """

    decode: Callable[..., Array]
    steps: tuple[tuple[int, int], ...]
    encode: Callable[..., tuple[Array, ...]] | None = None
    dtypes: tuple[DTypeLike, ...] = ()


def _as_they_are(values: Array, dtype: DTypeLike) -> Array:
    return values.astype(dtype)


UNCODED = Coding(_as_they_are, ((1, 1),))
MXFP4 = Coding(decode_mxfp4, ((2, 1), (MXFP4_BLOCK, 1)), encode_mxfp4, (jnp.uint8, jnp.uint8))
FLOAT8 = Coding(decode_float8, ((1, 1), (FLOAT8_BLOCK, FLOAT8_BLOCK)), encode_float8, (jnp.float8_e4m3fn, jnp.float32))
NF4 = Coding(decode_nf4, ((2, 1), (NF4_GROUP, 1)), encode_nf4, (jnp.uint8, jnp.bfloat16))

Form = Literal["float8", "mxfp4", "nf4"]
CODINGS: dict[str, Coding] = {"float8": FLOAT8, "mxfp4": MXFP4, "nf4": NF4}


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=["form"])
@dataclass(frozen=True)
class QuantizedWeight:
    """Matrices `(in, out)` of experts, compressed; a pytree of two arrays with the same leading axes.

    Attributes:
      values: "float8": e4m3, `(..., in, out)`. "mxfp4" and "nf4": uint8, two numbers of 4 bits each along the inputs,
        the lower bits first, `(..., in / 2, out)`.
      scales: "float8": float32 for each 128 × 128 numbers, `(..., ⌈in / 128⌉, ⌈out / 128⌉)`. "mxfp4": powers of two,
        as uint8, for each 32 inputs, `(..., in / 32, out)`. "nf4": bfloat16 for each 64 inputs, `(..., in / 64, out)`.
      form: how they are stored.
    """

    values: Array
    scales: Array
    form: Form

    @property
    def coding(self) -> Coding:
        return CODINGS[self.form]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrices that are stored."""
        *experts, rows, columns = self.values.shape
        of_rows, of_columns = self.coding.steps[0]
        return (*experts, rows * of_rows, columns * of_columns)

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self) -> Any:
        """What it is decoded to where nobody says another type."""
        return jnp.dtype(jnp.bfloat16)

    def delayed(self, zero: UInt8[Array, ""]) -> "QuantizedWeight":
        """The same weight, whose codes exist when the zero does."""
        codes = lax.bitcast_convert_type(self.values, jnp.uint8) ^ zero
        return replace(self, values=lax.bitcast_convert_type(codes, self.values.dtype))

    def astype(self, dtype: DTypeLike) -> Float[Array, "... in out"]:
        """The numbers, decoded in one pass, each rounded once."""
        decode = partial(self.coding.decode, dtype=dtype)
        for _ in range(self.ndim - 2):
            decode = jax.vmap(decode)
        return decode(self.values, self.scales)


def numbers_of(
    weight: Any, first: Int[Array, ""] | int, number: int, dtype: DTypeLike, *, axis: int
) -> Float[Array, "E rows columns"]:
    """So many inputs (`axis` 1) or outputs (2) of matrices `(E, in, out)`, compressed or not, from the first one on.

    Both are multiples of those that share a scale, but of float8, of which everything is decoded first.
    """
    if not is_quantized(weight):
        return lax.dynamic_slice_in_dim(weight, first, number, axis=axis).astype(dtype)
    if weight.form == "float8":
        return lax.dynamic_slice_in_dim(weight.astype(dtype), first, number, axis=axis)
    values, scales = (
        lax.dynamic_slice_in_dim(array, first // steps[axis - 1], number // steps[axis - 1], axis=axis)
        for array, steps in zip((weight.values, weight.scales), weight.coding.steps, strict=True)
    )
    return replace(weight, values=values, scales=scales).astype(dtype)


def is_quantized(value: object) -> bool:
    return isinstance(value, QuantizedWeight)
