"""Routers that leave it to the tokens how many experts each takes: by activity, by a share of the probability, or all.

With logits l, a ReLU router takes the experts with l > 0 (BlockFFN, ReMoE), top-p the likeliest ones until their
probabilities suffice, a threshold those that are likely enough, and dense training all of them (DS-MoE). A token has as
many slots as it may take experts, and those that it does not need are empty. These routers are plain XLA on all
platforms: a few passes over `(T, E)`.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from blaze_jax.router import Router
from pallas_kernels.compat import top_k
from pallas_kernels.contract import EMPTY_SLOT, Routed
from pallas_kernels.xla.router import blank_rows, mean_losses, widened

_RMS_EPSILON = 1e-5


def route_open_ended(
    logits: Float[Array, "T E"],
    experts_per_token: int | None,
    router: Router,
    gain: Float[Array, " E"] | None,
    given: Int[Array, "T slots"] | None,
) -> Routed:
    """Experts, weights and losses; the demand counts all experts that a token wants, also those beyond K.

    Args:
      logits: -inf rules an expert out. NaN takes its expert, and makes NaN of all weights of its token.
      experts_per_token: K, the most that a token takes, best first. None for no limit: without top-p expert e is then
        in slot e, and nothing is selected. Dense training has no limit.
      router: an open-ended one.
      gain: of weights that are normalised; None for ones.
      given: experts that are chosen already, see `routed_to`.
    """
    logits = widened(logits)
    blank = blank_rows(logits)
    values = relu(logits) if router.scoring == "relu" else jax.nn.softmax(jnp.where(blank, 0, logits))
    values = jnp.where(blank, 0, values)
    total = values.sum(-1, keepdims=True)
    if given is None:
        experts, demand = _choice(logits, values, experts_per_token, router)
    else:
        experts, demand = given, demand_of(given, logits.shape[1])

    weights = values
    if router.weight_norm == "rms":
        weights *= jax.lax.rsqrt(jnp.square(values).mean(-1, keepdims=True) + _RMS_EPSILON)
        weights = weights if gain is None else weights * gain.astype(weights.dtype)[None]
    weights = jnp.where(jnp.isnan(total), jnp.nan, router.weight_scale * weights)
    if given is None and _all_in_order(experts_per_token, router):  # a gather would keep two ids a slot
        weights = jnp.where(experts == EMPTY_SLOT, 0, weights)
    else:
        weights = _of_slots(weights, experts)
    if router.normalize_weights:
        chosen = weights.sum(-1, keepdims=True)
        weights = router.weight_scale * weights / jnp.where(chosen == 0, 1, chosen)

    probabilities = probabilities_of_relu(logits) if router.scoring == "relu" else values
    log_probabilities = jnp.log(jnp.where(probabilities > 0, probabilities, 1))
    pairs = number_of_pairs(demand, probabilities.dtype)
    zeroed = jnp.where(blank, 0, logits)
    losses, probability = mean_losses(zeroed, blank, probabilities, log_probabilities, demand, pairs)
    return Routed(experts, weights, demand, losses, probability)


def probabilities_of_relu(logits: Float[Array, "... E"]) -> Float[Array, "... E"]:
    """`relu(l) / Σ relu(l)`, zeros for a token without an active expert."""
    values = relu(logits)
    total = values.sum(-1, keepdims=True)
    return values / jnp.where(total == 0, 1, total)


def activity_loss(logits: Float[Array, "T E"], demand: Int[Array, " E"], axes: tuple[str, ...]) -> Float[Array, ""]:
    """`E · Σ_e demand_e / T · mean_t relu(l_te)`, of the T tokens that count on all devices along `axes`."""
    activity, tokens = relu(widened(logits)).sum(0), (~blank_rows(logits)).sum(dtype=jnp.int32)
    if axes:
        activity, demand, tokens = lax.psum((activity, demand, tokens), axes)
    tokens = jnp.maximum(tokens, 1).astype(activity.dtype)
    return demand.shape[0] * jnp.vdot(demand.astype(activity.dtype) / tokens, activity / tokens)


def update_activity_weight(
    weight: Float[Array, ""],
    tokens_per_expert: Int[Array, "... E"],
    num_tokens: int,
    experts_per_token: float,
    *,
    factor: float = 1.2,
) -> Float[Array, ""]:
    """The coefficient of the activity loss for the next step (ReMoE, arXiv 2412.14711), which begins with 1e-8.

    It rises by `factor` where tokens have had more than `experts_per_token` experts on average, and falls where fewer.

    Args:
      weight: the coefficient of this step.
      tokens_per_expert: of one layer, or those of all layers together.
      num_tokens: tokens of a layer, without masked ones.
      experts_per_token: how many experts they are to have.
      factor: how fast it moves.
    """
    counts = jnp.asarray(tokens_per_expert, jnp.float32)
    mean = counts.sum() / (num_tokens * (counts.size // counts.shape[-1]))
    return weight * factor ** jnp.sign(mean - experts_per_token).astype(weight.dtype)


def relu(logits: Float[Array, "..."]) -> Float[Array, "..."]:
    """`max(l, 0)` with the derivative 0 at 0. NaN stays, which XLA's maximum on a CPU may lose."""
    return jnp.where(logits <= 0, 0, logits)


def number_of_pairs(demand: Int[Array, " E"], dtype) -> Float[Array, ""]:
    """Pairs where tokens have no fixed number of experts, at least 1, in the type of what they divide."""
    return jnp.maximum(demand.sum(), 1).astype(dtype)


def _all_in_order(experts_per_token: int | None, router: Router) -> bool:
    """Whether nothing is selected: expert e is in slot e."""
    return router.train == "dense" or (experts_per_token is None and router.top_p is None)


def _choice(logits, values, experts_per_token: int | None, router: Router):
    """The experts of each slot, and how many tokens want each expert."""
    num_experts = logits.shape[1]
    ranking, slots = jax.lax.stop_gradient(logits), experts_per_token or num_experts
    ranking = jnp.where(jnp.isnan(ranking), jnp.nan, ranking)  # a negative NaN would come last
    if router.top_p is None:
        if router.scoring == "relu":
            active = ~(ranking <= 0)
        elif router.train == "dense":
            active = ranking != -jnp.inf
        else:
            active = ~(values < router.threshold) & (ranking != -jnp.inf)
        demand = active.sum(0, dtype=jnp.int32)
        if _all_in_order(experts_per_token, router):
            experts = jnp.broadcast_to(jnp.arange(num_experts, dtype=jnp.int32)[None], active.shape)
            return jnp.where(active, experts, EMPTY_SLOT), demand
        ranking = jnp.where(ranking == 0, 0, ranking)  # -0 ties with +0
        best, experts = top_k(jnp.where(active, ranking, -jnp.inf), slots)
        return jnp.where(best == -jnp.inf, EMPTY_SLOT, experts.astype(jnp.int32)), demand
    best, experts = top_k(jnp.where(ranking == 0, 0, ranking), num_experts)
    sorted_values = jnp.take_along_axis(jax.lax.stop_gradient(values), experts, axis=-1)
    before = jnp.cumsum(sorted_values, axis=-1) - sorted_values
    first = jnp.arange(num_experts)[None] == 0  # of NaN, too
    wanted = (first | (before < router.top_p)) & (best != -jnp.inf)
    experts = jnp.where(wanted, experts.astype(jnp.int32), EMPTY_SLOT)
    return experts[:, :slots], demand_of(experts, num_experts)


def demand_of(experts: Int[Array, "T slots"], num_experts: int) -> Int[Array, " E"]:
    """Tokens of each expert."""
    counted = jnp.where(experts == EMPTY_SLOT, num_experts, experts)
    return jnp.zeros(num_experts, jnp.int32).at[counted].add(1, mode="drop")


def _of_slots(weights: Float[Array, "T E"], experts: Int[Array, "T slots"]) -> Float[Array, "T slots"]:
    """The weights of the experts in the slots: 0 of an empty slot, NaN of an expert that there is not."""
    taken = jnp.take_along_axis(weights, jnp.clip(experts, 0, weights.shape[1] - 1), axis=-1)
    taken = jnp.where(experts < weights.shape[1], taken, jnp.nan)
    return jnp.where(experts == EMPTY_SLOT, 0, taken)
