"""Expert capacity: an expert takes its first tokens by id, and the others lose that slot."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from blaze_jax.dispatch import group_by_expert
from pallas_kernels.contract import EMPTY_SLOT, Kernels, Routed


def drop_beyond_capacity(kernels: Kernels, routed: Routed, capacity: int) -> Int[Array, "T K"]:
    """The choice, with empty slots where an expert already has `capacity` tokens of lower id.

    A pair's rank is its row less its expert's first: the dispatch knows both, and nothing is selected or sorted.
    """
    dispatch = routed.dispatch or group_by_expert(kernels, routed.experts, routed.demand.shape[0])
    rank = dispatch.token_index_map - dispatch.expert_token_offsets[routed.experts]
    return jnp.where(rank < capacity, routed.experts, EMPTY_SLOT)
