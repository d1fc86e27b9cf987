"""Token rounding (SonicMoE, arXiv 2512.14080): whole kernel tiles of tokens for every expert, in training."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from blaze_jax.dispatch import EMPTY_SLOT
from pallas_kernels.compat import top_k

TokenRounding = Literal["up", "down", "nearest"]


def round_token_counts(
    scores: Float[Array, "T E"], selected: Int[Array, "T K"], mode: TokenRounding, *, tile: int, extra_slots: int
) -> Int[Array, "T K_extra"]:
    """Experts of every token after each expert's count went to a multiple of `tile`.

    Rounding down, an expert gives up its tokens of lowest score; rounding up, it takes the tokens of highest score
    among those that did not choose it. Equal scores prefer the lower token id. A token takes at most `extra_slots`
    experts it did not choose; an expert that would need more of it, or more tokens than there are, rounds down.

    Costs two selections of `tile - 1` tokens per expert from `(T, E)`, and masks of that shape; no full sort.

    Args:
      scores: routing scores, at least 0.
      selected: distinct experts of each token.
      mode: "up", "down", or "nearest" (half a tile goes up).
      tile: rows of a kernel tile.
      extra_slots: slots added to every token, E - K at most; "down" uses none and adds none.

    Returns:
      `selected` with -1 for the dropped, and, unless `mode` is "down", `extra_slots` more slots, -1 where unused.
    """
    num_tokens, num_experts = scores.shape
    extra_slots = min(extra_slots, num_experts - selected.shape[1])
    scores = jnp.where(jnp.isnan(scores), 0, scores)  # else a NaN token would be every expert's favourite
    token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    chosen = jnp.zeros(scores.shape, bool).at[token, selected].set(True)
    count = chosen.sum(0, dtype=jnp.int32)
    floor = count // tile * tile

    added = jnp.zeros(scores.shape, bool)
    if mode != "down":
        up = -(-count // tile) * tile if mode == "up" else (count + tile // 2) // tile * tile
        missing = jnp.where((up > count) & (up <= num_tokens), up - count, 0)
        added = _best_tokens(jnp.where(chosen, -jnp.inf, scores), missing, tile - 1)
        crowded = added & (jnp.cumsum(added, axis=1) > extra_slots)
        added &= ~crowded.any(0)
    surplus = jnp.where(added.any(0), 0, count - floor)
    # Tokens in reverse: of equal scores the one with the higher id goes first.
    dropped = _best_tokens(jnp.where(chosen, -scores, -jnp.inf)[::-1], surplus, tile - 1)[::-1]

    kept = jnp.where(jnp.take_along_axis(dropped, selected, axis=1), EMPTY_SLOT, selected)
    if mode == "down":
        return kept
    place = jnp.where(added, jnp.cumsum(added, axis=1) - 1, extra_slots)
    extra = jnp.full((num_tokens, extra_slots), EMPTY_SLOT, jnp.int32)
    expert = jnp.broadcast_to(jnp.arange(num_experts, dtype=jnp.int32), scores.shape)
    return jnp.concatenate([kept, extra.at[token, place].set(expert, mode="drop")], axis=1)


def _best_tokens(scores: Float[Array, "T E"], wanted: Int[Array, " E"], most: int) -> Bool[Array, "T E"]:
    """Marks, for each expert, its `wanted[e] ≤ most` tokens of highest score, the lower id first among equals."""
    num_tokens, num_experts = scores.shape
    most = min(most, num_tokens)
    best = top_k(scores.T, most)[1]
    row = jnp.where(jnp.arange(most) < wanted[:, None], best, num_tokens)
    return jnp.zeros(scores.shape, bool).at[row, jnp.arange(num_experts)[:, None]].set(True, mode="drop")
