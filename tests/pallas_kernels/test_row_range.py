"""Ranges of rows: the kernels compute in turns what they compute at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hopper, xla
from pallas_kernels.mosaic.row_groups import SPARE_ROWS, TILE_ROWS
from tests.numerics import assert_close, assert_same_bits
from tests.pallas_kernels.rows import ACTIVATIONS, Rows
from tests.routings import ROUTINGS

RANGE = 200


@pytest.mark.parametrize("family", [xla, hopper])
@pytest.mark.parametrize("routing", ["random", "empty_slots", "many_tiles", "all_slots_empty"])
@pytest.mark.parametrize("first", [0, 64, 10_000])
@pytest.mark.default_cases(
    "0-empty_slots-pallas_kernels.xla",
    "64-random-pallas_kernels.hopper",
    "64-empty_slots-pallas_kernels.hopper",
    "10000-random-pallas_kernels.xla",
    "10000-random-pallas_kernels.hopper",
    "10000-empty_slots-pallas_kernels.xla",
)
def test_indices(family, routing, first):
    experts, num_experts = ROUTINGS[routing]
    spare = SPARE_ROWS if family is hopper else 0
    groups = jax.jit(xla.dispatch, static_argnums=1, static_argnames=("row_alignment", "spare_rows"))(
        jnp.asarray(experts), num_experts, row_alignment=8, spare_rows=spare
    )
    out = jax.jit(family.row_range, static_argnums=2)(groups, first, RANGE)
    assert out.num_rows == RANGE + spare
    starts = np.clip(np.asarray(groups.expert_token_offsets) - first, 0, RANGE)
    assert_same_bits(out.expert_token_offsets, starts)
    tokens = np.full(RANGE + spare, len(experts), np.int32)
    mine = np.asarray(groups.expert_token_indices)[first : first + starts[-1]]
    tokens[: mine.size] = mine
    assert_same_bits(out.expert_token_indices, tokens)
    place = np.asarray(groups.token_index_map) - first
    assert_same_bits(out.token_index_map, np.where((place >= 0) & (place < starts[-1]), place, RANGE + spare))
    if family is hopper:
        tiles = [tile for tile in zip(*(np.asarray(a).tolist() for a in out.tiles.arrays), strict=True) if tile[2]]
        expected = [
            (expert, row, min(starts[expert + 1] - row, TILE_ROWS))
            for expert in range(num_experts)
            for row in range(starts[expert], starts[expert + 1], TILE_ROWS)
        ]
        assert tiles == expected
        assert out.tiles.used.tolist() == [len(expected)]


@pytest.mark.slow
def test_ranges_together_are_all_rows(kernels):
    rows = Rows(kernels, "whole_tiles_and_a_tail")
    dtype = "float32" if kernels is xla else "bfloat16"
    x = rows.normal(rows.num_tokens, 64, dtype=dtype)
    weights = (rows.normal(rows.num_experts, 64, 64, dtype=dtype, fan_in=64),)

    def compute(groups):
        (pre,), hidden = kernels.up_projection(x, weights, (), groups, activation=ACTIVATIONS[1])
        (gradient,), _ = kernels.up_weight_gradients(x, (pre,), groups, dtypes=(jnp.float32,), bias_dtypes=())
        owned = (groups.expert_token_indices < rows.num_tokens)[:, None]
        return jnp.where(owned, hidden, 0), gradient

    hidden, gradient = compute(rows.groups)
    parts = [compute(kernels.row_range(rows.groups, first, RANGE)) for first in (0, RANGE)]
    together = jnp.concatenate([part[:RANGE] for part, _ in parts])
    assert rows.num_rows <= together.shape[0] + SPARE_ROWS
    length = min(rows.num_rows, together.shape[0])
    assert_close(together[:length], hidden[:length])
    assert_close(sum(part for _, part in parts), gradient)
