"""Rows and tiles that dispatch makes of experts, held to the portable form."""

from itertools import pairwise

import jax.numpy as jnp
import numpy as np

from pallas_kernels.mosaic.row_groups import SPARE_ROWS, TILE_ROWS
from tests.numerics import assert_same_bits
from tests.pallas_kernels.rows import portable_dispatch


def assert_same_as_portable(experts, num_experts, out):
    expected = portable_dispatch(jnp.asarray(experts), num_experts, row_alignment=8, spare_rows=SPARE_ROWS)
    assert_same_bits(out._replace(tiles=None), expected)
    assert_is_schedule(out)


def assert_is_schedule(out):
    """Tiles cut each group from its start on, group after group; the unused ones are zero."""
    tiles, offsets = out.tiles, np.asarray(out.expert_token_offsets)
    expected = [
        (expert, row, min(TILE_ROWS, stop - row))
        for expert, (start, stop) in enumerate(pairwise(offsets))
        for row in range(start, stop, TILE_ROWS)
    ]
    expected += [(0, 0, 0)] * (tiles.num_tiles - len(expected))
    assert list(zip(*(np.asarray(a).tolist() for a in tiles.arrays), strict=True)) == expected
