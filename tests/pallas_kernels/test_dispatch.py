"""Dispatch, rows by expert straight from the ids: the portable form, and the kernels, which give the same bits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hopper, simt
from pallas_kernels.xla.dispatch import count_by_comparison, count_in_turn
from tests.numerics import assert_same_bits
from tests.pallas_kernels.rows import assert_same_as_portable, portable_dispatch
from tests.routings import ROUTINGS, random_experts, reference_dispatch


def interpret(experts, num_experts, **options):
    with simt.interpreted():
        return hopper.dispatch(jnp.asarray(experts), num_experts, **options)


@pytest.mark.parametrize("row_alignment", [1, 8])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.default_cases("all_slots_empty-*", "more_experts_than_rows-1", "single_expert-1", "many_tiles-1")
def test_groups_rows_by_expert(routing, row_alignment):
    experts, num_experts = ROUTINGS[routing]
    out = portable_dispatch(jnp.asarray(experts), num_experts, row_alignment=row_alignment)
    token_indices, offsets, positions = reference_dispatch(experts, num_experts, row_alignment)

    unused = out.num_rows - token_indices.size
    assert_same_bits(out.expert_token_indices, np.pad(token_indices, (0, unused), constant_values=len(experts)))
    assert_same_bits(out.expert_token_offsets, offsets)
    assert_same_bits(out.token_index_map, np.where(experts < 0, out.num_rows, positions).astype(np.int32))


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(partial(interpret, blocks=1), id="a block"),
        pytest.param(partial(interpret, blocks=3), id="blocks"),
        pytest.param(interpret, id="as many blocks as on a GPU"),
        pytest.param(hopper.dispatch, id="gpu", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.default_cases("random-*", "one_expert_takes_all-blocks", "empty_slots-blocks", "every_expert-blocks")
def test_kernels_give_the_bits_of_the_portable_form(routing, run):
    experts, num_experts = ROUTINGS[routing]
    assert_same_as_portable(experts, num_experts, run(jnp.asarray(experts), num_experts))


@pytest.mark.parametrize("num_experts", [33, 300])
def test_many_experts(num_experts):
    experts = random_experts(61, 5, range(0, num_experts, 3))
    assert_same_as_portable(experts, num_experts, interpret(experts, num_experts, blocks=2))


def test_any_other_id_is_an_empty_slot():
    experts = np.array([[0, 5], [-3, 1], [2, 0]], np.int32)
    out = portable_dispatch(jnp.asarray(experts), 2)
    assert out.expert_token_indices.tolist() == [0, 2, 1, 3, 3, 3]
    assert out.expert_token_offsets.tolist() == [0, 2, 3]
    assert out.token_index_map.tolist() == [[0, 6], [6, 2], [6, 1]]
    assert_same_as_portable(experts, 2, interpret(experts, 2, blocks=2))


@pytest.mark.parametrize("num_experts", [1, 5, 40])
def test_both_ways_to_count_agree(num_experts):
    tiles = jnp.asarray(np.random.default_rng(0).integers(0, num_experts + 1, (7, 32)), jnp.int32)
    assert_same_bits(
        *(jax.jit(count, static_argnums=1)(tiles, num_experts) for count in (count_by_comparison, count_in_turn))
    )


@pytest.mark.parametrize(
    ("tokens", "slots", "num_experts"), [(24576, 8, 128), (2**21, 1, 4), (1, 1, 1), (77, 32, 1024)]
)
def test_lowers_for_cuda(tokens, slots, num_experts):
    experts = jax.ShapeDtypeStruct((tokens, slots), jnp.int32)
    lowered = jax.jit(lambda e: hopper.dispatch(e, num_experts)).trace(experts)
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert "moe_dispatch_count" in text
    assert "moe_dispatch_place" in text


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "slots", "num_experts"), [(24576, 8, 128), (262144, 8, 256), (2**21, 1, 4), (5000, 32, 1024)]
)
def test_sizes_on_the_gpu(tokens, slots, num_experts):
    experts = np.random.default_rng(0).integers(0, num_experts, (tokens, slots), np.int32)
    first = hopper.dispatch(jnp.asarray(experts), num_experts)
    assert_same_as_portable(experts, num_experts, first)
    assert_same_bits(hopper.dispatch(jnp.asarray(experts), num_experts), first)
