"""Numbers of public checkpoints, plain and compressed: pure functions of arrays, for any device.

A `Coding` says how a matrix is stored, so that any part of it can be read and decoded by itself.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from blaze_jax.huggingface import FLOAT8_BLOCK

MXFP4_BLOCK = 32
"""Values of MXFP4 that share a scale."""

MXFP4_NAN = 255
"""The scale of MXFP4 that is not a number."""


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
    pairs = jnp.stack([blocks & 15, blocks >> 4], axis=1)
    codes = pairs.reshape(-1, MXFP4_BLOCK, *blocks.shape[1:]).astype(jnp.int32)
    sign, power, half = codes >> 3, codes >> 1 & 3, codes & 1
    scale = scales[:, None].astype(jnp.int32)
    # 0.5 is half of 1: without a leading one, but with the same exponent as 1 and 1.5.
    exponent = jnp.where(power == 0, scale - 1, scale + power - 1)
    fraction = jnp.where(power == 0, 0, half << 6)
    too_small = (128 | fraction) >> jnp.clip(1 - exponent, 0, 8)
    bits = jnp.where(exponent > 0, exponent << 7 | fraction, too_small)
    bits = jnp.where(exponent > 254, 0x7F80, bits)
    bits = jnp.where(codes & 7 == 0, 0, bits) | sign << 15
    bits = jnp.where(scale == MXFP4_NAN, 0x7FC0, bits).reshape(-1, *blocks.shape[1:])
    if jnp.dtype(dtype) == jnp.bfloat16:
        return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32).astype(dtype)


def decode_float8(
    values: Float[Array, "rows columns"], scales: Float[Array, "row_blocks column_blocks"], dtype: DTypeLike
) -> Float[Array, "rows columns"]:
    """Returns `values · scale` of each block of 128 × 128, computed in float32 and rounded once to `dtype`."""
    for axis, size in enumerate(values.shape):
        scales = jnp.repeat(scales, FLOAT8_BLOCK, axis)
        scales = lax.slice_in_dim(scales, 0, size, axis=axis)
    return (values.astype(jnp.float32) * scales).astype(dtype)


class Coding(NamedTuple):
    """How the numbers of a matrix `(in, out)` are stored in one array, or in one with scales.

    Attributes:
      decode: the numbers, as a function of the arrays and of their type.
      steps: for each array, rows and columns of the matrix that one of its entries stands for.
    """

    decode: Callable[..., Array]
    steps: tuple[tuple[int, int], ...]


def _as_they_are(values: Array, dtype: DTypeLike) -> Array:
    return values.astype(dtype)


UNCODED = Coding(_as_they_are, ((1, 1),))
MXFP4 = Coding(decode_mxfp4, ((2, 1), (MXFP4_BLOCK, 1)))
FLOAT8 = Coding(decode_float8, ((1, 1), (FLOAT8_BLOCK, FLOAT8_BLOCK)))
