"""Router: the experts of every token, their weights, and what its losses are made of."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.compat import top_k

Scoring = Literal["softmax", "softmax_selected", "sigmoid"]

TINY = 1e-20  # keeps 0/0 away when every selected sigmoid underflows


class Rule(NamedTuple):
    """How experts are chosen and weighted.

    Attributes:
      experts_per_token: K.
      scoring: scores are a "softmax" of the logits or their "sigmoid"; "softmax_selected" ranks as "softmax" does, and
        weights by a softmax over the K selected logits alone.
      normalize: divide a token's weights by their sum (already one after "softmax_selected").
      scale: factor on the weights.
      num_groups: experts fall into this many equal groups of consecutive ids.
      groups_per_token: a token chooses only from this many groups, those with the largest sum of their two best scores.
    """

    experts_per_token: int
    scoring: Scoring
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1


class Losses(NamedTuple):
    """Means over tokens, of the weights' dtype; zero of no tokens.

    Attributes:
      balance: `E · Σ_e demand_e / (T·K) · mean_t probability_te`, one in perfect balance.
      squared_log: of `logsumexp(logits)²`.
      entropy: of the tokens' expert probabilities, in nats.
    """

    balance: Float[Array, ""]
    squared_log: Float[Array, ""]
    entropy: Float[Array, ""]


class Routed(NamedTuple):
    """What the router returns.

    Attributes:
      experts: `(T, K)` int32, distinct, best first.
      weights: `(T, K)`.
      demand: `(E,)` int32, tokens of each expert.
      losses: what may be added to a training loss, unweighted.
      dispatched: what `dispatch` of the same module makes of `experts`, where that was no further work; else None.
    """

    experts: Int[Array, "T K"]
    weights: Float[Array, "T K"]
    demand: Int[Array, " E"]
    losses: Losses
    dispatched: Any = None


def router(logits: Float[Array, "T E"], bias: Float[Array, " E"] | None, rule: Rule) -> Routed:
    """Chooses and weighs experts.

    Logits rank the experts; with a bias, or with groups, their scores do. Equal ranks go to the lower id. A logit of
    -inf is chosen last, with weight 0. A row with NaN, or of -inf alone, gets valid, distinct experts and NaN weights.

    Args:
      logits: float32 or float64; narrower ones are widened.
      bias: added to the scores for ranking only.
      rule: how to choose and weigh.

    Returns:
      What `Routed` says. Weights and losses are differentiable in the logits.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    scores = scores_of(logits, rule)
    experts = _select(logits, scores, bias, rule)
    demand = jnp.zeros(logits.shape[1], jnp.int32).at[experts].add(1)
    weights = weights_of(logits, scores, experts, experts, rule)
    return Routed(experts, weights, demand, _losses(logits, scores, demand, rule))


def router_backward(
    logits: Float[Array, "T E"],
    experts: Int[Array, "T K"],
    demand: Int[Array, " E"],
    d_weights: Float[Array, "T K"],
    d_losses: Losses,
    rule: Rule,
) -> Float[Array, "T E"]:
    """Gradient of `router`'s weights and losses with respect to the logits.

    The logits, the choice and the demand are all it needs of the forward pass. The gradient of the gathered scores is
    spread by comparing ids, in the same elementwise passes as the rest, and not by a scatter. In all it is a few passes
    over `(T, E)`.
    """
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    scores, scores_vjp = jax.vjp(lambda l: scores_of(l, rule), wide)
    gathered = _take(_weight_source(wide, scores, rule), experts)
    _, weights_vjp = jax.vjp(lambda g: _weights(g, g, rule), gathered)
    _, losses_vjp = jax.vjp(lambda l, s: _losses(l, s, demand, rule), wide, scores)
    d_logits, d_scores = losses_vjp(d_losses)
    d_gathered = _spread(weights_vjp(d_weights)[0], experts, logits.shape[1])
    if rule.scoring == "softmax_selected":
        d_logits += d_gathered
    else:
        d_scores += d_gathered
    return (d_logits + scores_vjp(d_scores)[0]).astype(logits.dtype)


def scores_of(logits: Float[Array, "T E"], rule: Rule) -> Float[Array, "T E"]:
    """Scores of all experts, at least 0."""
    return jax.nn.sigmoid(logits) if rule.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)


def scores_for_ranking(logits: Float[Array, "T E"], rule: Rule) -> Float[Array, "T E"]:
    """The same without a derivative, in passes that XLA fuses: by itself it writes all down twice to transpose them."""
    logits = jax.lax.stop_gradient(logits)
    if rule.scoring == "sigmoid":
        return scores_of(logits, rule)
    largest = logits.max(-1, keepdims=True)
    total = jnp.exp(logits - largest).sum(-1, keepdims=True)
    largest, total = jax.lax.optimization_barrier((largest, total))
    return jnp.exp(logits - largest) / total


def weights_of(
    logits: Float[Array, "T E"],
    scores: Float[Array, "T E"],
    selected: Int[Array, "T K"],
    experts: Int[Array, "T slots"],
    rule: Rule,
) -> Float[Array, "T slots"]:
    """Weights of any `experts`; what normalises them is the token's choice `selected`. An id of -1 gets garbage."""
    source = _weight_source(logits, scores, rule)
    return _weights(_take(source, experts), _take(source, selected), rule)


def _weight_source(logits, scores, rule):
    return logits if rule.scoring == "softmax_selected" else scores


def _weights(values, selected_values, rule):
    """Weights from the logits or scores of experts and of the selected ones."""
    raw: Callable = lambda x: x  # noqa: E731
    if rule.scoring == "softmax_selected":
        largest = jax.lax.stop_gradient(selected_values.max(-1, keepdims=True))
        raw = lambda x: jnp.exp(x - largest)  # noqa: E731
    weights = rule.scale * raw(values)
    if rule.normalize or rule.scoring == "softmax_selected":
        weights = weights / (raw(selected_values).sum(-1, keepdims=True) + TINY)
    return weights


def _select(logits, scores, bias, rule) -> Int[Array, "T K"]:
    """Ids of the best experts, best first, ties to the lower id."""
    # Scores rank as logits do, only that they can underflow or saturate into ties; they serve where they are added up.
    ranking = logits if bias is None and rule.num_groups == 1 else scores
    if bias is not None:
        ranking = ranking + bias.astype(ranking.dtype)
    ranking = jax.lax.stop_gradient(jnp.where(ranking == 0, 0, ranking))  # -0 ties with +0
    if rule.num_groups > 1:
        ranking = _keep_best_groups(ranking, rule.num_groups, rule.groups_per_token)
    return top_k(ranking, rule.experts_per_token)[1].astype(jnp.int32)


def _keep_best_groups(ranking, num_groups, groups_per_token):
    """`ranking` with -inf outside a token's best groups, judged by the sum of their two best entries."""
    grouped = ranking.reshape(ranking.shape[0], num_groups, ranking.shape[1] // num_groups)
    group_score = top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
    best = top_k(group_score, groups_per_token)[1]
    keep = (best[:, :, None] == jnp.arange(num_groups)).any(1)
    return jnp.where(keep[:, :, None], grouped, -jnp.inf).reshape(ranking.shape)


def _losses(logits, scores, demand, rule) -> Losses:
    tokens, num_experts = max(logits.shape[0], 1), logits.shape[1]
    probabilities = scores / (scores.sum(-1, keepdims=True) + TINY) if rule.scoring == "sigmoid" else scores
    log_probabilities = jnp.log(jnp.where(probabilities > 0, probabilities, 1))
    share = demand.astype(logits.dtype) / (tokens * rule.experts_per_token)
    return Losses(
        balance=num_experts * jnp.vdot(share, probabilities.sum(0) / tokens),
        squared_log=jnp.square(jax.nn.logsumexp(logits, axis=-1)).sum() / tokens,
        entropy=-jnp.sum(jnp.sum(probabilities * log_probabilities, axis=-1)) / tokens,
    )


def _take(array, experts):
    return jnp.take_along_axis(array, jnp.maximum(experts, 0), axis=-1)


def _spread(values: Float[Array, "T K"], experts: Int[Array, "T K"], num_experts: int) -> Float[Array, "T E"]:
    """The transpose of `_take` for distinct experts."""
    ids = jnp.arange(num_experts, dtype=jnp.int32)
    out = jnp.zeros((experts.shape[0], num_experts), values.dtype)
    for slot in range(experts.shape[1]):
        out = jnp.where(experts[:, slot, None] == ids, values[:, slot, None], out)
    return out
