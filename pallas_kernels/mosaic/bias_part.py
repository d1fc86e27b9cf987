"""What the down bias adds to the gradient of the row weights."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.contract import Dispatch
from pallas_kernels.mosaic.row_groups import TILE_ROWS, TileSchedule, rows_of_tiles


def bias_part(
    dy: Float[Array, "T d"], b_down: Float[Array, "E d"], groups: Dispatch[TileSchedule]
) -> Float[Array, " R"]:
    """`⟨dy, b_down⟩` of every row: a product for all experts is cheaper than gathering rows of dy for it."""
    products = jnp.dot(dy, b_down.astype(dy.dtype).T, preferred_element_type=jnp.float32)
    of_tiles = jnp.broadcast_to(groups.tiles.expert[:, None], (groups.tiles.num_tiles, TILE_ROWS))
    expert = rows_of_tiles(of_tiles, groups.tiles, groups.num_rows)
    return products.at[groups.expert_token_indices, expert].get(mode="fill", fill_value=0)
