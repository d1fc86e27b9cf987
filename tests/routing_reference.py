"""Routing by its definition, in numpy float64, one token or expert at a time."""

import numpy as np

from tests.routings import EMPTY


def softmax(logits):
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def scores_of(logits, scoring: str):
    logits = np.asarray(logits, np.float64)
    return 1 / (1 + np.exp(-logits)) if scoring == "sigmoid" else softmax(logits)


def best_first(values, count: int):
    """Ids of the largest values, the lower id first among equals."""
    return np.argsort(-values, kind="stable")[:count]


def choose(scores, experts_per_token: int, bias=0.0, num_groups: int = 1, groups_per_token: int = 1):
    """Experts of every token: the best biased scores within the groups whose two best add up to most."""
    chosen = []
    for ranking in scores + bias:
        groups = np.split(ranking, num_groups)
        strength = np.array([np.sort(group)[-2:].sum() for group in groups])
        kept = np.isin(np.arange(num_groups), best_first(strength, groups_per_token))
        ranking = np.where(np.repeat(kept, ranking.size // num_groups), ranking, -np.inf)
        chosen.append(best_first(ranking, experts_per_token))
    return np.array(chosen, np.int32)


def weights_of(logits, experts, scoring: str, normalize: bool, scale: float):
    """Weights of the chosen experts."""
    if scoring == "softmax_selected":
        return scale * softmax(np.take_along_axis(np.asarray(logits, np.float64), experts, axis=1))
    chosen = np.take_along_axis(scores_of(logits, scoring), experts, axis=1)
    return scale * (chosen / chosen.sum(-1, keepdims=True) if normalize else chosen)


def drop_beyond_capacity(experts, num_experts: int, capacity: int):
    """Empty slots wherever an expert already took `capacity` tokens."""
    taken, kept = np.zeros(num_experts, int), experts.copy()
    for (token, slot), expert in np.ndenumerate(experts):
        if taken[expert] == capacity:
            kept[token, slot] = EMPTY
        else:
            taken[expert] += 1
    return kept


def counts(experts, num_experts: int):
    return np.bincount(experts[experts != EMPTY], minlength=num_experts)


def target_counts(count, num_tokens: int, mode: str, tile: int):
    """Multiples of `tile` to round each count to; down where there are too few tokens to round up."""
    down, rest = count - count % tile, count % tile
    up = down + tile * (rest > 0)
    wanted = {"down": down, "up": up, "nearest": np.where(2 * rest >= tile, up, down)}[mode]
    return np.where(wanted > num_tokens, down, wanted)


def rounded_members(scores, selected, mode: str, tile: int):
    """Mask `(T, E)` of who each expert computes, its own tokens ahead of the others, when slots do not run out."""
    num_tokens = len(scores)
    members = np.zeros(scores.shape, bool)
    for expert, column in enumerate(scores.T):
        own = (selected == expert).any(1)
        order = sorted(range(num_tokens), key=lambda t: (not own[t], -column[t], t))
        members[order[: target_counts(own.sum(), num_tokens, mode, tile)], expert] = True
    return members
