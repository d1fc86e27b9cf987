"""The kernels that are a row matmul and little else: up and down projection, and back through the up projection."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.ampere.row_matmul import add_bias, biases_of, for_rows, row_matmul, store_half, store_sums
from pallas_kernels.ampere.tile import tuned_tile
from pallas_kernels.contract import Dispatch
from pallas_kernels.mosaic.row_groups import TileSchedule
from pallas_kernels.simt.elementwise import value
from pallas_kernels.traced_once import traced_once
from pallas_kernels.tuning.parameters import MmaTuning


def _block(weights, dtype, axis: int, first_column, num_columns: int) -> tuple[tuple[Array, ...], Int[Array, "1"]]:
    """Weights in `dtype` and the first of the columns wanted there; others are converted for these columns alone."""
    first_column = jnp.asarray(first_column, jnp.int32)
    if weights[0].dtype == dtype:
        return weights, first_column.reshape(1)
    blocks = (lax.dynamic_slice_in_dim(w, first_column, num_columns, axis=axis) for w in weights)
    return tuple(block.astype(dtype) for block in blocks), jnp.zeros(1, jnp.int32)


@traced_once("activation", "keep_pre_activations", "tuning")
def up_projection(
    x: Float[Array, "T d"],
    weights: tuple[Float[Array, "E d n"], ...],
    biases: tuple[Float[Array, "E n"], ...],
    groups: Dispatch[TileSchedule],
    *,
    activation: Callable[..., Array],
    keep_pre_activations: bool = True,
    tuning: MmaTuning | None = None,
) -> tuple[tuple[Float[Array, "R n"], ...], Float[Array, "R n"]]:
    """Pre-activations (gate and up, or up alone) and activation of every row; see the portable twin.

    A tile holds equal parts of each projection, and a warp the same columns of both, so that the activation is computed
    from the float32 sums.
    """
    weights = tuple(w.astype(x.dtype) for w in weights)
    n = weights[0].shape[2]

    def end(biases, results, where, sums):
        *pre_activations, hidden = results
        bias = biases_of(biases, where, n)

        def end_rows(first, of_rows):
            pre = [add_bias(values, own) for values, own in zip(of_rows, bias, strict=True)]
            if pre_activations:
                for values, (projection, column) in zip(pre, where.halves, strict=True):
                    store_half(pre_activations[projection], where, first, column, values, n)
            operands = [pre] if len(weights) == 2 else [[half] for half in pre]  # for each activation
            for own, (_, column) in zip(operands, where.halves, strict=False):
                activated = [
                    [value(activation, numbers) for numbers in zip(*of_columns, strict=True)]
                    for of_columns in zip(*own, strict=True)
                ]
                store_half(hidden, where, first, column, activated, n)

        for_rows(where, sums, end_rows)

    rows = jax.ShapeDtypeStruct((groups.num_rows, n), x.dtype)
    *pre_activations, hidden = row_matmul(
        "moe_up_projection",
        groups.tiles,
        (x,),
        groups.expert_token_indices,
        weights,
        num_columns=n,
        extra=tuple(b.astype(jnp.float32) for b in biases),
        results=[rows] * (len(weights) * keep_pre_activations + 1),
        end=end,
        tile=tuned_tile("up_projection", tuning, rows, x.shape[1], groups),
    )
    return tuple(pre_activations), hidden


@traced_once("num_columns", "tuning")
def down_projection(
    hidden: Float[Array, "R n"],
    w_down: Float[Array, "E n d"],
    b_down: Float[Array, "E d"] | None,
    groups: Dispatch[TileSchedule],
    first_column: Int[Array, ""] | int,
    num_columns: int,
    *,
    tuning: MmaTuning | None = None,
) -> Float[Array, "R columns"]:
    """Columns `first_column`, a multiple of 8, to `first_column + num_columns` of every row's expert output."""
    (w_down,), weight_column = _block((w_down,), hidden.dtype, 2, first_column, num_columns)
    biases = () if b_down is None else (b_down.astype(jnp.float32),)

    def end(biases, results, where, sums):
        store_sums(results, where, sums, num_columns, biases_of(biases, where, num_columns))

    (rows,) = row_matmul(
        "moe_down_projection",
        groups.tiles,
        (hidden,),
        None,
        (w_down,),
        first_column=weight_column,
        num_columns=num_columns,
        extra=tuple(lax.dynamic_slice_in_dim(b, first_column, num_columns, axis=1) for b in biases),
        results=[jax.ShapeDtypeStruct((hidden.shape[0], num_columns), hidden.dtype)],
        end=end,
        tile=tuned_tile("down_projection", tuning, hidden, w_down.shape[2], groups),
    )
    return rows


@traced_once("num_columns", "tuning")
def up_backward(
    d_pre_activations: tuple[Float[Array, "R n"], ...],
    weights: tuple[Float[Array, "E d n"], ...],
    groups: Dispatch[TileSchedule],
    first_column: Int[Array, ""] | int,
    num_columns: int,
    *,
    tuning: MmaTuning | None = None,
) -> Float[Array, "R columns"]:
    """`Σ dP · Wᵀ` over the projections, into the same sums; see the portable twin."""
    num_rows, dtype = d_pre_activations[0].shape[0], d_pre_activations[0].dtype
    weights, weight_column = _block(weights, dtype, 1, first_column, num_columns)

    (rows,) = row_matmul(
        "moe_up_backward",
        groups.tiles,
        d_pre_activations,
        None,
        weights,
        transposed=True,
        first_column=weight_column,
        num_columns=num_columns,
        results=[jax.ShapeDtypeStruct((num_rows, num_columns), dtype)],
        end=lambda _, results, where, sums: store_sums(results, where, sums, num_columns),
        tile=tuned_tile("up_backward", tuning, d_pre_activations[0], weights[0].shape[1], groups),
    )
    return rows
