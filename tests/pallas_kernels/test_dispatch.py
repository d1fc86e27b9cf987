"""Dispatch as a kernel: rows by expert, straight from the ids."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import xla
from pallas_kernels.xla.dispatch import count_by_comparison, count_in_turn
from tests.numerics import assert_same_bits
from tests.pallas_kernels.rows import dispatch
from tests.routings import ROUTINGS, reference_dispatch


@pytest.mark.parametrize("row_alignment", [1, 8])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.default_cases(
    "xla-all_slots_empty-8",
    "xla-more_experts_than_rows-1",
    "xla-many_tiles-1",
    "xla_batched-all_slots_empty-1",
    "xla_batched-single_expert-1",
    "xla_batched-many_tiles-1",
    "mosaic_gpu-random-8",
    "mosaic_gpu-one_expert_takes_all-8",
    "mosaic_gpu-empty_slots-8",
    "mosaic_gpu-every_expert-8",
)
def test_groups_rows_by_expert(kernels, routing, row_alignment):
    experts, num_experts = ROUTINGS[routing]
    out = dispatch(kernels, experts, num_experts, row_alignment)
    token_indices, offsets, positions = reference_dispatch(experts, num_experts, row_alignment)

    unused = out.num_rows - token_indices.size
    assert_same_bits(out.expert_token_indices, np.pad(token_indices, (0, unused), constant_values=len(experts)))
    assert_same_bits(out.expert_token_offsets, offsets)
    assert_same_bits(out.token_index_map, np.where(experts < 0, out.num_rows, positions).astype(np.int32))


def test_any_other_id_is_an_empty_slot():
    experts = np.array([[0, 5], [-3, 1], [2, 0]], np.int32)
    out = dispatch(xla, experts, 2, row_alignment=1)
    assert out.expert_token_indices.tolist() == [0, 2, 1, 3, 3, 3]
    assert out.expert_token_offsets.tolist() == [0, 2, 3]
    assert out.token_index_map.tolist() == [[0, 6], [6, 2], [6, 1]]


@pytest.mark.parametrize("num_experts", [1, 5, 40])
def test_both_ways_to_count_agree(num_experts):
    tiles = jnp.asarray(np.random.default_rng(0).integers(0, num_experts + 1, (7, 32)), jnp.int32)
    assert_same_bits(
        *(jax.jit(count, static_argnums=1)(tiles, num_experts) for count in (count_by_comparison, count_in_turn))
    )
