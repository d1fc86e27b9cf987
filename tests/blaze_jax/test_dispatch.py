"""The index structures against their definition: a stable sort."""

from functools import partial

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax import EMPTY_SLOT, build_dispatch
from pallas_kernels.xla.dispatch import tile_pairs
from tests.numerics import assert_same_bits
from tests.routings import ROUTINGS, random_experts, reference_dispatch, routings

build_jitted = jax.jit(build_dispatch, static_argnums=1, static_argnames=("row_alignment", "implementation"))


def assert_is_reference(experts, num_experts, row_alignment=1):
    experts = np.asarray(experts, np.int32)
    out = build_jitted(experts, num_experts, row_alignment=row_alignment)
    token_indices, offsets, positions = reference_dispatch(experts, num_experts, row_alignment)
    num_rows = out.expert_token_indices.size
    assert num_rows % row_alignment == 0
    assert num_rows >= token_indices.size

    padded = np.full(num_rows, len(experts), np.int32)  # rows that stand for no pair hold T
    padded[: token_indices.size] = token_indices
    assert_same_bits(out.expert_token_indices, padded)
    assert_same_bits(out.expert_token_offsets, offsets)
    assert_same_bits(out.token_expert_indices, experts)
    assert_same_bits(out.token_index_map, np.where(positions == EMPTY_SLOT, num_rows, positions).astype(np.int32))


def test_example_of_the_paper():
    out = build_jitted(jnp.array([[2, 3], [0, 1], [0, 3], [1, 2], [0, 3]]), 4)
    assert out.expert_token_indices.tolist() == [1, 2, 4, 1, 3, 0, 3, 0, 2, 4]
    assert out.expert_token_offsets.tolist() == [0, 3, 5, 7, 10]
    assert out.token_expert_indices.tolist() == [[2, 3], [0, 1], [0, 3], [1, 2], [0, 3]]
    assert out.token_index_map.tolist() == [[5, 7], [0, 3], [1, 8], [4, 6], [2, 9]]


@pytest.mark.parametrize("num_experts", [5, 1024])
@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_sizes_around_a_tile(num_experts, tiles, more):
    pairs = tiles * tile_pairs(num_experts) + more
    assert_is_reference(random_experts(pairs, 1, range(num_experts)), num_experts)


def test_no_tokens():
    assert_is_reference(np.zeros((0, 2), np.int32), 3)


@pytest.mark.slow
@hypothesis.settings(max_examples=6)
@hypothesis.given(routings(max_tokens=300))
def test_generated_shapes(case):
    assert_is_reference(*case)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_any_integer_dtype(dtype):
    experts = ROUTINGS["random"].experts
    out, ref = (build_jitted(jnp.asarray(experts, t), 6) for t in (dtype, "int32"))
    assert_same_bits(out, ref)


@pytest.mark.slow
def test_experts_times_tokens_beyond_int32():
    tokens, num_experts = 2**21 + 8, 1024
    experts = (np.arange(tokens, dtype=np.int32) * 7919 % num_experts)[:, None]
    out = build_jitted(experts, num_experts)
    order = np.argsort(experts[:, 0], kind="stable").astype(np.int32)
    assert_same_bits(out.expert_token_indices, order)
    assert_same_bits(out.token_index_map[order, 0], np.arange(tokens, dtype=np.int32))


@pytest.mark.parametrize("row_alignment", [1, 8])
def test_ids_of_no_expert_count_as_empty_under_tracing(row_alignment):
    experts = ROUTINGS["random"].experts
    wrong = np.where(np.arange(37)[:, None] % 4 == 0, [[6, -7]], experts).astype(np.int32)
    empty = np.where(np.arange(37)[:, None] % 4 == 0, EMPTY_SLOT, experts).astype(np.int32)
    out, ref = (build_jitted(e, 6, row_alignment=row_alignment) for e in (wrong, empty))
    assert_same_bits(out._replace(token_expert_indices=experts), ref._replace(token_expert_indices=experts))


def test_kernels_lower_alone_and_under_vmap_for_as_many_experts_as_they_count():
    experts = random_experts(20, 2, range(3000))
    with pytest.raises(NotImplementedError, match="cannot run this: num_experts=3000 must be at most 2048"):
        build_dispatch(experts, 3000, implementation="mosaic_gpu")
    assert_is_reference(experts, 3000)
    build = partial(build_dispatch, num_experts=6, implementation="mosaic_gpu")
    for function, shape in ((build, (37, 3)), (jax.vmap(build), (2, 37, 3))):
        traced = jax.jit(function).trace(jax.ShapeDtypeStruct(shape, jnp.int32))
        assert "moe_dispatch_place" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_two_runs_give_the_same_bits():
    assert_same_bits(*(build_dispatch(*ROUTINGS["many_tiles"]) for _ in range(2)))


def test_no_sort_and_memory_linear_in_pairs_and_tiles():
    tokens, slots, num_experts = 2**15, 2, 512
    lowered = build_jitted.lower(jax.ShapeDtypeStruct((tokens, slots), jnp.int32), num_experts)
    program = lowered.compile()
    assert "stablehlo.sort" not in lowered.as_text()
    assert " sort(" not in program.as_text()
    pairs, counts = tokens * slots, tokens * slots // tile_pairs(num_experts) * num_experts
    temporary = program.memory_analysis().temp_size_in_bytes
    assert temporary < 4 * (4 * pairs + 4 * counts) < tokens * num_experts


@pytest.mark.parametrize(
    ("experts", "num_experts", "options", "message"),
    [
        ([[0, 1], [2, 3]], 3, {}, r"experts\[1, 1\] = 3 must be an expert id from 0 to 2, or -1"),
        ([[0, -2]], 3, {}, r"experts\[0, 1\] = -2 must be an expert id"),
        ([[0, 1, 2]], 2, {}, "experts has K=3 slots a token, must be from 1 to E=2"),
        ([[], []], 2, {}, "experts must be an integer array"),
        ([0, 1], 2, {}, r"experts must be an integer array \(T, K\), got int32 of shape \(2,\)"),
        ([[0.0, 1.0]], 2, {}, "experts must be an integer array .* got float32"),
        ([[0]], 0, {}, "num_experts=0 must be at least 1"),
        ([[0]], 1, {"row_alignment": 0}, "row_alignment=0 must be at least 1"),
        ([[0]], 1, {"row_alignment": 8.0}, "row_alignment=8.0 must be an integer"),
        ([[0]], 1.5, {}, "num_experts=1.5 must be an integer"),
    ],
)
@pytest.mark.default_cases("*")
def test_misuse_is_named(experts, num_experts, options, message):
    with pytest.raises(ValueError, match=message):
        build_dispatch(jnp.array(experts), num_experts, **options)


def test_more_pairs_than_int32_can_number():
    for row_alignment in (1, 8):
        build = partial(build_dispatch, num_experts=1024, row_alignment=row_alignment)
        with pytest.raises(ValueError, match=r"experts of shape \(1073741824, 2\) has more pairs than"):
            jax.eval_shape(build, jax.ShapeDtypeStruct((2**30, 2), jnp.int32))
