"""Rows that are as wide as the model, a block of columns at a time: only one block of them is ever alive."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.compat import vary_over, varying_axes
from pallas_kernels.contract import Dispatch, Kernels, accumulator_dtype


def block_width(width: int, most: int) -> int:
    """Columns of a block of `most` at most, where there are `width` in all: never all of them, if they are many."""
    return min(most, -(-width // 128) * 64, width)


def combine_columns(
    kernels: Kernels,
    rows: Callable,
    w_down: Float[Array, "E n d"],
    dispatch: Dispatch,
    weights: Float[Array, "T K"] | None,
    dtype,
    most: int | None = None,
    at_once: bool = False,
) -> Float[Array, "T d"]:
    """Combines `rows(first_column, num_columns)`, blocks of at most `most` columns; None for as many as suit.

    With `at_once`, rows that are not wider than an expert are a single block.
    """
    if at_once and w_down.shape[2] <= w_down.shape[1]:
        num_columns = w_down.shape[2]
        y = _empty(dispatch, num_columns, dtype)
        return kernels.combine(rows(0, num_columns), dispatch.token_index_map, weights, y, 0)
    block, width = _block(kernels, w_down, dispatch, dtype, most), w_down.shape[2]
    weights = None if weights is None else weights.astype(accumulator_dtype(dtype))  # once, and not in each turn

    def turn(carry):
        column, y = carry  # counted in columns, which saves a GPU a launch that would multiply
        # A last narrow block reaches back over columns that are done.
        first_column = jnp.minimum(column, width - block) if width % block else column
        y = kernels.combine(rows(first_column, block), dispatch.token_index_map, weights, y, first_column)
        return column + block, y

    return lax.while_loop(lambda carry: carry[0] < width, turn, (jnp.int32(0), _empty(dispatch, width, dtype)))[1]


def departing_columns(
    kernels: Kernels,
    rows: Callable,
    w_down: Float[Array, "E n d"],
    dispatch: Dispatch,
    weights: Float[Array, "T K"] | None,
    dtype,
    depart: Callable[[Float[Array, "T columns"]], Float[Array, "T_home columns"]],
    add_to: Float[Array, "T_home d"] | None = None,
) -> tuple[Float[Array, "T_home d"], Array]:
    """What `depart` makes of the columns that `combine_columns` combines, and the last block of them.

    It is done block by block, so that its collectives can run while the next block is computed. With `add_to` it is
    added to that, and nothing else is as wide.
    """
    block, width = _block(kernels, w_down, dispatch, dtype), w_down.shape[2]
    gone, y, done = [], _empty(dispatch, block, dtype), 0
    for end in (*range(block, width, block), width):
        # Each block waits for the rows of the one before, or XLA would keep the rows of many.
        first_column, y, add_to = lax.optimization_barrier((jnp.int32(end - block), y, add_to))
        unwritten = _empty(dispatch, block, dtype)
        y = kernels.combine(rows(first_column, block), dispatch.token_index_map, weights, unwritten, 0)
        gone.append(depart(y[:, done - (end - block) :]))
        if add_to is not None:
            add_to = lax.dynamic_update_slice_in_dim(add_to, add_to[:, done:end] + gone.pop(), done, axis=1)
        done = end
    return jnp.concatenate(gone, axis=1) if add_to is None else add_to, y


def _block(kernels: Kernels, w_down: Float[Array, "E n d"], dispatch: Dispatch, dtype, most: int | None = None) -> int:
    num_experts, n, width = w_down.shape
    return block_width(width, most or kernels.column_block(dispatch.num_rows, width, n, num_experts, dtype))


def _empty(dispatch: Dispatch, columns: int, dtype) -> Float[Array, "T columns"]:
    """Of which every column is written."""
    return vary_over(lax.empty((dispatch.token_index_map.shape[0], columns), dtype), varying_axes(dispatch))
