"""Rows of 8-bit numbers as tiles leave them: in 16-bit columns, two numbers of a row in each.

They are quantized pre-activations, or activations in e4m3 for the down projection.

A block has 128 columns of a row. Column c and c + 64 of it are a column of a panel, as far as they exist, so that a
block is one panel of 16-bit values: it is packed from two panels of a tile without moving a number between threads, and
leaves and arrives as every other panel does. The scales `(blocks, R)` of a tile's rows are next to each other.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import Quantized, quantization_scales
from pallas_kernels.hopper.inline import PANEL, pack_bytes
from pallas_kernels.hopper.panels import load_columns

BLOCK = 2 * PANEL


def empty_quantized(num_rows: int, n: int, dtype) -> Quantized:
    """Quantized rows of n columns, with the numbers in pairs of `dtype`, as the kernels know them."""
    return Quantized(jnp.zeros((num_rows, packed_width(n)), dtype), jnp.zeros((-(-n // BLOCK), num_rows), jnp.float32))


def packed_width(n: int) -> int:
    """16-bit columns that hold n columns of 8 bits, in pairs of a block."""
    whole, last = divmod(n, BLOCK)
    return whole * PANEL + min(last, PANEL)


def unpaired_column(place):
    """The column that is number `place` among those of 8 bits, or one past the last where a pair has no second."""
    column = place % BLOCK
    return place - column + column // 2 + column % 2 * PANEL


def as_dtype(pre_activations: tuple[Any, ...], dtype) -> tuple[Any, ...]:
    """Quantized pre-activations with the same bits in another 16-bit dtype.

    Integers, outside of kernels, are what nobody takes for NaN. To the compiler it is no operation.
    """
    return tuple(p._replace(values=lax.bitcast_convert_type(p.values, dtype)) for p in pre_activations)


def quantize_panels(low: jax.Array, high: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """A block from its two panels (64, 64) in float32: one of `dtype`, and the scales (64,)."""
    # By their bits, among which NaN's are the largest: XLA for CPUs, where this is interpreted, loses NaN in a max.
    bits = (lax.bitcast_convert_type(jnp.abs(panel), jnp.int32) for panel in (low, high))
    scales = quantization_scales(lax.bitcast_convert_type(jnp.maximum(*bits).max(axis=1), jnp.float32))
    factor = lax.broadcast_in_dim(1 / scales, low.shape, (0,))
    return pack_bytes(low, high, factor, dtype), scales


def load_quantized(panel, first_column: int, half: int, scales: jax.Array) -> jax.Array:
    """16 columns of one of a block's halves, from `first_column` of that on, in float32."""
    numbers = load_columns(panel, first_column, byte=half)
    return lax.broadcast_in_dim(scales, numbers.shape, (0,)) * numbers
