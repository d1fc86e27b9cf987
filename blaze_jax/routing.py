"""Routing: from router logits to the experts of every token, their weights, and what training wants to know of it."""

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from blaze_jax.dispatch import EMPTY_SLOT, build_dispatch
from blaze_jax.token_rounding import TokenRounding, round_token_counts

Scoring = Literal["softmax", "softmax_selected", "sigmoid"]

_TINY = 1e-20  # keeps 0/0 away when every selected sigmoid underflows


@dataclass(frozen=True, kw_only=True)
class Router:
    """How experts are chosen and weighted. Validated against the layer's sizes by `check`.

    Attributes:
      scoring: "softmax" over all experts before selection, "softmax_selected" over the K selected logits after it, or
        "sigmoid" of each logit.
      normalize_weights: divide a token's weights by their sum (already one after "softmax_selected").
      weight_scale: factor on the weights (routed_scaling_factor of DeepSeek-V3).
      num_groups: experts fall into this many equal groups of consecutive ids; 1 for no groups.
      groups_per_token: a token chooses only from this many groups, those with the largest sum of their two best scores.
      expert_capacity: an expert takes this many tokens, the first by id; the others lose that slot. None for no limit.
      capacity_factor: the same as a multiple of an expert's even share, `T·K/E`, rounded up.
      token_rounding: round each expert's token count to a multiple of `rounding_tile`: "up", "down" or "nearest".
      rounding_tile: rows of a kernel tile.
      rounding_slots: experts that rounding may add to one token; where more would be needed, counts go down instead.
    """

    scoring: Scoring = "softmax"
    normalize_weights: bool = True
    weight_scale: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
    expert_capacity: int | None = None
    capacity_factor: float | None = None
    token_rounding: TokenRounding | None = None
    rounding_tile: int = 128
    rounding_slots: int = 8

    def check(self, num_experts: int, experts_per_token: int) -> None:
        """Raises ValueError naming the first option that does not fit a layer of these sizes."""

        def require(holds: bool, name: str, rule: str) -> None:
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)!r} must be {rule}")

        if num_experts < 1:
            raise ValueError(f"{num_experts=} must be at least 1")
        if not 1 <= experts_per_token <= num_experts:
            raise ValueError(f"{experts_per_token=} must be from 1 to {num_experts=}")
        require(self.scoring in get_args(Scoring), "scoring", f"one of {', '.join(get_args(Scoring))}")
        require(self.weight_scale > 0, "weight_scale", "positive")
        require(
            self.num_groups >= 1 and num_experts % self.num_groups == 0, "num_groups", f"a divisor of {num_experts=}"
        )
        require(
            1 <= self.groups_per_token <= self.num_groups, "groups_per_token", f"from 1 to num_groups={self.num_groups}"
        )
        choice = num_experts // self.num_groups * self.groups_per_token
        require(
            experts_per_token <= choice,
            "groups_per_token",
            f"enough to choose {experts_per_token=} from {choice} experts",
        )
        require(self.expert_capacity is None or self.expert_capacity >= 1, "expert_capacity", "None or at least 1")
        require(self.capacity_factor is None or self.capacity_factor > 0, "capacity_factor", "None or positive")
        allowed = get_args(TokenRounding)
        require(self.token_rounding in (None, *allowed), "token_rounding", f"None or one of {', '.join(allowed)}")
        require(self.rounding_tile >= 1, "rounding_tile", "at least 1")
        require(self.rounding_slots >= 0, "rounding_slots", "at least 0")
        deciders = {name: getattr(self, name) for name in ("expert_capacity", "capacity_factor", "token_rounding")}
        given = [f"{name}={value!r}" for name, value in deciders.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: one alone may decide which tokens are kept")

    def for_phase(self, train: bool) -> "Router":
        """The router of that phase: rounding serves training only."""
        return self if train else replace(self, token_rounding=None)

    def capacity(self, num_tokens: int, num_experts: int, experts_per_token: int) -> int | None:
        """Tokens an expert takes at most, None for no limit."""
        if self.capacity_factor is None:
            return self.expert_capacity
        return math.ceil(self.capacity_factor * num_tokens * experts_per_token / num_experts)


class Routing(NamedTuple):
    """What the router decided. K' is K, plus `rounding_slots` when token rounding adds experts to a token.

    Attributes:
      experts: `(T, K')` int32, best first; -1 marks an empty slot (dropped by capacity, or rounding).
      weights: `(T, K')` float32, 0 in an empty slot. The gradient flows through them.
      tokens_per_expert: `(E,)` int32, tokens each expert computes.
      demand: `(E,)` int32, tokens that chose each expert, before any were dropped or added.
      dropped_share: float32, the share of the T·K choices that were dropped.
      load_balancing_loss: float32, `E · Σ_e demand_e / (T·K) · mean_t probability_te` (Switch Transformer), 1 in
        perfect balance.
      z_loss: float32, mean of `logsumexp(logits)²` (ST-MoE).
      entropy: float32, mean entropy of a token's expert probabilities, in nats, at most `log E`.
    """

    experts: Int[Array, "T K"]
    weights: Float[Array, "T K"]
    tokens_per_expert: Int[Array, " E"]
    demand: Int[Array, " E"]
    dropped_share: Float[Array, ""]
    load_balancing_loss: Float[Array, ""]
    z_loss: Float[Array, ""]
    entropy: Float[Array, ""]


def route(
    logits: Float[Array, "T E"],
    experts_per_token: int,
    *,
    router: Router | None = None,
    selection_bias: Float[Array, " E"] | None = None,
    **options,
) -> Routing:
    """Chooses `experts_per_token` experts for every token, in float32 (float64 logits stay).

    Equal scores go to the lower expert id. A logit of -inf rules its expert out: it is chosen last and gets weight 0. A
    row with NaN, or of -inf alone, gets valid, distinct experts and NaN weights. The weights and losses are
    differentiable, the choice is not.

    Args:
      logits: router logits.
      experts_per_token: K.
      router: how to choose; or give its fields as keywords, `route(logits, 2, scoring="sigmoid")`.
      selection_bias: added to the scores for selection only, not to the weights (loss-free balancing).
      **options: fields of `Router`.

    Raises:
      ValueError: logits are not a floating `(T, E)` array, or an option does not fit.
      TypeError: an option that `Router` does not have, or both a router and options.
    """
    if router is not None and options:
        raise TypeError(f"give a router or its fields, not both: {', '.join(options)}")
    router = Router(**options) if router is None else router
    logits = jnp.asarray(logits)
    if logits.ndim != 2 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits must be a floating array (T, E), got {logits.dtype} of shape {logits.shape}")
    num_tokens, num_experts = logits.shape
    router.check(num_experts, experts_per_token)
    if selection_bias is not None and selection_bias.shape != (num_experts,):
        raise ValueError(f"selection_bias has shape {selection_bias.shape}, must be {(num_experts,)}")

    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    scores = jax.nn.sigmoid(logits) if router.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    selected = _select(logits, scores, experts_per_token, router, selection_bias)
    demand = _count(selected, num_experts)

    experts = selected
    if capacity := router.capacity(num_tokens, num_experts, experts_per_token):
        experts = _drop_beyond_capacity(selected, num_experts, capacity)
    elif router.token_rounding is not None:
        experts = round_token_counts(
            jax.lax.stop_gradient(scores),
            selected,
            router.token_rounding,
            tile=router.rounding_tile,
            extra_slots=router.rounding_slots,
        )

    probabilities = scores / (scores.sum(-1, keepdims=True) + _TINY) if router.scoring == "sigmoid" else scores
    pairs = max(selected.size, 1)
    kept = (experts[:, :experts_per_token] != EMPTY_SLOT).sum()
    log_probabilities = jnp.log(jnp.where(probabilities > 0, probabilities, 1))
    return Routing(
        experts=experts,
        weights=_weights(logits, scores, selected, experts, router),
        tokens_per_expert=_count(experts, num_experts),
        demand=demand,
        dropped_share=(selected.size - kept).astype(logits.dtype) / pairs,
        load_balancing_loss=num_experts * jnp.vdot(demand.astype(logits.dtype) / pairs, _mean(probabilities)),
        z_loss=_mean(jnp.square(jax.nn.logsumexp(logits, axis=-1))),
        entropy=_mean(-jnp.sum(probabilities * log_probabilities, axis=-1)),
    )


def update_selection_bias(
    selection_bias: Float[Array, " E"], demand: Int[Array, " E"], rate: float
) -> Float[Array, " E"]:
    """Loss-free balancing (DeepSeek-V3): a bias rises by `rate` where demand is below the mean, and falls above it."""
    demand = demand.astype(selection_bias.dtype)
    return selection_bias + rate * jnp.sign(demand.mean() - demand)


def _select(logits, scores, experts_per_token, router, selection_bias) -> Int[Array, "T K"]:
    """Ids of the best experts, best first, ties to the lower id."""
    # Scores rank as logits do, only that they can underflow or saturate into ties; they serve where they are added up.
    ranking = logits if selection_bias is None and router.num_groups == 1 else scores
    if selection_bias is not None:
        ranking = ranking + selection_bias.astype(ranking.dtype)
    ranking = jax.lax.stop_gradient(jnp.where(ranking == 0, 0, ranking))  # -0 ties with +0
    if router.num_groups > 1:
        ranking = _keep_best_groups(ranking, router.num_groups, router.groups_per_token)
    return jax.lax.top_k(ranking, experts_per_token)[1].astype(jnp.int32)


def _keep_best_groups(ranking, num_groups, groups_per_token):
    """`ranking` with -inf outside a token's best groups, judged by the sum of their two best entries."""
    grouped = ranking.reshape(ranking.shape[0], num_groups, ranking.shape[1] // num_groups)
    group_score = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
    best = jax.lax.top_k(group_score, groups_per_token)[1]
    keep = (best[:, :, None] == jnp.arange(num_groups)).any(1)
    return jnp.where(keep[:, :, None], grouped, -jnp.inf).reshape(ranking.shape)


def _weights(logits, scores, selected, experts, router) -> Float[Array, "T K"]:
    """Weights of `experts`; what normalises them is the token's own choice, before dropping or rounding."""
    if router.scoring == "softmax_selected":
        largest = jax.lax.stop_gradient(_take(logits, selected).max(-1, keepdims=True))

        def raw(ids):
            return jnp.exp(_take(logits, ids) - largest)
    else:

        def raw(ids):
            return _take(scores, ids)

    weights = router.weight_scale * raw(experts)
    if router.normalize_weights or router.scoring == "softmax_selected":
        weights = weights / (raw(selected).sum(-1, keepdims=True) + _TINY)
    return jnp.where(experts == EMPTY_SLOT, 0, weights)


def _drop_beyond_capacity(selected, num_experts, capacity) -> Int[Array, "T K"]:
    """`selected` with empty slots where an expert already has `capacity` tokens of lower id."""
    dispatch = build_dispatch(selected, num_experts)
    rank = dispatch.token_index_map - dispatch.expert_token_offsets[selected]
    return jnp.where(rank < capacity, selected, EMPTY_SLOT)


def _take(array, experts):
    return jnp.take_along_axis(array, jnp.maximum(experts, 0), axis=-1)


def _count(experts, num_experts) -> Int[Array, " E"]:
    ids = jnp.where(experts == EMPTY_SLOT, num_experts, experts)
    return jnp.zeros(num_experts, jnp.int32).at[ids].add(1, mode="drop")


def _mean(array):
    """Mean over tokens; zero, not NaN, of none."""
    return array.sum(0) / max(array.shape[0], 1)
