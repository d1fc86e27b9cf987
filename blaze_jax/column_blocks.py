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
        y = empty_columns(dispatch, num_columns, dtype)
        return kernels.combine(rows(0, num_columns), dispatch.token_index_map, weights, y, 0)
    block, width = _block(kernels, w_down, dispatch, dtype, most), w_down.shape[2]
    weights = None if weights is None else weights.astype(accumulator_dtype(dtype))  # once, and not in each turn

    def turn(carry):
        column, y = carry  # counted in columns, which saves a GPU a launch that would multiply
        # A last narrow block reaches back over columns that are done.
        first_column = jnp.minimum(column, width - block) if width % block else column
        y = kernels.combine(rows(first_column, block), dispatch.token_index_map, weights, y, first_column)
        return column + block, y

    y = empty_columns(dispatch, width, dtype)
    return lax.while_loop(lambda carry: carry[0] < width, turn, (jnp.int32(0), y))[1]


def column_blocks(kernels: Kernels, w_down: Float[Array, "E n d"], dispatch: Dispatch, dtype) -> list[tuple[int, int]]:
    """First column and width of each block of those that `combine_columns` combines, in their order."""
    block, width = _block(kernels, w_down, dispatch, dtype), w_down.shape[2]
    return [(first, min(block, width - first)) for first in range(0, width, block)]


def _block(kernels: Kernels, w_down: Float[Array, "E n d"], dispatch: Dispatch, dtype, most: int | None = None) -> int:
    num_experts, n, width = w_down.shape
    return block_width(width, most or kernels.column_block(dispatch.num_rows, width, n, num_experts, dtype))


def empty_columns(dispatch: Dispatch, columns: int, dtype) -> Float[Array, "T columns"]:
    """Of all tokens; every column has to be written."""
    return vary_over(lax.empty((dispatch.token_index_map.shape[0], columns), dtype), varying_axes(dispatch))
