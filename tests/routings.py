"""Routings that every operation should meet, and the index structures by their definition."""

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

EMPTY = -1


class Case(NamedTuple):
    """Expert ids `(T, K)` and the number of experts they are among."""

    experts: np.ndarray
    num_experts: int


def random_experts(tokens: int, slots: int, allowed, seed: int = 0) -> np.ndarray:
    """Distinct experts of every token, drawn from the ids `allowed`."""
    rng = np.random.default_rng(seed)
    ids = np.asarray(allowed, np.int32)
    return np.stack([rng.choice(ids, slots, replace=False) for _ in range(tokens)]).reshape(tokens, slots)


def _with_empty_slots(experts: np.ndarray, share: float) -> np.ndarray:
    return np.where(np.random.default_rng(1).random(experts.shape) < share, EMPTY, experts).astype(np.int32)


_RANDOM = random_experts(37, 2, range(6))

ROUTINGS = {
    "random": Case(_RANDOM, 6),
    "one_expert_takes_all": Case(np.full((37, 2), [3, EMPTY], np.int32), 6),
    "two_experts_of_six": Case(random_experts(37, 2, [1, 4]), 6),
    "first_expert_empty": Case(random_experts(37, 2, range(1, 6)), 6),
    "last_expert_empty": Case(random_experts(37, 2, range(5)), 6),
    "empty_slots": Case(_with_empty_slots(_RANDOM, 0.4), 6),
    "all_slots_empty": Case(np.full((37, 2), EMPTY, np.int32), 6),
    "same_expert_twice": Case(np.where(np.arange(37)[:, None] % 3 == 0, _RANDOM[:, :1], _RANDOM), 6),
    "single_expert": Case(np.zeros((11, 1), np.int32), 1),
    "every_expert": Case(random_experts(9, 4, range(4)), 4),
    "single_token": Case(random_experts(1, 3, range(7)), 7),
    "more_experts_than_rows": Case(random_experts(3, 2, range(40)), 40),
    "many_tiles": Case(np.where(random_experts(517, 2, range(3)) == 2, 0, random_experts(517, 2, range(3))), 3),
    "whole_tiles_and_a_tail": Case(
        (np.arange(2 * 156) >= 128).astype(np.int32).reshape(156, 2), 3
    ),  # 128, 184, no rows
}
"""Cases of one shape come first and share their compiled functions."""


def reference_dispatch(experts: np.ndarray, num_experts: int, row_alignment: int = 1):
    """`(token_indices, offsets, positions)` by a stable sort; as many rows as the aligned groups take."""
    tokens, slots = experts.shape
    groups = [np.flatnonzero(experts.reshape(-1) == e) for e in range(num_experts)]
    aligned = [-(-group.size // row_alignment) * row_alignment for group in groups]
    offsets = np.concatenate([[0], np.cumsum(aligned)]).astype(np.int32)
    token_indices = np.full(offsets[-1], tokens, np.int32)
    positions = np.full(tokens * slots, EMPTY, np.int32)
    for group, start in zip(groups, offsets[:-1], strict=True):
        token_indices[start : start + group.size] = group // slots
        positions[group] = start + np.arange(group.size)
    return token_indices, offsets, positions.reshape(experts.shape)


@st.composite
def routings(draw, max_tokens: int = 40, max_slots: int = 4, max_experts: int = 12) -> Case:
    """Any routing: empty slots, repeated and unused experts included."""
    num_experts = draw(st.integers(1, max_experts))
    shape = draw(st.integers(1, max_tokens)), draw(st.integers(1, min(max_slots, num_experts)))
    return Case(draw(experts_of_shape(shape, num_experts)), num_experts)


def experts_of_shape(shape: tuple[int, int], num_experts: int) -> st.SearchStrategy[np.ndarray]:
    """Expert ids and empty slots of one shape, so that examples share a compiled function."""
    return hnp.arrays(np.int32, shape, elements=st.integers(EMPTY, num_experts - 1))
