"""The experts' products, forward and backward: exact arithmetic, no buffer wider than the caller asks for.

With `X_g` for the tokens of an expert's rows, the up projection is `P = X_g · W + b` for gate and up, or up alone, and
`A = activation(P)`; the down projection is `A · W_down + b_down`. Backward, the gradients of `P` and of the routing
weights and the weighted `A` come from `dy`; weight gradients contract over the rows, the input's gradient is
`Σ dP · Wᵀ`.

Kernels that fill rows take `into`, what the same call gave for other groups, or anything of that shape: rows which are
not in these groups keep what they hold there. Without it they hold anything.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.codings import numbers_of
from pallas_kernels.contract import Dispatch, Quantized, Sums, accumulator_dtype, quantization_scales
from pallas_kernels.fp8 import E4M3, Scaled
from pallas_kernels.xla.loops import (
    empty,
    gather_rows,
    map_rows,
    product,
    read_own_rows,
    read_rows,
    sum_rows,
    zeros,
)


def column_block(num_rows: int, d: int, n: int, num_experts: int, dtype) -> int:
    """The most columns of a block. The experts' outputs only ever exist as rows of that width.

    Args:
      num_rows: R, rows of all experts.
      d: width of a token.
      n: width of an expert.
      num_experts: E.
      dtype: that of the rows.
    """
    del num_rows, d, n, num_experts, dtype
    return 512


def _buffers(into, columns: Sequence[tuple[int, Any]], num_rows: int, *like) -> tuple[Array, ...]:
    """Row buffers for `map_rows`: those of `into`, or empty ones with so many columns of a dtype each."""
    return tuple(jax.tree.leaves(into)) or tuple(empty((num_rows, width), dtype, *like) for width, dtype in columns)


def up_projection(
    x: Float[Array, "T d"],
    weights: tuple[Float[Array, "E d n"], ...],
    biases: tuple[Float[Array, "E n"], ...],
    groups: Dispatch,
    *,
    activation: Callable[..., Array],
    keep_pre_activations: bool = True,
    quantize: bool = False,
    into: tuple[tuple[Float[Array, "R n"] | Quantized, ...], Float[Array, "R n"]] | None = None,
) -> tuple[tuple[Float[Array, "R n"] | Quantized, ...], Float[Array, "R n"]]:
    """Pre-activations and activation of every row.

    Args:
      x: tokens; the arithmetic runs in their dtype with wide accumulation.
      weights: `(w_gate, w_up)` of a gated activation, `(w_up,)` of an ungated one, any floating dtype.
      biases: as many as `weights`, or none.
      groups: the rows by expert.
      activation: elementwise function of the pre-activations.
      keep_pre_activations: whether the caller wants them; if not, they are written nowhere.
      quantize: whether those that are kept are `Quantized`, which happens to the accumulators.
      into: results of other groups, whose rows are kept, or None.

    Returns:
      The pre-activations (one array per weight; none unless kept) and the activation, in the dtype of `x`. The
      activation is computed from the accumulators, before the pre-activations are rounded.
    """
    options = {"activation": activation, "keep_pre_activations": keep_pre_activations, "quantize": quantize}
    return scaled_up_projection(x, weights, biases, groups, None, into=into, **options)


def scaled_up_projection(
    x: Float[Array, "T d"],
    weights: tuple[Float[Array, "E d n"], ...],
    biases: tuple[Float[Array, "E n"], ...],
    groups: Dispatch,
    hidden_scales: tuple[Callable[..., Array], Float[Array, " T"], Float[Array, "E numbers"]] | None,
    *,
    activation: Callable[..., Array],
    keep_pre_activations: bool = True,
    quantize: bool = False,
    into: tuple[tuple[Float[Array, "R n"] | Quantized, ...], Any] | None = None,
) -> tuple[tuple[Float[Array, "R n"] | Quantized, ...], Any]:
    """`up_projection` for `fp8.rounding_operands`, with the activation in 8 bits where `hidden_scales` are given.

    Those are a function and what it makes the scales of: a number for each token, and some for each expert. The
    activation and that of `into` are `Scaled` then.
    """
    wide, n = accumulator_dtype(x.dtype), weights[0].shape[-1]
    scales_of, of_tokens, *largest = hidden_scales or (None, x)

    def prepare(own):
        own_weights, own_biases, own_largest = parts_of(own)
        return (*(w.astype(x.dtype) for w in own_weights), *(b.astype(wide)[:, None] for b in own_biases), *own_largest)

    def parts_of(own):
        count = len(weights), len(weights) + len(biases)
        return own[: count[0]], own[count[0] : count[1]], own[count[1] :]

    def compute(own, tile, _):
        own_weights, own_biases, own_largest = parts_of(own)
        tokens = gather_rows(x, groups, tile)
        pre = [product(tokens, w, 2, 1) for w in own_weights]
        pre = [p + b for p, b in zip(pre, own_biases, strict=True)] if own_biases else pre
        kept = [quantized(p) if quantize else p for p in pre] if keep_pre_activations else []
        hidden = activation(*pre)
        if scales_of:
            scales = scales_of(
                gather_rows(of_tokens[:, None], groups, tile),
                list(jnp.moveaxis(own_largest[0], -1, 0)[..., None, None]),
            )
            hidden = Scaled((hidden.astype(x.dtype).astype(wide) * (1 / scales)).astype(E4M3), scales)
        return tuple(jax.tree.leaves((kept, hidden)))

    columns = ((n, jnp.int8), (-(-n // QUANTIZED_BLOCK), wide)) if quantize else ((n, x.dtype),)
    of_hidden = ((n, E4M3), (1, jnp.float32)) if hidden_scales else ((n, x.dtype),)
    columns = columns * (len(weights) * keep_pre_activations) + of_hidden
    buffers = _buffers(into, columns, groups.num_rows, x)
    of_experts = (*weights, *biases, *largest)
    results = map_rows(groups, of_experts, prepare, compute, buffers)
    kept, hidden = results[: -len(of_hidden)], results[-len(of_hidden) :]
    kept = tuple(map(Quantized, kept[::2], kept[1::2]) if quantize else kept)
    return kept, Scaled(*hidden) if hidden_scales else hidden[0]


QUANTIZED_BLOCK = 128
"""Columns that share a scale; the last block of a row may have fewer."""


def quantized(pre_activations: Float[Array, "*rows n"]) -> Quantized:
    """The numbers and their scales, `(*rows, n)` int8 and `(*rows, blocks)`."""
    blocks = _in_blocks(pre_activations)
    # By their bits, of which NaN has the most: XLA for CPUs loses one among others in some programs (jax 0.12).
    bits = lax.bitcast_convert_type(jnp.abs(blocks), jnp.int64 if blocks.dtype == jnp.float64 else jnp.int32)
    scales = quantization_scales(lax.bitcast_convert_type(bits.max(-1), blocks.dtype))
    numbers = jnp.round(blocks / scales[..., None]).astype(jnp.int8)
    return Quantized(numbers.reshape(*numbers.shape[:-2], -1)[..., : pre_activations.shape[-1]], scales)


def dequantized(quantized: Quantized) -> Float[Array, "*rows n"]:
    """The pre-activations that `quantized` made of, in the scales' dtype."""
    values, scales = quantized
    blocks = _in_blocks(values.astype(scales.dtype)) * scales[..., None]
    return blocks.reshape(*blocks.shape[:-2], -1)[..., : values.shape[-1]]


def _in_blocks(array: Float[Array, "*rows n"]) -> Float[Array, "*rows blocks 128"]:
    *rows, n = array.shape
    padding = [(0, 0)] * len(rows) + [(0, -n % QUANTIZED_BLOCK)]
    return jnp.pad(array, padding).reshape(*rows, -1, QUANTIZED_BLOCK)


def down_projection(
    hidden: Float[Array, "R n"],
    w_down: Float[Array, "E n d"],
    b_down: Float[Array, "E d"] | None,
    groups: Dispatch,
    first_column: Int[Array, ""] | int,
    num_columns: int,
    *,
    into: Float[Array, "R columns"] | None = None,
) -> Float[Array, "R columns"]:
    """Columns `first_column` to `first_column + num_columns` of every row's expert output, in the dtype of `hidden`."""
    wide = accumulator_dtype(hidden.dtype)

    def prepare(own):
        weight, *bias = own
        bias = (lax.dynamic_slice_in_dim(b, first_column, num_columns, axis=-1) for b in bias)
        weight = numbers_of(weight, first_column, num_columns, hidden.dtype, axis=2)
        return (weight, *(b.astype(wide)[:, None] for b in bias))

    def compute(own, tile, _):
        out = product(read_rows(hidden, tile), own[0], 2, 1)
        return (out if b_down is None else out + own[1],)

    weights = (w_down,) if b_down is None else (w_down, b_down)
    buffers = _buffers(into, [(num_columns, hidden.dtype)], groups.num_rows, hidden)
    return map_rows(groups, weights, prepare, compute, buffers)[0]


def down_backward(
    dy: Float[Array, "T d"],
    w_down: Float[Array, "E n d"],
    b_down: Float[Array, "E d"] | None,
    pre_activations: tuple[Float[Array, "R n"] | Quantized, ...],
    row_weights: Float[Array, " R"],
    groups: Dispatch,
    *,
    activation: Callable[..., Array],
    into: Float[Array, "R n"] | tuple[tuple[Float[Array, "R n"], ...], Float[Array, "R n"]] | None = None,
) -> tuple[tuple[Float[Array, "R n"], ...], Float[Array, "R n"], Float[Array, " R"]]:
    """Gradients of the pre-activations, the weighted activation, and each row's routing-weight gradient.

    Args:
      dy: gradient of the layer's output, gathered by row.
      w_down: down weights.
      b_down: down biases, or None.
      pre_activations: as saved by the up projection; the result takes their place in memory, unless `Quantized`.
      row_weights: routing weight of each row.
      groups: the rows by expert.
      activation: the elementwise function of the up projection.
      into: the weighted activation of other groups, whose rows are kept, or None; with `Quantized` pre-activations
        the gradients of those groups and then their weighted activation.

    Returns:
      `(d pre-activations, weights · activation, d row_weights)`, the first two in the dtype of `dy`, the last wide: the
      inner product of `dy` with the expert's output, without that output; zero for rows of no expert.
    """
    dtype = dy.dtype
    wide = accumulator_dtype(dtype)
    quantized = isinstance(pre_activations[0], Quantized)

    def prepare(own):
        return tuple(a.astype(dtype) for a in own)

    def compute(own, tile, rows):
        dy_rows = gather_rows(dy, groups, tile)
        d_hidden = product(dy_rows, own[0], 2, 2)
        hidden, activation_vjp = jax.vjp(
            activation, *(read(p, tile) for p in (pre_activations if quantized else rows[:-2]))
        )
        d_weight = (d_hidden * hidden).sum(-1, keepdims=True)
        if b_down is not None:
            d_weight += product(dy_rows, own[1][:, None], 2, 2)
        weight = read_rows(row_weights, tile).astype(wide)[..., None]
        values = (*(v.astype(dtype) for v in (*activation_vjp(weight * d_hidden), weight * hidden)), d_weight)
        # Every read of the tile before the first write: otherwise XLA copies whole buffers for each tile.
        return lax.optimization_barrier(values)

    def read(pre_activation, tile):
        own = jax.tree.map(lambda rows: read_rows(rows, tile), pre_activation)
        return dequantized(own) if quantized else own.astype(wide)

    weights = (w_down,) if b_down is None else (w_down, b_down)
    like = (dy, w_down, pre_activations, row_weights)
    results = len(pre_activations) * quantized + 1
    own = _buffers(into, [(w_down.shape[1], dtype)] * results, groups.num_rows, like)
    own: Any = own if quantized else (*pre_activations, *own)
    buffers = (*own, zeros((groups.num_rows, 1), wide, like))
    *d_pre_activations, weighted_hidden, d_row_weights = map_rows(groups, weights, prepare, compute, buffers)
    return tuple(d_pre_activations), weighted_hidden, d_row_weights[:, 0]


def up_backward(
    d_pre_activations: tuple[Float[Array, "R n"], ...],
    weights: tuple[Float[Array, "E d n"], ...],
    groups: Dispatch,
    first_column: Int[Array, ""] | int,
    num_columns: int,
    *,
    into: Float[Array, "R columns"] | None = None,
) -> Float[Array, "R columns"]:
    """`Σ dP · Wᵀ` over the projections: `num_columns` columns from `first_column` of every row's input gradient."""
    dtype = d_pre_activations[0].dtype

    def prepare(own):
        # Side by side along n: one product sums over the projections.
        columns = (numbers_of(w, first_column, num_columns, dtype, axis=1) for w in own)
        return (jnp.concatenate(list(columns), axis=2),)

    def compute(own, tile, _):
        return (product(jnp.concatenate([read_rows(p, tile) for p in d_pre_activations], axis=2), own[0], 2, 2),)

    buffers = _buffers(into, [(num_columns, dtype)], groups.num_rows, d_pre_activations)
    return map_rows(groups, weights, prepare, compute, buffers)[0]


def up_weight_gradients(
    x: Float[Array, "T d"] | tuple[Float[Array, "_ d"], ...],
    d_pre_activations: tuple[Float[Array, "R n"], ...],
    groups: Dispatch,
    *,
    dtypes: tuple,
    bias_dtypes: tuple,
    sums: Sums | None = None,
) -> tuple[tuple[Float[Array, "E d n"], ...], tuple[Float[Array, "E n"], ...]]:
    """`X_gᵀ · dP` per projection, in one pass over the gathered token rows, and the bias gradients.

    Args:
      x: tokens, in one array or in parts.
      d_pre_activations: gradients of the gate and up (or the only) pre-activations.
      groups: the rows by expert.
      dtypes: those of the weight gradients, one per projection.
      bias_dtypes: those of the bias gradients, one per projection, or empty: none are computed.
      sums: what the weight gradients are added to, one array per projection; None for no sums. The sums, whose dtype
        then counts, take the gradients' place in the result.
    """
    x = _joined(x)
    dtypes = sums.dtypes if sums else dtypes
    num_experts, (d, n) = groups.num_experts, (x.shape[1], d_pre_activations[0].shape[1])

    def terms(tile):
        tokens = gather_rows(x, groups, tile)
        grads = [read_own_rows(p, tile) for p in d_pre_activations]
        biases = [_column_sums(g) for g in grads] if bias_dtypes else []
        return (*(product(tokens, g, 1, 1) for g in grads), *biases)

    out = [jax.ShapeDtypeStruct((num_experts, d, n), t) for t in dtypes]
    out += [jax.ShapeDtypeStruct((num_experts, n), t) for t in bias_dtypes]
    grads = sum_rows(groups, terms, tuple(out), x, d_pre_activations, sums=sums)
    return grads[: len(dtypes)], grads[len(dtypes) :]


def down_weight_gradients(
    weighted_hidden: Float[Array, "R n"],
    dy: Float[Array, "T d"] | tuple[Float[Array, "_ d"], ...],
    row_weights: Float[Array, " R"],
    groups: Dispatch,
    *,
    dtype,
    bias_dtype,
    sums: Sums | None = None,
) -> tuple[Float[Array, "E n d"], Float[Array, "E d"] | None]:
    """`(weights · A)ᵀ · dy_g`, and the down bias gradient `Σ weights · dy_g` where `bias_dtype` is not None.

    With `sums`, of one array, the first is those with this gradient added, as in `up_weight_gradients`.
    """
    dy = _joined(dy)
    dtype = sums.dtypes[0] if sums else dtype
    num_experts, (n, d) = groups.num_experts, (weighted_hidden.shape[1], dy.shape[1])

    def terms(tile):
        dy_rows = gather_rows(dy, groups, tile)
        gradient = product(read_own_rows(weighted_hidden, tile), dy_rows, 1, 1)
        if bias_dtype is None:
            return (gradient,)
        weight = jnp.where(tile.mine, read_rows(row_weights, tile)[..., None], 0)
        return gradient, _column_sums(weight * dy_rows.astype(accumulator_dtype(dy.dtype)))

    out = [jax.ShapeDtypeStruct((num_experts, n, d), dtype)]
    out += [] if bias_dtype is None else [jax.ShapeDtypeStruct((num_experts, d), bias_dtype)]
    grads = sum_rows(groups, terms, tuple(out), weighted_hidden, dy, row_weights, sums=sums)
    return grads[0], grads[1] if bias_dtype is not None else None


def _joined(tokens) -> Float[Array, "T d"]:
    return jnp.concatenate(tokens) if isinstance(tokens, tuple) else tokens


def _column_sums(rows: Float[Array, "B C a"]) -> Float[Array, "B a"]:
    return rows.sum(1, dtype=accumulator_dtype(rows.dtype))
