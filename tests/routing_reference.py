"""Logits, and routing by its definition, in numpy float64, one token or expert at a time."""

import jax.numpy as jnp
import numpy as np

from tests.routings import EMPTY

SCORINGS = ("softmax", "softmax_selected", "sigmoid")
LOSSES = ("load_balancing_loss", "z_loss", "entropy")


def random_logits(*shape: int, seed: int = 0, scale: float = 2.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def total(route, logits, share_of_losses: float = 1.0, **options):
    """Something that depends on all that is differentiable in what `route` returns."""
    out = route(logits, **options)
    factors = jnp.sin(1 + jnp.arange(out.weights.size, dtype=jnp.float32)).reshape(out.weights.shape)
    losses = sum((i + 2) * getattr(out, name) for i, name in enumerate(LOSSES))
    return (factors * out.weights).sum() + share_of_losses * losses


def softmax(logits):
    """Zeros for a row of -inf alone."""
    largest = logits.max(-1, keepdims=True)
    shifted = np.exp(logits - np.where(largest == -np.inf, 0, largest))
    total = shifted.sum(-1, keepdims=True)
    return shifted / np.where(total == 0, 1, total)


def scores_of(logits, scoring: str):
    logits = np.asarray(logits, np.float64)
    return np.exp(-np.logaddexp(0, -logits)) if scoring == "sigmoid" else softmax(logits)


def best_first(values, count: int):
    """Ids of the largest values, the lower id first among equals."""
    return np.argsort(-values, kind="stable")[:count]


def choose(
    scores, experts_per_token: int, bias=None, num_groups: int = 1, groups_per_token: int = 1, possible=True, summed=2
):
    """Experts of every token: the best biased scores within the groups whose best, `summed` of each, add up to most.

    Where too few are `possible`, slots stay empty.
    """
    chosen = []
    for ranking in np.where(possible, scores if bias is None else scores + bias, -np.inf):
        groups = [np.sort(group[group > -np.inf]) for group in np.split(ranking, num_groups)]
        strength = np.array([group[-summed:].sum() if group.size else -np.inf for group in groups])
        kept = np.isin(np.arange(num_groups), best_first(strength, groups_per_token))
        ranking = np.where(np.repeat(kept, ranking.size // num_groups), ranking, -np.inf)
        best = best_first(ranking, experts_per_token)
        chosen.append(np.where(ranking[best] == -np.inf, EMPTY, best))
    return np.array(chosen, np.int32)


def log_scores_of(logits, scoring: str):
    """Logarithms of the scores; quotients of them survive where the scores themselves underflow."""
    logits = np.asarray(logits, np.float64)
    return -np.logaddexp(0, -logits) if scoring == "sigmoid" else logits - log_sum(logits)


def log_sum(values):
    return np.logaddexp.reduce(values, axis=-1, keepdims=True)


def weights_of(logits, experts, scoring: str, normalize: bool, scale: float):
    """Weights of the chosen experts, 0 in an empty slot."""
    with np.errstate(invalid="ignore"):  # rows that have no possible expert
        chosen = np.take_along_axis(log_scores_of(logits, scoring), np.maximum(experts, 0), axis=1)
        chosen = np.where(experts == EMPTY, -np.inf, chosen)
        if normalize or scoring == "softmax_selected":
            chosen = chosen - log_sum(chosen)
    return np.where(experts == EMPTY, 0, scale * np.exp(chosen))


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
    """Multiples of `tile` to round each count to; with too few tokens for that, down, or the count itself."""
    down, rest = count - count % tile, count % tile
    up = down + tile * (rest > 0)
    wanted = {"down": down, "up": up, "nearest": np.where(2 * rest >= tile, up, down)}[mode]
    return np.where(wanted > num_tokens, count if mode == "up" else down, wanted)


def rounded_members(scores, selected, mode: str, tile: int):
    """Mask `(T, E)` of who each expert computes, its own tokens ahead of the others, when slots do not run out."""
    num_tokens = len(scores)
    members = np.zeros(scores.shape, bool)
    for expert, column in enumerate(scores.T):
        own = (selected == expert).any(1)
        order = sorted(range(num_tokens), key=lambda t: (not own[t], -column[t], t))
        members[order[: target_counts(own.sum(), num_tokens, mode, tile)], expert] = True
    return members
