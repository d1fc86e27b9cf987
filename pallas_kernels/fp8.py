"""Operands of 8 bits, e4m3 with a scale for each row: what experts with `precision="fp8"` multiply.

A scale is a power of two, so that a decoded number has no more digits than the 8 bits have, and is exact in bfloat16.
(Noune et al., arXiv 2206.02915; Micikevicius et al., arXiv 2209.05433, for e4m3.)
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.contract import INFINITY_BITS

E4M3 = jnp.float8_e4m3fn

_MANTISSA_BITS, _EXPONENT_BIAS = 23, 127  # of float32
_LARGEST_EXPONENT = 7  # that a row's largest number comes to have; e4m3's largest is 448
_SMALLEST_FIELD = _LARGEST_EXPONENT + 1


class Scaled(NamedTuple):
    """Numbers `values · scales`.

    Attributes:
      values: float8_e4m3fn; for Hopper's kernels two of them in each number of a 16-bit type, along the last axis.
      scales: float32, powers of two, one for each row along an axis.
    """

    values: Float[Array, "..."]
    scales: Float[Array, "..."]


def quantize(*arrays: Float[Array, "..."], axis: int = -1) -> list[Scaled]:
    """The arrays in 8 bits, a scale for each row along `axis`, which they share.

    The largest number of a row comes to lie in [128, 256). A row with an infinite number, or NaN, has the scale NaN:
    what e4m3 cannot hold does not pass for a number.
    """
    largest = reduce(jnp.maximum, (jnp.max(jnp.abs(array), axis) for array in arrays)).astype(jnp.float32)
    largest = lax.bitcast_convert_type(largest, jnp.int32)
    scales, inverse = (lax.bitcast_convert_type(b, jnp.float32) for b in scale_field(largest, jnp.maximum))
    scales = jnp.where(largest >= INFINITY_BITS, jnp.nan, scales)

    def encode(array):
        return (array.astype(jnp.float32) * jnp.expand_dims(inverse, axis)).astype(E4M3)

    return [Scaled(encode(array), scales) for array in arrays]


def scale_field(largest, maximum):
    """The bits of a row's scale, and of its inverse, from those of its largest number, all as of float32."""
    field = maximum(largest >> _MANTISSA_BITS, _SMALLEST_FIELD) - _LARGEST_EXPONENT
    return field << _MANTISSA_BITS, ((field ^ -1) + (2 * _EXPONENT_BIAS + 1)) << _MANTISSA_BITS


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def rounded(axis: int, *arrays: Float[Array, "..."]) -> tuple[Float[Array, "..."], ...]:
    """What `quantize` makes of the arrays, decoded, in their dtypes. Its derivative is that of the identity."""
    # Behind a barrier, or XLA would take two conversions for none.
    scaled = lax.optimization_barrier(quantize(*arrays, axis=axis))
    decoded = (s.values.astype(jnp.float32) * jnp.expand_dims(s.scales, axis) for s in scaled)
    return tuple(value.astype(array.dtype) for value, array in zip(decoded, arrays, strict=True))


@rounded.defjvp
def _rounded_jvp(axis, primals, tangents):
    return rounded(axis, *primals), tuple(tangents)


class _Family:
    """A family of kernels made from another."""

    def __init__(self, operations):
        vars(self).update(operations)


def in_8_bits(kernels: Any, down_operands: Callable, up_operands: Callable) -> Any:
    """The family with its row products in 8 bits: up and down projection, and the gradients of rows.

    Weight gradients take what is not rounded.
    """
    own = {name: partial(getattr(kernels, name), fp8=True) for name in ("up_projection", "down_backward")}
    return _Family(vars(kernels) | own | {"down_operands": down_operands, "up_operands": up_operands})


def rounding_operands(kernels: Any) -> Any:
    """`in_8_bits` for a family that has no such products: operands are rounded, and the arithmetic stays what it is."""

    def up_projection(x, weights, *args, **options):
        (x,) = rounded(-1, x)
        return kernels.up_projection(x, tuple(rounded(1, w)[0] for w in weights), *args, **options)

    def down_operands(hidden, weights):
        return rounded(-1, hidden)[0], [rounded(1, w)[0] for w in weights]

    def down_backward(dy, w_down, *args, **options):
        return kernels.down_backward(*rounded(-1, dy), *rounded(2, w_down), *args, **options)

    def up_operands(d_pre_activations, weights, in_place=False):
        del in_place
        return rounded(-1, *d_pre_activations), [rounded(2, *of_block) for of_block in weights]

    own = (up_projection, down_operands, down_backward, up_operands)
    return _Family(vars(kernels) | {operation.__name__: operation for operation in own})
