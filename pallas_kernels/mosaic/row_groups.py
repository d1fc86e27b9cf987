"""Rows grouped by expert, cut into tiles: computed once, shared by all the kernels; and sums of rows in XLA."""

from functools import reduce
from operator import add
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.contract import Dispatch, place_values

TILE_ROWS = 128
TILE_COLUMNS = 256
GROUP_ROWS = TILE_ROWS // 2  # rows of one consumer warpgroup
ROW_ALIGNMENT = 8
"""Groups of rows start at multiples of this, so that bulk copies of (8, 64) blocks are aligned."""

SPARE_ROWS = TILE_ROWS
"""Rows that row buffers have past the last group, so that a whole tile can be read from any group's last row."""


class TileSchedule(NamedTuple):
    """Tiles of up to 128 rows of one expert, expert after expert; unused entries have no valid rows.

    Attributes:
      expert: `(tiles,)` int32.
      first_row: `(tiles,)` int32, a multiple of 8.
      valid_rows: `(tiles,)` int32, a multiple of 8.
      used: `(1,)` int32, how many have rows; None if that has not been counted.
    """

    expert: Int[Array, " tiles"]
    first_row: Int[Array, " tiles"]
    valid_rows: Int[Array, " tiles"]
    used: Int[Array, "1"] | None = None

    @property
    def num_tiles(self) -> int:
        return self.expert.shape[0]

    @property
    def arrays(self) -> tuple[Int[Array, " tiles"], Int[Array, " tiles"], Int[Array, " tiles"]]:
        """The three arrays that kernels read of each tile."""
        return self.expert, self.first_row, self.valid_rows

    def count_used(self) -> Int[Array, "1"]:
        return jnp.sum(self.valid_rows > 0, dtype=jnp.int32)[None] if self.used is None else self.used


def rows_of_tiles(values: Array, schedule: TileSchedule, num_rows: int) -> Array:
    """`(tiles, 128)` values of the tiles' rows as `(num_rows,)` values; zero for rows of no tile."""
    row = jnp.arange(TILE_ROWS, dtype=jnp.int32)[None]
    target = jnp.where(row < schedule.valid_rows[:, None], schedule.first_row[:, None] + row, num_rows)
    return place_values(values, target, num_rows)


def bias_part(
    dy: Float[Array, "T d"], b_down: Float[Array, "E d"], groups: Dispatch[TileSchedule]
) -> Float[Array, " R"]:
    """`⟨dy, b_down⟩` of every row: a product for all experts is cheaper than gathering rows of dy for it."""
    products = jnp.dot(dy, b_down.astype(dy.dtype).T, preferred_element_type=jnp.float32)
    of_tiles = jnp.broadcast_to(groups.tiles.expert[:, None], (groups.tiles.num_tiles, TILE_ROWS))
    expert = rows_of_tiles(of_tiles, groups.tiles, groups.num_rows)
    return products.at[groups.expert_token_indices, expert].get(mode="fill", fill_value=0)


def sum_in_order(parts: Float[Array, "parts *rest"]) -> Float[Array, "*rest"]:
    """The sum over the first axis, from the first part to the last.

    XLA times several ways to sum along an axis as it compiles for a GPU, which differ in the last bits, so two
    compilations of one program may (openxla/xla issue 37902).
    """
    return reduce(add, parts)
