"""Operands of 8 bits, e4m3 with a scale for each row: what experts with `precision="fp8"` multiply.

A scale is a power of two, so that a decoded number has no more digits than the 8 bits have, and is exact in bfloat16.
(Noune et al., arXiv 2206.02915; Micikevicius et al., arXiv 2209.05433, for e4m3.)
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.contract import INFINITY_BITS, nothing_compressed

E4M3 = jnp.float8_e4m3fn

_MANTISSA_BITS, _EXPONENT_BIAS = 23, 127  # of float32
_LARGEST_EXPONENT = 7  # that a row's largest number comes to have; e4m3's largest is 448
_SMALLEST_FIELD = _LARGEST_EXPONENT + 1
_BEYOND_FOUR_DIGITS = 2 ** (_MANTISSA_BITS - 3) - 1


LARGEST_BOUND = 320
"""What is to be in 8 bits before it is known is at most this at its scale. Rounding the operands of the products before
makes a factor up to (1 + 1/16)² larger than its bound, and two factors 1.28 times; up to 448 there is room for 1.4."""


class Scaled(NamedTuple):
    """Numbers `values · scales`.

    Attributes:
      values: float8_e4m3fn; for Hopper's kernels two of them in each number of a 16-bit type, along the last axis.
      scales: float32, powers of two, one for each row along an axis; those of `bounded_scales` have four digits.
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


def norms(squares: Float[Array, "..."], count: int) -> Float[Array, "..."]:
    """Square roots of sums of `count` squares in float32, none too small: squares may have been lost below 2^-126."""
    return jnp.sqrt(squares + count * 2.0**-126)


def token_norms(x: Float[Array, "T d"]) -> Float[Array, " T"]:
    return norms(jnp.square(x.astype(jnp.float32)).sum(-1), x.shape[-1])


def column_norms(weight: Float[Array, "E d n"], dtype) -> Float[Array, "E n"]:
    """The norms of the columns of weights that are multiplied in `dtype`."""
    return norms(jnp.square(weight.astype(dtype).astype(jnp.float32)).sum(1), weight.shape[1])


def largest_of_experts(
    of_columns: Sequence[Float[Array, "E n"]], biases: Sequence[Float[Array, "E n"]]
) -> Float[Array, "E numbers"]:
    """Of each expert the largest norm of a column, for each projection, and the largest magnitude of a bias or 0."""
    largest = [of_projection.max(1) for of_projection in of_columns]
    largest += [jnp.abs(bias).max(1).astype(jnp.float32) for bias in biases] or [jnp.zeros_like(largest[0])] * len(
        largest
    )
    return jnp.stack(largest, 1)


def bounded_scales(bound: Callable[..., Array], of_tokens: Array, largest: Sequence[Any]) -> Array:
    """Scales for activations that are not known yet, a row each: so that none comes to lie above 448.

    No pre-activation is larger than the norm of its token times that of its column of weights (Cauchy-Schwarz), plus a
    bias. A scale has four digits, rounded up, as e4m3 has: a decoded number is exact in bfloat16. Where a bound is not
    finite, the scale is NaN.

    Args:
      bound: of the activation, by the bounds of its pre-activations.
      of_tokens: norms of the rows' tokens.
      largest: what `largest_of_experts` gives of the rows' expert.
    """
    count = len(largest) // 2
    most = bound(*(of_tokens * norm + bias for norm, bias in zip(largest[:count], largest[count:], strict=True)))
    bits = lax.bitcast_convert_type(most * (1 / LARGEST_BOUND), jnp.int32)
    scales = lax.bitcast_convert_type((bits + _BEYOND_FOUR_DIGITS) & ~_BEYOND_FOUR_DIGITS, jnp.float32)
    scales = jnp.where(scales > 2.0**-118, scales, jnp.full_like(scales, 2.0**-118))  # or its inverse would overflow
    return jnp.where(most < jnp.inf, scales, jnp.full_like(scales, jnp.nan))


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
    own: dict[str, Any] = {n: partial(getattr(kernels, n), fp8=True) for n in ("up_projection", "down_backward")}
    own |= {"down_operands": down_operands, "up_operands": up_operands, "decodes": nothing_compressed}
    return _Family(vars(kernels) | own)


def rounding_operands(kernels: Any) -> Any:
    """`in_8_bits` for a family that has no such products: operands are rounded, and the arithmetic stays what it is."""

    def up_projection(x, weights, biases, groups, *, bound=None, **options):
        scales = None
        if bound:
            largest = largest_of_experts([column_norms(w, x.dtype) for w in weights], biases)
            scales = partial(bounded_scales, bound), token_norms(x), largest
        (x,), weights = rounded(-1, x), tuple(rounded(1, w)[0] for w in weights)
        return kernels.scaled_up_projection(x, weights, biases, groups, scales, **options)

    def down_operands(hidden, weights):
        weights = [rounded(1, w)[0] for w in weights]
        if not isinstance(hidden, Scaled):
            return rounded(-1, hidden)[0], weights
        values, scales = lax.optimization_barrier(hidden)
        return (values.astype(jnp.float32) * scales).astype(weights[0].dtype), weights

    def down_backward(dy, w_down, *args, **options):
        return kernels.down_backward(*rounded(-1, dy), *rounded(2, w_down), *args, **options)

    def up_operands(d_pre_activations, weights, in_place=False):
        del in_place
        return rounded(-1, *d_pre_activations), [rounded(2, *of_block) for of_block in weights]

    own = (up_projection, down_operands, down_backward, up_operands)
    return _Family(vars(kernels) | {operation.__name__: operation for operation in own})
