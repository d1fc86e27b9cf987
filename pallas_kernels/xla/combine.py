"""Combine: the weighted sum of each token's rows."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.xla.row_groups import accumulator_dtype


def combine(
    rows: Float[Array, "R columns"], token_index_map: Int[Array, "T K"], weights: Float[Array, "T K"] | None
) -> Float[Array, "T columns"]:
    """`out[t] = Σ_k weights[t, k] · rows[token_index_map[t, k]]`, summed wide in slot order, in the dtype of `rows`.

    Positions past the last row (empty slots) contribute zero whatever their weight. Without `weights` all are one.
    """
    wide = accumulator_dtype(rows.dtype)
    total = jnp.zeros((token_index_map.shape[0], rows.shape[1]), wide)
    for slot in range(token_index_map.shape[1]):
        row = rows.at[token_index_map[:, slot]].get(mode="fill", fill_value=0).astype(wide)
        total += row if weights is None else weights[:, slot, None].astype(wide) * row
    return total.astype(rows.dtype)
