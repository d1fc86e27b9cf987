"""Experts choose tokens: each expert's best few of all tokens, without a sort."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.contract import KEY_BITS, Cutoffs


def token_cutoffs(keys: Int[Array, "E T"], wanted: Int[Array, " E"]) -> Cutoffs:
    """Cuts each expert's list off after `wanted[e]` tokens: those of largest key, the lower id first among equals.

    The key is found bit by bit: 31 times, the tokens are counted whose keys are at least as large.

    Args:
      keys: int32, from 0 to 2³¹ - 2.
      wanted: int32, from 0 to T.
    """
    if keys.shape[1] == 0:
        return Cutoffs(jnp.zeros_like(wanted), jnp.full_like(wanted, -1))

    def narrow(i, cutoff):
        candidate = cutoff | (1 << (KEY_BITS - 1 - i))
        enough = jnp.sum(keys >= candidate[:, None], axis=1) >= wanted
        return jnp.where(enough, candidate, cutoff)

    cutoff = jax.lax.fori_loop(0, KEY_BITS, narrow, jnp.zeros_like(wanted))
    larger = jnp.sum(keys > cutoff[:, None], axis=1, dtype=jnp.int32)
    equal_so_far = jnp.cumsum(keys == cutoff[:, None], axis=1, dtype=jnp.int32)
    last = jnp.argmax(equal_so_far >= (wanted - larger)[:, None], axis=1).astype(jnp.int32)
    return Cutoffs(cutoff, jnp.where(wanted > larger, last, -1))


def experts_added(
    keys: Int[Array, "E T"], cutoffs: Cutoffs, chosen_key: int, slots: int
) -> tuple[Int[Array, "T slots"], Bool[Array, " E"]]:
    """For each token, the experts that take it though it did not choose them.

    Args:
      keys: as in `token_cutoffs`; those of (token, expert) pairs that were chosen are at least `chosen_key`.
      cutoffs: which tokens each expert takes.
      chosen_key: see `keys`.
      slots: experts a token has room for.

    Returns:
      `(experts, crowded)`: ids of the first `slots` such experts, ascending, then -1; and the experts that some token
      has no room for.
    """
    num_experts, num_tokens = keys.shape
    expert = jnp.arange(num_experts, dtype=jnp.int32)[:, None]
    token = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    added = (keys < chosen_key) & cutoffs.take(keys, expert, token)
    place = jnp.where(added, jnp.cumsum(added, axis=0, dtype=jnp.int32) - 1, -1)
    experts = jnp.full((slots, num_tokens), -1, jnp.int32)
    experts = experts.at[jnp.where(added & (place < slots), place, slots), token].set(expert, mode="drop")
    return experts.T, (place >= slots).any(1)
