"""Backward of the up projection with respect to its input, for a block of columns."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.contract import Dispatch
from pallas_kernels.hopper.inline import K_STEP
from pallas_kernels.hopper.row_matmul import ROUNDED_ROWS, row_matmul
from pallas_kernels.mosaic.row_groups import TILE_COLUMNS, TILE_ROWS, TileSchedule
from pallas_kernels.mosaic.traced_once import traced_once
from pallas_kernels.tuning.parameters import TileTuning, find_tuning, shape_key


@traced_once("num_columns", "tuning")
def up_backward(
    d_pre_activations: tuple[Float[Array, "R n"], ...],
    weights: tuple[Float[Array, "E d n"], ...],
    groups: Dispatch[TileSchedule],
    first_column: Int[Array, ""] | int,
    num_columns: int,
    *,
    into: Float[Array, "R columns"] | None = None,
    tuning: TileTuning | None = None,
) -> Float[Array, "R columns"]:
    """`Σ dP · Wᵀ` over the projections, into one accumulator; see the portable twin.

    `into` holds results of the same call for other groups, whose rows are kept.
    """
    rows, n = d_pre_activations[0].shape
    steps_each = -(-n // K_STEP)
    dtype = d_pre_activations[0].dtype
    num_experts, d, _ = weights[0].shape
    shape = shape_key(rows, dtype, d=d, n=n, E=num_experts)
    first_column = jnp.asarray(first_column, jnp.int32)
    if weights[0].dtype != dtype:  # converted for the block alone
        blocks = (lax.dynamic_slice_in_dim(w, first_column, num_columns, axis=1) for w in weights)
        weights = tuple(block.astype(dtype) for block in blocks)
        first_column = jnp.zeros_like(first_column)

    def load(refs, tile, k, slot):
        columns = pl.ds(refs.first_column[0] + tile.column_tile * TILE_COLUMNS, TILE_COLUMNS)
        for i, (d_pre, weight) in enumerate(refs.pairs):

            @pl.when((k >= i * steps_each) & (k < (i + 1) * steps_each))
            def _(d_pre=d_pre, weight=weight, i=i):
                steps = pl.ds((k - i * steps_each) * K_STEP, K_STEP)
                slot.fetch(d_pre.at[pl.ds(tile.row, TILE_ROWS), steps], slot.lhs)
                slot.fetch(weight.at[tile.expert, columns, steps], slot.rhs)

    pairs = tuple(zip(d_pre_activations, weights, strict=True))
    return row_matmul(
        "moe_up_backward",
        groups.tiles,
        operands={"pairs": pairs, "first_column": first_column.reshape(1), "bias": None, "into": into},
        results={"rows": jax.ShapeDtypeStruct((rows, num_columns), dtype)},
        aliases=[] if into is None else [("into", "rows")],
        column_tiles=-(-num_columns // TILE_COLUMNS),
        k_steps=len(weights) * steps_each,
        load=load,
        copies=2,
        end=ROUNDED_ROWS,
        transposed_weights=True,
        tuning=find_tuning(TileTuning, "up_backward", tuning, shape),
    ).rows
