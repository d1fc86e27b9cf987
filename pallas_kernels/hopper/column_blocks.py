"""Products whose rows exist a block of columns at a time: the down projection, and the up projection's input gradient.

The layer sums a block of rows by token before it asks for the next one, so it never holds rows of full width.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.contract import Dispatch
from pallas_kernels.hopper.inline import K_STEP, PANEL
from pallas_kernels.hopper.ring import PANELS
from pallas_kernels.hopper.row_matmul import HeldEnd, RowMatmul, RowTile, store_rows, tile_panel
from pallas_kernels.mosaic.row_groups import TILE_COLUMNS, TILE_ROWS, TileSchedule
from pallas_kernels.traced_once import traced_once
from pallas_kernels.tuning.parameters import ColumnBlock, TileTuning, find_tuning, shape_key


def column_block(num_rows: int, d: int, n: int, num_experts: int, dtype, *, tuning: ColumnBlock | None = None) -> int:
    """Columns of a block at most, as tuned for this layer; see the portable twin."""
    shape = shape_key(num_rows, dtype, d=d, n=n, E=num_experts)
    return find_tuning(ColumnBlock, "column_block", tuning, shape).columns


@traced_once("num_columns", "tuning")
def down_projection(
    hidden: Float[Array, "R n"],
    w_down: Float[Array, "E n d"],
    b_down: Float[Array, "E d"] | None,
    groups: Dispatch[TileSchedule],
    first_column: Int[Array, ""] | int,
    num_columns: int,
    *,
    into: Float[Array, "R columns"] | None = None,
    tuning: TileTuning | None = None,
) -> Float[Array, "R columns"]:
    """Columns `first_column` to `first_column + num_columns` of every row's expert output; see the portable twin."""
    num_experts, n, d = w_down.shape
    shape = shape_key(groups.num_rows, hidden.dtype, d=d, n=n, E=num_experts)
    first_column = jnp.asarray(first_column, jnp.int32)
    (w_down,), weight_column = _in_dtype((w_down,), hidden.dtype, first_column, num_columns, axis=2)

    def load(refs, tile, k, slot):
        column = refs.first_column[0] + tile.column_tile * TILE_COLUMNS
        steps = pl.ds(k * K_STEP, K_STEP)
        slot.fetch(refs.hidden.at[pl.ds(tile.row, TILE_ROWS), steps], slot.lhs)
        for panel in range(PANELS):
            block = refs.w_down.at[tile.expert, steps, pl.ds(column + panel * PANEL, PANEL)]
            slot.fetch(block, slot.rhs_panel(panel))

    bias = None
    if b_down is not None:
        width = -(-num_columns // TILE_COLUMNS) * TILE_COLUMNS
        padded = jnp.pad(b_down.astype(jnp.float32), ((0, 0), (0, width)))
        block = lax.dynamic_slice_in_dim(padded, first_column, width, axis=1)
        bias = block.reshape(-1, width // TILE_COLUMNS, TILE_COLUMNS)

    return _rows_of_block(
        "moe_down_projection",
        groups,
        {"hidden": hidden, "w_down": w_down, "first_column": weight_column.reshape(1), "bias": bias, "into": into},
        jax.ShapeDtypeStruct((hidden.shape[0], num_columns), hidden.dtype),
        k_steps=-(-n // K_STEP),
        load=load,
        copies=1 + PANELS,
        tuning=find_tuning(TileTuning, "down_projection", tuning, shape),
    )


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
    """`Σ dP · Wᵀ` over the projections, into one accumulator; see the portable twin."""
    (rows, n), dtype = d_pre_activations[0].shape, d_pre_activations[0].dtype
    num_experts, d, _ = weights[0].shape
    steps_each = -(-n // K_STEP)
    shape = shape_key(rows, dtype, d=d, n=n, E=num_experts)
    first_column = jnp.asarray(first_column, jnp.int32)
    weights, first_column = _in_dtype(weights, dtype, first_column, num_columns, axis=1)

    def load(refs, tile, k, slot):
        columns = pl.ds(refs.first_column[0] + tile.column_tile * TILE_COLUMNS, TILE_COLUMNS)
        for i, (d_pre, weight) in enumerate(refs.pairs):

            @pl.when((k >= i * steps_each) & (k < (i + 1) * steps_each))
            def _(d_pre=d_pre, weight=weight, i=i):
                steps = pl.ds((k - i * steps_each) * K_STEP, K_STEP)
                slot.fetch(d_pre.at[pl.ds(tile.row, TILE_ROWS), steps], slot.lhs)
                slot.fetch(weight.at[tile.expert, columns, steps], slot.rhs)

    pairs = tuple(zip(d_pre_activations, weights, strict=True))
    return _rows_of_block(
        "moe_up_backward",
        groups,
        {"pairs": pairs, "first_column": first_column.reshape(1), "bias": None, "into": into},
        jax.ShapeDtypeStruct((rows, num_columns), dtype),
        k_steps=len(weights) * steps_each,
        load=load,
        copies=2,
        transposed_weights=True,
        tuning=find_tuning(TileTuning, "up_backward", tuning, shape),
    )


def _in_dtype(weights: tuple[Array, ...], dtype, first_column: Array, num_columns: int, *, axis: int):
    """The weights, of another dtype converted for the block's columns alone, and the block's first column in them."""
    if weights[0].dtype == dtype:
        return weights, first_column
    blocks = (lax.dynamic_slice_in_dim(w, first_column, num_columns, axis=axis) for w in weights)
    return tuple(block.astype(dtype) for block in blocks), jnp.zeros_like(first_column)


def _rows_of_block(name, groups: Dispatch[TileSchedule], operands, rows: jax.ShapeDtypeStruct, *, copies, **options):
    """The rows of a block of columns; those of other groups are kept from the operand `into`, if there is one."""

    def finish(refs, part: RowTile, accumulator):
        panels = [tile_panel(refs, part, accumulator, panel) for panel in range(PANELS)]
        return lax.concatenate([panel.astype(rows.dtype) for panel in panels], 1)

    def store(refs, part: RowTile, panel: int, values):
        store_rows(refs, part, panel, values, refs.rows, part.column_tile * TILE_COLUMNS + panel * PANEL)

    column_tiles = -(-rows.shape[1] // TILE_COLUMNS)
    matmul = RowMatmul(groups.tiles, operands, column_tiles=column_tiles, end=HeldEnd(finish, store), **options)
    aliases = [] if operands["into"] is None else [("into", "rows")]
    return matmul.run(name, results={"rows": rows}, aliases=aliases, copies=copies).rows
