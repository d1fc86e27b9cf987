"""The loops over rows that the portable kernels are built from: every row once, and little beside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import xla
from pallas_kernels.xla.row_groups import MAX_TILE_ROWS, MIN_TILE_ROWS, map_rows, sum_rows, tile_rows
from tests.numerics import assert_same_bits
from tests.pallas_kernels.rows import Rows, over_alignments
from tests.routings import ROUTINGS


@over_alignments
@pytest.mark.parametrize("routing", ROUTINGS)
def test_map_writes_every_row_once(routing, row_alignment):
    rows = Rows(xla, routing, row_alignment=row_alignment)
    ids = jnp.arange(rows.num_experts)

    def count_and_expert(own, tile, buffers):
        count = jax.lax.dynamic_slice_in_dim(buffers[0], tile.start, tile.rows)
        return count + 1, jnp.full((tile.rows, 1), own[0])

    start = (jnp.zeros((rows.num_rows, 1), jnp.int32), jnp.full((rows.num_rows, 1), -1))
    count, expert = map_rows(rows.groups, (ids,), count_and_expert, start)
    assert_same_bits(count[:, 0], (rows.expert >= 0).astype(np.int32))
    assert_same_bits(expert[:, 0], rows.expert.astype(np.int32))


@over_alignments
@pytest.mark.parametrize("routing", ROUTINGS)
def test_sum_covers_every_row_at_little_cost(routing, row_alignment):
    rows = Rows(xla, routing, row_alignment=row_alignment)
    own, visited = sum_rows(
        rows.groups,
        lambda tile: (tile.mine.sum(dtype=jnp.float32), jnp.float32(tile.rows)),
        (jax.ShapeDtypeStruct((rows.num_experts,), jnp.float32),) * 2,
    )
    group_sizes = np.diff(rows.groups.offsets)
    tile = tile_rows(rows.groups)
    assert_same_bits(own, group_sizes.astype(np.float32))
    assert_same_bits(visited, (-(-group_sizes // tile) * tile).astype(np.float32))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_tiles_are_at_most_an_experts_share(routing):
    rows = Rows(xla, routing)
    tile, share = tile_rows(rows.groups), rows.num_rows / rows.num_experts
    assert tile <= min(MAX_TILE_ROWS, rows.num_rows)
    assert tile <= max(MIN_TILE_ROWS, share)
