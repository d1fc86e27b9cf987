"""Rows that are as wide as the model, a block of columns at a time: only one block of them is ever alive."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.compat import vary_over, varying_axes
from pallas_kernels.contract import Dispatch, Kernels


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
    leave: Callable[[Float[Array, "T columns"]], Float[Array, "T_home columns"]] | None = None,
) -> Float[Array, "T d"]:
    """Combines `rows(first_column, num_columns)`, blocks of at most `most` columns; None for as many as suit.

    The result is what `leave` makes of the columns, block by block: its collectives can run while the next block is
    computed.
    """
    num_experts, n, width = w_down.shape
    most = most or kernels.column_block(dispatch.num_rows, width, n, num_experts, dtype)
    block = block_width(width, most)

    def step(i, y):
        # A last narrow block reaches back over columns that are done.
        first_column = jnp.minimum(i * block, width - block)
        return kernels.combine(rows(first_column, block), dispatch.token_index_map, weights, y, first_column)

    def empty(columns):  # every column is written
        return vary_over(lax.empty((dispatch.token_index_map.shape[0], columns), dtype), varying_axes(dispatch))

    if leave is None:
        return lax.fori_loop(0, -(-width // block), step, empty(width))
    left, y = [], empty(block)
    for end in (*range(block, width, block), width):
        # Each block waits for the rows of the one before, or XLA would keep the rows of many.
        first_column, y = lax.optimization_barrier((jnp.int32(end - block), y))
        y = kernels.combine(rows(first_column, block), dispatch.token_index_map, weights, empty(block), 0)
        left.append(leave(y[:, sum(part.shape[1] for part in left) - (end - block) :]))
    return jnp.concatenate(left, axis=1)
