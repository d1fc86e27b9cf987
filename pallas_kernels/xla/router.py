"""Who goes where: experts and weights of every token, what losses are made of, and experts that choose tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.compat import top_k
from pallas_kernels.contract import EMPTY_SLOT, KEY_BITS, Cutoffs, Losses, Routed, Rule, accumulator_dtype


def router(logits: Float[Array, "T E"], bias: Float[Array, " E"] | None, rule: Rule) -> Routed:
    """Chooses and weighs experts.

    Logits rank the experts; with a bias, or with groups, their scores do. Equal ranks go to the lower id. A logit of
    -inf rules its expert out; a token with fewer than K experts left has empty slots. A row with NaN gets valid,
    distinct experts and NaN weights.

    Args:
      logits: float32 or float64; narrower ones are widened.
      bias: added to the scores for ranking only.
      rule: how to choose and weigh.

    Returns:
      What `Routed` says. Weights, losses and probability are differentiable in the logits.
    """
    logits = widened(logits)
    return routed_to(logits, _select(logits, bias, rule), rule)


def routed_to(logits: Float[Array, "T E"], experts: Int[Array, "T K"], rule: Rule) -> Routed:
    """`router`, of `experts` that are chosen already; -1 is an empty slot, and E, which no expert has, weighs NaN."""
    logits = widened(logits)
    demand = jnp.zeros(logits.shape[1], jnp.int32).at[_past_the_last(experts, logits.shape[1])].add(1, mode="drop")
    losses, probability = _losses(logits, demand, rule)
    return Routed(experts, weights_of(logits, experts, experts, rule), demand, losses, probability)


def router_backward(
    logits: Float[Array, "T E"],
    experts: Int[Array, "T K"],
    demand: Int[Array, " E"],
    d_weights: Float[Array, "T K"],
    d_losses: Losses,
    d_probability: Float[Array, " E"],
    rule: Rule,
) -> Float[Array, "T E"]:
    """Gradient of `router`'s weights, losses and probability with respect to the logits.

    The logits, the choice and the demand are all it needs of the forward pass. The gradient of the gathered scores is
    spread by comparing ids, in the same elementwise passes as the rest, and not by a scatter. In all it is a few passes
    over `(T, E)`.
    """
    wide = widened(logits)
    common, common_vjp = jax.vjp(lambda l: _common_terms(l, rule), wide)
    _, weights_vjp = jax.vjp(lambda g, c: _weights(g, g, c, rule), _take(wide, experts), common)
    d_gathered, d_common = weights_vjp(d_weights)
    _, losses_vjp = jax.vjp(lambda l: _losses(l, demand, rule), wide)
    d_logits = losses_vjp((d_losses, d_probability))[0] + common_vjp(d_common)[0]
    return (d_logits + _spread(d_gathered, experts, logits.shape[1])).astype(logits.dtype)


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


def widened(logits: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """The logits in float32; float64 logits stay."""
    return logits.astype(accumulator_dtype(logits.dtype))


def ranking_scores(logits: Float[Array, "T E"], rule: Rule) -> Float[Array, "T E"]:
    """Scores of all experts, 0 to 1, without a derivative; NaN for a token that has no possible expert.

    The softmax is written in passes that XLA fuses: its own writes all of it twice if it is transposed next.
    """
    logits = jax.lax.stop_gradient(logits)
    if rule.scoring == "sigmoid":
        return jax.nn.sigmoid(logits)
    largest = logits.max(-1, keepdims=True)
    total = jnp.exp(logits - largest).sum(-1, keepdims=True)
    largest, total = jax.lax.optimization_barrier((largest, total))
    return jnp.exp(logits - largest) / total


def weights_of(
    logits: Float[Array, "T E"], selected: Int[Array, "T K"], experts: Int[Array, "T slots"], rule: Rule
) -> Float[Array, "T slots"]:
    """Weights of any `experts`, zero for -1, normalised over the token's choice `selected`."""
    chosen = _take(logits, selected)
    values = chosen if experts is selected else _take(logits, experts)
    return _weights(values, chosen, _common_terms(logits, rule), rule)


def _normalized(rule: Rule) -> bool:
    return rule.normalize or rule.scoring == "softmax_selected"


def _log_scores(logits, rule):
    """Logarithms of the scores; those of a softmax lack its denominator.

    They keep their differences and derivatives where the scores underflow.
    """
    return jax.nn.log_sigmoid(logits) if rule.scoring == "sigmoid" else logits


def _common_terms(logits, rule) -> tuple[Float[Array, "T 1"], Float[Array, "T 1"]]:
    """Terms to subtract from a token's log scores, one after the other: a softmax's denominator, if nothing cancels it.

    A NaN is the whole row's, although the experts chosen might not show it.
    """
    if rule.scoring == "softmax" and not _normalized(rule):
        logits = jnp.where(blank_rows(logits), 0, logits)
        largest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        return largest, jnp.log(jnp.exp(logits - largest).sum(-1, keepdims=True))
    nothing = jnp.zeros((logits.shape[0], 1), logits.dtype)
    return jnp.where(jnp.isnan(logits).any(-1, keepdims=True), jnp.nan, nothing), nothing


def _weights(values, selected_values, common, rule):
    """Weights from logits of experts and of the selected ones: -inf in an empty slot, which gets weight 0."""
    log_scores, selected = (_log_scores(v, rule) - common[0] - common[1] for v in (values, selected_values))
    if _normalized(rule):
        largest = jax.lax.stop_gradient(selected.max(-1, keepdims=True))
        largest = jnp.where(largest == -jnp.inf, 0, largest)
        total = jnp.exp(selected - largest).sum(-1, keepdims=True)
        weights = jnp.exp(log_scores - largest) / jnp.where(total == 0, 1, total)
    else:
        weights = jnp.exp(log_scores)
    # Once more at the end: XLA's minima and maxima on a CPU may lose a NaN on the way.
    poison = jnp.where(jnp.isnan(common[0]), jnp.nan, 0.0).astype(weights.dtype)
    return rule.scale * jnp.where(values == -jnp.inf, 0, weights + poison)


def _select(logits, bias, rule) -> Int[Array, "T K"]:
    """Ids of the best experts, best first, ties to the lower id; -1 where none is left."""
    # Scores rank as logits do, but can underflow or saturate into ties. They are used only where they are added up.
    ranking = jax.lax.stop_gradient(logits)
    if bias is not None or rule.num_groups > 1:
        ranking = ranking_scores(logits, rule)
    if bias is not None:
        ranking = ranking + jax.lax.stop_gradient(bias).astype(ranking.dtype)[None]
    ranking = jnp.where(logits == -jnp.inf, -jnp.inf, ranking)
    ranking = jnp.where(ranking == 0, 0, ranking)  # -0 ties with +0
    ranking = jnp.where(jnp.isnan(ranking), jnp.nan, ranking)  # a negative NaN would come last
    if rule.num_groups > 1:
        ranking = _keep_best_groups(ranking, rule)
    best, experts = top_k(ranking, rule.experts_per_token)
    return jnp.where(best == -jnp.inf, EMPTY_SLOT, experts.astype(jnp.int32))


def _keep_best_groups(ranking, rule):
    """`ranking` with -inf outside a token's best groups, judged by the sum of their best entries that are left."""
    grouped = ranking.reshape(ranking.shape[0], rule.num_groups, ranking.shape[1] // rule.num_groups)
    best_ones = top_k(grouped, min(rule.scores_per_group, grouped.shape[-1]))[0]
    group_score = jnp.where(best_ones == -jnp.inf, 0, best_ones).sum(-1)
    group_score = jnp.where(best_ones[..., 0] == -jnp.inf, -jnp.inf, group_score)
    best = top_k(group_score, rule.groups_per_token)[1]
    keep = (best[:, :, None] == jnp.arange(rule.num_groups)[None, None]).any(1)
    return jnp.where(keep[:, :, None], grouped, -jnp.inf).reshape(ranking.shape)


def _losses(logits, demand, rule) -> tuple[Losses, Float[Array, " E"]]:
    """The losses, and the mean probability of each expert."""
    blank, num_pairs = blank_rows(logits), max(logits.shape[0], 1) * rule.experts_per_token
    logits = jnp.where(blank, 0, logits)
    log_probabilities = jax.nn.log_softmax(_log_scores(logits, rule), axis=-1)
    probabilities = jnp.where(blank, 0, jnp.exp(log_probabilities))
    log_probabilities = jnp.where(probabilities > 0, log_probabilities, 0)
    return mean_losses(logits, blank, probabilities, log_probabilities, demand, num_pairs)


def mean_losses(
    logits: Float[Array, "T E"],
    blank: Bool[Array, "T 1"],
    probabilities: Float[Array, "T E"],
    log_probabilities: Float[Array, "T E"],
    demand: Int[Array, " E"],
    num_pairs: int | Float[Array, ""],
) -> tuple[Losses, Float[Array, " E"]]:
    """The losses, means over the tokens, and the mean probability of each expert.

    Where a token is `blank`, its logits and probabilities are zeros. Logarithms are 0 where a probability is.
    """
    tokens = max(logits.shape[0], 1)
    squared_log = jnp.where(blank[:, 0], 0, jnp.square(jax.nn.logsumexp(logits, axis=-1)))
    probability = probabilities.sum(0) / tokens
    losses = Losses(
        balance=balance_loss(demand, probability, num_pairs),
        squared_log=squared_log.sum() / tokens,
        entropy=-jnp.sum(jnp.sum(probabilities * log_probabilities, axis=-1)) / tokens,
    )
    return losses, probability


def balance_loss(
    demand: Int[Array, " E"], probability: Float[Array, " E"], num_pairs: int | Float[Array, ""]
) -> Float[Array, ""]:
    """Load-balancing loss from the demand of `num_pairs` pairs and the mean probability of each expert."""
    share = demand.astype(probability.dtype) / num_pairs
    return demand.shape[0] * jnp.vdot(share, probability)


def blank_rows(logits) -> Bool[Array, "T 1"]:
    """Tokens that have no possible expert."""
    return (logits == -jnp.inf).all(-1, keepdims=True)


def _past_the_last(experts, num_experts: int):
    """Ids with E in an empty slot, which a scatter drops; it would take -1 for the last expert."""
    return jnp.where(experts == EMPTY_SLOT, num_experts, experts)


def _take(logits, experts):
    """Logits of the experts, -inf in an empty slot."""
    taken = jnp.take_along_axis(logits, jnp.maximum(experts, 0), axis=-1)
    return jnp.where(experts == EMPTY_SLOT, -jnp.inf, taken)


def _spread(values: Float[Array, "T K"], experts: Int[Array, "T K"], num_experts: int) -> Float[Array, "T E"]:
    """The transpose of `_take` for distinct experts."""
    ids = jnp.arange(num_experts, dtype=jnp.int32)[None]
    out = jnp.zeros((experts.shape[0], num_experts), values.dtype)
    for slot in range(experts.shape[1]):
        out = jnp.where(experts[:, slot, None] == ids, values[:, slot, None], out)
    return out
