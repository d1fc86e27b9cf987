"""Token rounding (SonicMoE, arXiv 2512.14080): whole kernel tiles of tokens for every expert, in training."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from blaze_jax.transformations import one_by_one
from pallas_kernels import xla
from pallas_kernels.contract import EMPTY_SLOT
from pallas_kernels.family import Kernels

TokenRounding = Literal["up", "down", "nearest"]

_CHOSEN = 1 << 30  # above the bits of any float32 below two


def round_token_counts(
    scores: Float[Array, "T E"],
    selected: Int[Array, "T K"],
    demand: Int[Array, " E"],
    mode: TokenRounding,
    *,
    tile: int,
    extra_slots: int,
    kernels: Kernels = xla,
) -> tuple[Int[Array, "T K_extra"], Int[Array, " E"]]:
    """Experts of every token after each expert's count went to a multiple of `tile`.

    An expert ranks the tokens that chose it before the others, and each kind by score, and takes as many as its new
    count says: rounding down, it gives up its tokens of lowest score; rounding up, it takes the tokens of highest score
    among those that did not choose it. Equal scores prefer the lower token id. A token takes at most `extra_slots`
    experts it did not choose, and none whose score is 0, as that of one ruled out is. An expert whose last tile cannot
    be filled for one of these reasons keeps its count under "up", which drops no token, and goes down under "nearest".

    Costs int32 keys of shape (E, T) and a few passes over them, one that adds experts and up to two that find cut-offs:
    three passes each by radix selection on Hopper, 31 by bisection elsewhere. Nothing is sorted.

    Args:
      scores: routing scores from 0 to 1, ranked in float32; NaN counts as 0.
      selected: distinct experts of each token, -1 in an empty slot.
      demand: tokens that chose each expert.
      mode: "up", "down", or "nearest" (half a tile goes up).
      tile: rows of a kernel tile.
      extra_slots: slots added to every token, E - K at most; "down" uses none and adds none.
      kernels: those for Hopper need a token.

    Returns:
      `selected` with -1 for the dropped, and, unless `mode` is "down", `extra_slots` more slots, -1 where unused; and
      the tokens that each expert takes. Neither has a derivative.
    """
    run = partial(_round_token_counts, mode, tile, extra_slots, kernels)
    # Of whole numbers there is no derivative, and kernels have no rule for one.
    return one_by_one(kernels, run)(*lax.stop_gradient((scores, selected, demand)))


def _round_token_counts(mode: TokenRounding, tile: int, extra_slots: int, kernels: Kernels, scores, selected, demand):
    num_tokens, num_experts = scores.shape
    extra_slots = min(extra_slots, num_experts - selected.shape[1])
    down = demand // tile * tile
    last_resort = demand if mode == "up" else down
    if mode == "up" and not extra_slots:
        return selected, demand

    token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    scores = jnp.where(jnp.isnan(scores), 0, scores)  # else a NaN token would be every expert's favourite
    # The bits of floats that are not negative rank as the floats do.
    ranks = jax.lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.int32).T
    slots = jnp.arange(selected.shape[1], dtype=jnp.int32)[None]
    rows = jnp.where(selected == EMPTY_SLOT, num_experts + slots, selected)  # distinct where dropped, too
    keys = ranks.at[rows, token].add(_CHOSEN, mode="drop", unique_indices=True)
    own_keys = keys.at[rows, token].get(mode="fill", fill_value=0)

    def kept(cutoffs):
        chosen = selected != EMPTY_SLOT
        return jnp.where(chosen & cutoffs.take(own_keys, jnp.maximum(selected, 0), token), selected, EMPTY_SLOT)

    if mode == "down" or not extra_slots:
        return kept(kernels.token_cutoffs(keys, down)), down
    wanted = -(-demand // tile) * tile if mode == "up" else (demand + tile // 2) // tile * tile
    counts = jnp.where(wanted <= jnp.sum(keys > 0, axis=1, dtype=jnp.int32), wanted, last_resort)
    cutoffs = kernels.token_cutoffs(keys, counts)
    added, crowded = kernels.experts_added(keys, cutoffs, _CHOSEN, extra_slots)
    lower = kernels.token_cutoffs(keys, jnp.where(crowded, last_resort, 0))
    cutoffs = jax.tree.map(lambda new, old: jnp.where(crowded, new, old), lower, cutoffs)
    experts = jnp.concatenate([kept(cutoffs), jnp.where(crowded[added], EMPTY_SLOT, added)], axis=1)
    return experts, jnp.where(crowded, last_resort, counts)
