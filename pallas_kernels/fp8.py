"""Operands of 8 bits, e4m3 with a scale for each row: what experts with `precision="fp8"` multiply.

A scale is a power of two, so that a decoded number has no more digits than the 8 bits have, and is exact in bfloat16.
(Noune et al., arXiv 2206.02915; Micikevicius et al., arXiv 2209.05433, for e4m3.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.codings import is_quantized
from pallas_kernels.contract import INFINITY_BITS

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


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "forward", "backward", "norms"],
    meta_fields=["rows_dtype", "bounded"],
)
@dataclass(frozen=True)
class CastWeight:
    """Matrices `(..., a, b)` of experts with what products of 8 bits take in their place, made once for many passes.

    Attributes:
      weight: the matrices, for their gradients; None where nobody asks for those.
      forward: what is multiplied by rows with a columns, `(..., b, a)`, as the family that made it stores it.
      backward: what is multiplied by rows with b columns, `(..., a, b)`, in the same way.
      norms: those of the columns, `(..., b)`; None where nothing is bounded by them.
      rows_dtype: that of the rows before they are cast.
      bounded: whether activations are in 8 bits before they are known, see `bounded_scales`.
    """

    weight: Any
    forward: Scaled
    backward: Scaled
    norms: Float[Array, "..."] | None
    rows_dtype: Any
    bounded: bool

    @property
    def shape(self) -> tuple[int, ...]:
        values = self.backward.values
        return (*values.shape[:-1], values.shape[-1] * values.dtype.itemsize)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return self.rows_dtype if self.weight is None else self.weight.dtype


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


def column_norms(weight: Any, dtype) -> Float[Array, "E n"]:
    """The norms of the columns of weights `(E, d, n)` that are multiplied in `dtype`."""
    if isinstance(weight, CastWeight):
        assert weight.norms is not None
        return weight.norms
    return norms(jnp.square(to_round(weight, dtype).astype(jnp.float32)).sum(1), weight.shape[1])


def to_round(weight: Any, dtype) -> Float[Array, "E a b"]:
    """The numbers that are rounded to 8 bits: those of float8 in float32, all others as they would be multiplied."""
    return weight.astype(jnp.float32 if is_float8(weight) else dtype)


def is_float8(weight: Any) -> bool:
    """Whether the weight is compressed, in e4m3 with a scale for each block."""
    return is_quantized(weight) and weight.form == "float8"


def are_float8(weights: Sequence[Any], _) -> bool:
    """`decodes` of kernels in 8 bits: of compressed weights they take those that have 8 bits themselves."""
    return all(map(is_float8, weights))


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


def in_8_bits(kernels: Any, **operations: Callable) -> Any:
    """The family with its row products in 8 bits: up and down projection, and the gradients of rows.

    Weight gradients take what is not rounded. `operations` are `down_operands`, `up_operands` and `cast_weights`.
    """
    own: dict[str, Any] = {n: partial(getattr(kernels, n), fp8=True) for n in ("up_projection", "down_backward")}
    return _Family(vars(kernels) | own | operations | {"decodes": are_float8})


def rounding_operands(kernels: Any) -> Any:
    """`in_8_bits` for a family that has no such products: operands are rounded, and the arithmetic stays what it is."""

    def forward(weight, dtype):
        if isinstance(weight, CastWeight):
            return decoded(weight.forward, dtype).swapaxes(1, 2)
        return rounded(1, to_round(weight, dtype))[0].astype(dtype)

    def backward(weights, dtype):
        if isinstance(weights[0], CastWeight):
            return tuple(decoded(weight.backward, dtype) for weight in weights)
        return tuple(w.astype(dtype) for w in rounded(2, *(to_round(weight, dtype) for weight in weights)))

    def decoded(scaled, dtype):
        values, scales = lax.optimization_barrier(scaled)  # or XLA would take two conversions for none
        return (values.astype(jnp.float32) * scales[..., None]).astype(dtype)

    def cast_weights(ups, down, dtype, bounded):
        def cast(weight, backward, of_columns=None):
            (forward,) = quantize(to_round(weight, dtype).swapaxes(1, 2))
            return CastWeight(weight, forward, backward, of_columns, jnp.dtype(dtype), bounded)

        shared = quantize(*(to_round(weight, dtype) for weight in ups))
        of_columns = [column_norms(weight, dtype) if bounded else None for weight in ups]
        return tuple(map(cast, ups, shared, of_columns)), cast(down, *quantize(to_round(down, dtype)))

    def up_projection(x, weights, biases, groups, *, bound=None, **options):
        scales = None
        if bound:
            largest = largest_of_experts([column_norms(w, x.dtype) for w in weights], biases)
            scales = partial(bounded_scales, bound), token_norms(x), largest
        (x,), weights = rounded(-1, x), tuple(forward(w, x.dtype) for w in weights)
        return kernels.scaled_up_projection(x, weights, biases, groups, scales, **options)

    def down_operands(hidden, weights):
        if not isinstance(hidden, Scaled):
            return rounded(-1, hidden)[0], [forward(w, hidden.dtype) for w in weights]
        dtype = weights[0].dtype
        values, scales = lax.optimization_barrier(hidden)
        return (values.astype(jnp.float32) * scales).astype(dtype), [forward(w, dtype) for w in weights]

    def down_backward(dy, w_down, *args, **options):
        return kernels.down_backward(*rounded(-1, dy), *backward([w_down], dy.dtype), *args, **options)

    def up_operands(d_pre_activations, weights, in_place=False):
        del in_place
        dtype = d_pre_activations[0].dtype
        return rounded(-1, *d_pre_activations), [backward(of_block, dtype) for of_block in weights]

    own = (up_projection, down_operands, down_backward, up_operands, cast_weights)
    return _Family(vars(kernels) | {operation.__name__: operation for operation in own} | {"decodes": are_float8})
