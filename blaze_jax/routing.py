"""Routing: from router logits to the experts of every token, their weights, and what training wants to know of it."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import P, lax
from jaxtyping import Array, Bool, Float, Int

from blaze_jax.active_experts import activity_loss, demand_of, number_of_pairs, route_open_ended
from blaze_jax.checks import as_array
from blaze_jax.dispatch import Grouped, group_by_expert
from blaze_jax.explicit_mesh import explicit_mesh, per_device, placed, token_axes
from blaze_jax.given_routing import ExpertFactors, GivenRouting
from blaze_jax.implementation import (
    Implementation,
    choose_dispatch_implementation,
    choose_router_implementation,
    kernels_of,
)
from blaze_jax.router import Router, check_router
from blaze_jax.token_rounding import round_token_counts
from blaze_jax.transformations import REVERSE_MODE_ONLY, compiled_once, differentiated_once
from pallas_kernels.compat import reverse_mode_token
from pallas_kernels.contract import EMPTY_SLOT, Losses, Routed, Rule
from pallas_kernels.family import Kernels
from pallas_kernels.xla.router import balance_loss, blank_rows, ranking_scores, routed_to, weights_of, widened

type AxisName = str | tuple[str, ...] | None


class Routing(NamedTuple):
    """The router's decision. K' is K, or E for None and in dense training, plus `rounding_slots` of token rounding.

    The counts, losses and shares are those of all tokens of the call; with an `axis_name`, of all devices along it. A
    token without a possible expert, as padding with logits of -inf is, counts in none of them: T are the others.

    Attributes:
      experts: `(T, K')` int32, best first, or, without K and top-p, and in dense training, expert e in slot e; -1 marks
        an empty slot (none possible or wanted, dropped by capacity, or rounding).
      weights: `(T, K')` float32, 0 in an empty slot. The gradient flows through them.
      tokens_per_expert: `(E,)` int32, tokens each expert computes.
      demand: `(E,)` int32, tokens that chose each expert, before any were dropped or added.
      dropped_share: float32, the share of the choices that were dropped.
      load_balancing_loss: float32, `E · Σ_e demand_e / (T·K) · mean_t probability_te` (Switch Transformer), 1 in
        perfect balance. Where tokens have no fixed number of experts, `Σ demand` takes the place of T·K; of a ReLU
        router, a token's probabilities are `relu(l) / Σ relu(l)`.
      z_loss: float32, mean of `logsumexp(logits)²` (ST-MoE).
      entropy: float32, mean entropy of a token's expert probabilities, in nats, at most `log E`.
      other_losses: float32, losses that only some have, by name. "activity_loss" of a ReLU router,
        `E · Σ_e demand_e / T · mean_t relu(l_te)`, is k times what ReMoE adds for k experts a token. Where asked for,
        "mutual_information_loss", the entropy less that of the tokens' mean probabilities, is from `-log E` to 0
        (DS-MoE): less where tokens are sure of their experts, and all experts are in use. From `moe`, what its
        configuration asks for of "chunk_loss" and "locality_loss", see `neighbour_losses`.
      weighted_losses: from `moe`, the losses above that its configuration gives a weight, times that weight, by name:
        add their sum to the training loss. Empty from `route`.
    """

    experts: Int[Array, "T K"]
    weights: Float[Array, "T K"]
    tokens_per_expert: Int[Array, " E"]
    demand: Int[Array, " E"]
    dropped_share: Float[Array, ""]
    load_balancing_loss: Float[Array, ""]
    z_loss: Float[Array, ""]
    entropy: Float[Array, ""]
    other_losses: Mapping[str, Float[Array, ""]]
    weighted_losses: Mapping[str, Float[Array, ""]]


def routing_specs(by_token: P) -> Routing:
    """How `jax.shard_map` splits a routing: what there is of each token `by_token`, and nothing else."""
    of_fields: dict[str, Any] = dict.fromkeys(Routing._fields, P()) | {"experts": by_token, "weights": by_token}
    return Routing(**of_fields)


def route(
    logits: Float[Array, "T E"],
    experts_per_token: int | None,
    *,
    router: Router | None = None,
    selection_bias: Float[Array, " E"] | None = None,
    gain: Float[Array, " E"] | None = None,
    mask: Bool[Array, " T"] | None = None,
    expert_ids: Int[Array, "T slots"] | None = None,
    axis_name: AxisName = None,
    implementation: Implementation | None = None,
    mutual_information: bool = False,
    **options: Any,
) -> Routing:
    """Chooses `experts_per_token` experts for every token, in float32 (float64 logits stay).

    Equal scores go to the lower expert id. A logit of -inf rules its expert out, whatever the scoring, the selection
    bias and the groups: a token with fewer than K possible experts has empty slots, and one without any does not count
    in losses and statistics. A row with NaN gets valid, distinct experts and NaN weights. The weights and losses are
    differentiable, the choice is not.

    Given `expert_ids`, nothing is chosen: the weights, and all else, are those of these experts by today's logits, and
    gradients flow through them. Reinforcement learning replays the choice of the model that generated a text so.
    Capacity and token rounding do not apply then. An id out of range, or one that a token has twice, makes NaN weights.

    Args:
      logits: router logits.
      experts_per_token: K; of a ReLU router and with `top_p` the most that a token takes, and None for no limit.
      router: how to choose; or give its fields as keywords, `route(logits, 2, scoring="sigmoid")`.
      selection_bias: added to the scores for selection only, not to the weights (loss-free balancing).
      gain: factors of the experts' weights with `weight_norm`, None for ones.
      mask: True for real tokens. The others go to no expert, and count in no loss, statistic or capacity.
      expert_ids: the experts of every token, -1 for none, as in `Routing.experts` of an earlier call.
      axis_name: inside `jax.shard_map`, the mesh axes (one or several) over which the tokens are split: demand, losses
        and statistics are then those of all their devices. Capacity and token rounding are each device's own.
      implementation: None for the best that can run here, or "mosaic_gpu" or "xla". The kernel for GPUs is one pass
        over the logits, but its scores can differ from XLA's in the last bits; where scores rank the experts (with a
        selection bias, or with groups), nearly equal ones may then be chosen differently.
      mutual_information: whether to compute that loss.
      **options: fields of `Router`. As in training: `router.for_phase(train=False)` is that of evaluation.

    Raises:
      ValueError: logits are not a floating `(T, E)` array, or an option does not fit.
      NotImplementedError: the implementation demanded cannot run here.
      TypeError: an option that `Router` does not have, or both a router and options.
    """
    if router is not None and options:
        raise TypeError(f"give a router or its fields, not both: {', '.join(options)}")
    router = Router(**options) if router is None else check_router(router)
    logits = as_array("logits", logits)
    if logits.ndim != 2 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits must be a floating array (T, E), got {logits.dtype} of shape {logits.shape}")
    num_tokens, num_experts = logits.shape
    given = GivenRouting(mask, expert_ids).checked((num_tokens,), num_experts)
    of_experts = ExpertFactors(selection_bias, gain)
    settings = axis_name, implementation, given, mutual_information
    return route_and_group(logits, experts_per_token, router, of_experts, *settings)[0]


def route_and_group(
    logits: Float[Array, "T E"],
    experts_per_token: int | None,
    router: Router,
    of_experts: ExpertFactors = ExpertFactors(),
    axis_name: AxisName = None,
    implementation: Implementation | None = None,
    given: GivenRouting = GivenRouting(),
    mutual_information: bool = False,
) -> tuple[Routing, Grouped | None]:
    """`route`; and its pairs grouped by expert, where that was no further work, for the experts to take them up.

    `logits` and what is `given` are checked already.
    """
    num_experts = logits.shape[1]
    router.check(num_experts, experts_per_token)
    of_experts = of_experts.checked(num_experts, router)
    axes = axis_names(axis_name)
    options = {"experts_per_token": experts_per_token, "router": router, "implementation": implementation}
    options["mutual_information"] = mutual_information
    return _route_where_tokens_are(logits, given, of_experts, axes=axes, **options)


@compiled_once("experts_per_token", "router", "axes", "implementation", "mutual_information")
def _route_where_tokens_are(
    logits, given: GivenRouting, of_experts: ExpertFactors, *, axes: tuple[str, ...], **options: Any
) -> tuple[Routing, Grouped | None]:
    mesh = explicit_mesh(logits, of_experts)
    if mesh is None:
        return _route(logits, given, of_experts, axes=axes, **options)

    # Capacity and rounding look at all tokens: every device then routes them all.
    of_token = token_axes(logits)
    split = of_token if given.treats_tokens_apart(options["router"]) else ()

    def route_here(logits, given, of_experts):
        routing, _ = _route(logits, given, of_experts, axes=(*axes, *split), **options)
        return routing  # what is grouped here are one device's pairs

    by_token = P(split or None)
    specs = (by_token, by_token, P()), routing_specs(by_token)
    routing = per_device(route_here, mesh, *specs, logits, given, of_experts, explicit=mesh)
    experts, weights = placed((routing.experts, routing.weights), P(of_token or None), mesh)
    return routing._replace(experts=experts, weights=weights), None


def axis_names(axis_name: AxisName) -> tuple[str, ...]:
    """The mesh axes as a tuple; none for None."""
    if axis_name is None:
        return ()
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{axis_name=} must be the name of a mesh axis, a tuple of names, or None")
    return tuple(names)


def _route(
    logits,
    given: GivenRouting,
    of_experts: ExpertFactors,
    *,
    experts_per_token: int | None,
    router: Router,
    implementation: Implementation | None,
    mutual_information: bool,
    axes: tuple[str, ...],
) -> tuple[Routing, Grouped | None]:
    (num_tokens, num_experts), slots = logits.shape, experts_per_token or logits.shape[1]
    logits, given_experts = given.applied(logits, router)
    if router.open_ended:
        kernels = kernels_of(choose_dispatch_implementation(implementation, logits, num_experts), num_tokens)
        routed = route_open_ended(logits, experts_per_token, router, of_experts.gain, given_experts)
    else:
        kernels = kernels_of(choose_router_implementation(implementation, logits, slots), num_tokens)
        routed = _differentiable_router(kernels, logits, of_experts.selection_bias, given_experts, router.rule(slots))
    experts, weights, demand = routed.experts, routed.weights, routed.demand
    tokens_per_expert, dropped = demand, jnp.int32(0)
    grouped = Grouped(kernels, routed.dispatch) if routed.dispatch else None
    if given_experts is not None:
        pass  # who chose them has dropped and added
    elif capacity := router.capacity(num_tokens, num_experts, experts_per_token):
        experts = _drop_beyond_capacity(kernels, routed, capacity)
        weights = jnp.where(experts == EMPTY_SLOT, 0, weights)
        tokens_per_expert = jnp.minimum(demand, capacity)
    elif (mode := router.token_rounding) and router.rounds(num_tokens, num_experts, slots):
        wide, rule = widened(logits), router.rule(slots)
        experts, tokens_per_expert = round_token_counts(
            ranking_scores(wide, rule),
            routed.experts,
            demand,
            mode,
            tile=router.rounding_tile,
            extra_slots=router.rounding_slots,
            kernels=kernels,
        )
        weights = weights_of(wide, routed.experts, experts, rule)
    if router.p_norm is not None:
        weights = weights * (router.weight_scale / _p_norm(routed.weights, router.p_norm))
    if router.open_ended:
        tokens_per_expert = demand_of(experts, num_experts)
        dropped = demand.sum() - tokens_per_expert.sum()
        counts, number = ~blank_rows(logits)[:, 0], None
    else:
        if experts is not routed.experts:
            dropped = demand.sum() - (experts[:, :slots] != EMPTY_SLOT).sum()
            grouped = None
        counts, number = (routed.experts != EMPTY_SLOT).any(1), slots
    losses = _losses(routed, counts, axes, num_tokens, number)
    other_losses = {}
    if router.scoring == "relu":
        other_losses["activity_loss"] = activity_loss(logits, routed.demand, axes)
    if mutual_information:
        other_losses["mutual_information_loss"] = losses.entropy - _entropy_of_mean(routed, counts, axes)
    if axes:
        demand, tokens_per_expert, dropped = lax.psum((demand, tokens_per_expert, dropped), axes)
    routing = Routing(
        experts=experts,
        weights=weights,
        tokens_per_expert=tokens_per_expert,
        demand=demand,
        dropped_share=dropped.astype(weights.dtype) / jnp.maximum(demand.sum(), 1).astype(weights.dtype),
        load_balancing_loss=losses.balance,
        z_loss=losses.squared_log,
        entropy=losses.entropy,
        other_losses=other_losses,
        weighted_losses={},
    )
    return routing, grouped


def _entropy_of_mean(routed: Routed, counts: Bool[Array, " T"], axes: tuple[str, ...]) -> Float[Array, ""]:
    """The entropy of the mean of the tokens' expert probabilities, of those that count, on all devices."""
    total, counted = routed.probability * max(counts.size, 1), jnp.sum(counts, dtype=jnp.int32)
    if axes:
        total, counted = lax.psum((total, counted), axes)
    mean = total / jnp.maximum(counted, 1).astype(total.dtype)
    return -jnp.sum(mean * jnp.log(jnp.where(mean > 0, mean, 1)))


def _p_norm(weights: Float[Array, "T K"], p: float) -> Float[Array, "T 1"]:
    """The p-norm of a token's weights; one for a token without any."""
    if p == math.inf:
        largest = weights.max(-1, keepdims=True)
        return jnp.where(largest == 0, 1, largest)
    scale = lax.stop_gradient(weights.max(-1, keepdims=True))  # powers of what is below one would underflow
    scale = jnp.where(scale == 0, 1, scale)
    total = jnp.power(weights / scale, p).sum(-1, keepdims=True)
    return scale * jnp.power(jnp.where(total == 0, 1, total), 1 / p)


def _losses(
    routed: Routed,
    counts: Bool[Array, " T"],
    axes: tuple[str, ...],
    num_tokens: int,
    experts_per_token: int | None = None,
) -> Losses:
    """The losses of the tokens that count, on all devices; the router's are means of `num_tokens` on each.

    Without `experts_per_token`, tokens have had any number of experts.
    """
    counted, losses = jnp.sum(counts, dtype=jnp.int32), routed.losses
    if axes:
        demand, counted, devices = lax.psum((routed.demand, counted, 1), axes)
        probability, *means = lax.pmean((routed.probability, losses.squared_log, losses.entropy), axes)
        num_tokens *= devices
        fixed = experts_per_token and max(num_tokens, 1) * experts_per_token
        pairs = fixed or number_of_pairs(demand, probability.dtype)
        losses = Losses(balance_loss(demand, probability, pairs), *means)
    dtype = losses.entropy.dtype
    share = jnp.asarray(num_tokens).astype(dtype) / jnp.maximum(counted, 1).astype(dtype)
    balance = losses.balance * share
    balance = balance if experts_per_token is None else balance * share
    return Losses(balance, losses.squared_log * share, losses.entropy * share)


def update_selection_bias(
    selection_bias: Float[Array, " E"], demand: Int[Array, " E"], rate: float
) -> Float[Array, " E"]:
    """Loss-free balancing (DeepSeek-V3): a bias rises by `rate` where demand is below the mean, and falls above it."""
    demand = demand.astype(selection_bias.dtype)
    return selection_bias + rate * jnp.sign(demand.mean() - demand)


def _differentiable_router(
    kernels: Kernels,
    logits: Float[Array, "T E"],
    bias: Float[Array, " E"] | None,
    given: Int[Array, "T slots"] | None,
    rule: Rule,
) -> Routed:
    """The result of these kernels' router; its weights, losses and probability have a gradient."""
    if kernels.transformable:
        return kernels.router(logits, bias, rule) if given is None else routed_to(logits, given, rule)
    return _router_with_gradient((kernels, rule), reverse_mode_token(REVERSE_MODE_ONLY, logits), logits, bias, given)


@differentiated_once
def _run_router(settings: tuple[Kernels, Rule], logits, bias, given) -> Routed:
    kernels, rule = settings
    return kernels.router(logits, bias, rule) if given is None else routed_to(logits, given, rule)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _router_with_gradient(settings: tuple[Kernels, Rule], token, logits, bias, given) -> Routed:
    return _run_router(settings, logits, bias, given)


def _router_forward(settings: tuple[Kernels, Rule], _, logits, bias, given):
    routed = _run_router(settings, logits, bias, given)
    return routed, (logits, bias, routed.experts, routed.demand)


def _router_backward(settings: tuple[Kernels, Rule], residuals, d: Routed):
    (kernels, rule), (logits, bias, experts, demand) = settings, residuals
    experts = jnp.where(experts < logits.shape[1], experts, EMPTY_SLOT)  # the weights of others were NaN
    d_logits = kernels.router_backward(logits, experts, demand, d.weights, d.losses, d.probability, rule)
    return None, d_logits, None if bias is None else jnp.zeros_like(bias), None


_router_with_gradient.defvjp(_router_forward, _router_backward)


def _drop_beyond_capacity(kernels: Kernels, routed: Routed, capacity: int) -> Int[Array, "T K"]:
    """The choice, with empty slots where an expert already has `capacity` tokens of lower id.

    A pair's rank is its row less its expert's first: the dispatch knows both, and nothing is selected or sorted.
    """
    dispatch = routed.dispatch or group_by_expert(kernels, routed.experts, routed.demand.shape[0])
    rank = dispatch.token_index_map - dispatch.expert_token_offsets[routed.experts]
    return jnp.where(rank < capacity, routed.experts, EMPTY_SLOT)
