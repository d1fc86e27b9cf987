"""Combine: the weighted sum of each token's rows, for a block of columns."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.contract import accumulator_dtype


def combine(
    rows: Float[Array, "R columns"],
    token_index_map: Int[Array, "T K"],
    weights: Float[Array, "T K"] | None,
    out: Float[Array, "T d"],
    first_column: Int[Array, ""] | int,
    addend: Float[Array, "T columns"] | None = None,
) -> Float[Array, "T d"]:
    """`out` with columns from `first_column` on replaced by `addend + Σ_k weights[t, k] · rows[token_index_map[t, k]]`.

    Summed wide in this order, and rounded once. Positions past the last row (empty slots) contribute zero, unless their
    weight is NaN. Without `weights` all are one, without `addend` it is zero.
    """
    wide = accumulator_dtype(rows.dtype)
    shape = token_index_map.shape[0], rows.shape[1]
    total = jnp.zeros(shape, wide) if addend is None else addend.astype(wide)
    for slot in range(token_index_map.shape[1]):
        row = rows.at[token_index_map[:, slot]].get(mode="fill", fill_value=0).astype(wide)
        total += row if weights is None else weights[:, slot, None].astype(wide) * row
    return lax.dynamic_update_slice_in_dim(out, total.astype(out.dtype), first_column, axis=1)
