"""Weight and bias gradients: products that contract over an expert's rows, the gather on the contracted dimension."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.contract import Dispatch, accumulator_dtype
from pallas_kernels.xla.row_groups import gather_rows, product, read_own_rows, read_rows, sum_rows


def _column_sums(rows: Float[Array, "B C a"]) -> Float[Array, "B a"]:
    return rows.sum(1, dtype=accumulator_dtype(rows.dtype))


def up_weight_gradients(
    x: Float[Array, "T d"],
    d_pre_activations: tuple[Float[Array, "R n"], ...],
    groups: Dispatch,
    *,
    dtypes: tuple,
    bias_dtypes: tuple,
) -> tuple[tuple[Float[Array, "E d n"], ...], tuple[Float[Array, "E n"], ...]]:
    """`X_gᵀ · dP` per projection, in one pass over the gathered token rows, and the bias gradients.

    Args:
      x: tokens.
      d_pre_activations: gradients of the gate and up (or the only) pre-activations.
      groups: the rows by expert.
      dtypes: of the weight gradients, one per projection.
      bias_dtypes: of the bias gradients, one per projection, or empty: none are computed.
    """
    num_experts, (d, n) = groups.num_experts, (x.shape[1], d_pre_activations[0].shape[1])

    def terms(tile):
        tokens = gather_rows(x, groups, tile)
        grads = [read_own_rows(p, tile) for p in d_pre_activations]
        biases = [_column_sums(g) for g in grads] if bias_dtypes else []
        return (*(product(tokens, g, 1, 1) for g in grads), *biases)

    out = [jax.ShapeDtypeStruct((num_experts, d, n), t) for t in dtypes]
    out += [jax.ShapeDtypeStruct((num_experts, n), t) for t in bias_dtypes]
    grads = sum_rows(groups, terms, tuple(out), x, d_pre_activations)
    return grads[: len(dtypes)], grads[len(dtypes) :]


def down_weight_gradients(
    weighted_hidden: Float[Array, "R n"],
    dy: Float[Array, "T d"],
    row_weights: Float[Array, " R"],
    groups: Dispatch,
    *,
    dtype,
    bias_dtype,
) -> tuple[Float[Array, "E n d"], Float[Array, "E d"] | None]:
    """`(weights · A)ᵀ · dy_g`, and the down bias gradient `Σ weights · dy_g` where `bias_dtype` is not None."""
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
    grads = sum_rows(groups, terms, tuple(out), weighted_hidden, dy, row_weights)
    return grads[0], grads[1] if bias_dtype is not None else None
