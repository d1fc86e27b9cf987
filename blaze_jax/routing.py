"""Routing: from router logits to the experts of every token, their weights, and what training wants to know of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax
from jax.core import min_dim
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Int

from blaze_jax.checks import as_array, check_integers, check_numbers, shown
from blaze_jax.dispatch import EMPTY_SLOT
from blaze_jax.explicit_mesh import explicit_mesh, per_device, reshard, token_axes
from blaze_jax.implementation import Implementation, choose_router_implementation, kernels_of
from blaze_jax.reverse_mode import REVERSE_MODE_ONLY, differentiated_once
from blaze_jax.token_rounding import TokenRounding, round_token_counts
from blaze_jax.warn import warn_once
from pallas_kernels.compat import InconclusiveDimensionOperation, reverse_mode_token
from pallas_kernels.contract import Losses, Routed, Rule, Scoring
from pallas_kernels.xla.router import balance_loss, ranking_scores, weights_of, widened

type AxisName = str | tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True)
class Router:
    """How experts are chosen and weighted. Checked on construction, and against the layer's sizes by `check`.

    Attributes:
      scoring: "softmax" over all experts before selection, "softmax_selected" over the K selected logits after it, or
        "sigmoid" of each logit.
      normalize_weights: divide a token's weights by their sum (already one after "softmax_selected"). None does so for
        K > 1. For K = 1 it would make every weight a constant 1, from which the router learns nothing: True raises.
      weight_scale: factor on the weights (routed_scaling_factor of DeepSeek-V3).
      num_groups: experts fall into this many equal groups of consecutive ids; 1 for no groups.
      groups_per_token: a token chooses only from this many groups, those with the largest sum of their two best scores.
      expert_capacity: an expert takes this many tokens, the first by id; the others lose that slot. None for no limit.
      capacity_factor: the same as a multiple of an expert's even share, `T·K/E`, rounded up. The factor counts as the
        decimal number that it is written as: 1.1 of 10 tokens are 11.
      token_rounding: round each expert's token count to a multiple of `rounding_tile`: "up", "down" or "nearest", where
        half a tile goes up. An expert that cannot fill its last tile, because too few other tokens may choose it or
        have a slot to spare, keeps its count under "up" and goes down under "nearest". "up" never drops a token.
        Rounding does not apply, with a warning, where an expert's even share `T·K/E` is less than a tile: most counts
        would go to zero, or several times up. Worth trying with few tiles to an expert; on an H200 "down" has paid for
        itself, "nearest" has not (docs/benchmarks.md).
      rounding_tile: rows of a kernel tile.
      rounding_slots: experts that rounding may add to one token.
    """

    scoring: Scoring = "softmax"
    normalize_weights: bool | None = None
    weight_scale: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
    expert_capacity: int | None = None
    capacity_factor: float | None = None
    token_rounding: TokenRounding | None = None
    rounding_tile: int = 128
    rounding_slots: int = 8

    def __post_init__(self):
        counts = ("num_groups", "groups_per_token", "rounding_tile", "rounding_slots")
        check_integers(**{name: getattr(self, name) for name in counts})
        check_numbers(weight_scale=self.weight_scale)
        if self.expert_capacity is not None:
            check_integers(expert_capacity=self.expert_capacity)
        if self.capacity_factor is not None:
            check_numbers(capacity_factor=self.capacity_factor)
        self._require(self.scoring in get_args(Scoring), "scoring", f"one of {', '.join(get_args(Scoring))}")
        self._require(self.normalize_weights in (None, True, False), "normalize_weights", "None, True or False")
        self._require(0 < self.weight_scale < math.inf, "weight_scale", "positive and finite")
        self._require(self.num_groups >= 1, "num_groups", "at least 1")
        self._require(
            1 <= self.groups_per_token <= self.num_groups, "groups_per_token", f"from 1 to num_groups={self.num_groups}"
        )
        self._require(
            self.expert_capacity is None or self.expert_capacity >= 1, "expert_capacity", "None or at least 1"
        )
        self._require(
            self.capacity_factor is None or 0 < self.capacity_factor < math.inf,
            "capacity_factor",
            "None or positive and finite",
        )
        allowed = get_args(TokenRounding)
        self._require(self.token_rounding in (None, *allowed), "token_rounding", f"None or one of {', '.join(allowed)}")
        self._require(self.rounding_tile >= 1, "rounding_tile", "at least 1")
        self._require(self.rounding_slots >= 0, "rounding_slots", "at least 0")
        deciders = {name: getattr(self, name) for name in ("expert_capacity", "capacity_factor", "token_rounding")}
        given = [f"{name}={value!r}" for name, value in deciders.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: one alone may decide which tokens are kept")

    def check(self, num_experts: int, experts_per_token: int) -> None:
        """Raises ValueError naming the first option that does not fit a layer of these sizes."""
        check_integers(num_experts=num_experts, experts_per_token=experts_per_token)
        if num_experts < 1:
            raise ValueError(f"{num_experts=} must be at least 1")
        if not 1 <= experts_per_token <= num_experts:
            raise ValueError(f"{experts_per_token=} must be from 1 to {num_experts=}")
        learns = "where experts_per_token=1: every weight would be a constant 1, and the router would not learn"
        alone = experts_per_token == 1
        self._require(not (alone and self.normalize_weights), "normalize_weights", f"None or False {learns}")
        self._require(not (alone and self.scoring == "softmax_selected"), "scoring", f"softmax or sigmoid {learns}")
        self._require(num_experts % self.num_groups == 0, "num_groups", f"a divisor of {num_experts=}")
        choice = num_experts // self.num_groups * self.groups_per_token
        self._require(
            experts_per_token <= choice,
            "groups_per_token",
            f"enough to choose {experts_per_token=} from {choice} experts",
        )

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise ValueError(f"{name}={getattr(self, name)!r} must be {rule}")

    def rule(self, experts_per_token: int) -> Rule:
        """The part of the options that the kernels carry out."""
        return Rule(
            experts_per_token=experts_per_token,
            scoring=self.scoring,
            normalize=experts_per_token > 1 if self.normalize_weights is None else bool(self.normalize_weights),
            scale=self.weight_scale,
            num_groups=self.num_groups,
            groups_per_token=self.groups_per_token,
        )

    def for_phase(self, train: bool) -> "Router":
        """The router of that phase: rounding serves training only."""
        return self if train else replace(self, token_rounding=None)

    def capacity(self, num_tokens: int, num_experts: int, experts_per_token: int) -> int | None:
        """Tokens an expert takes at most, None for no limit."""
        capacity = self.expert_capacity
        if self.capacity_factor is not None:
            of_tokens = Fraction(str(self.capacity_factor)) * experts_per_token / num_experts
            capacity = -(-of_tokens.numerator * num_tokens // of_tokens.denominator)
        return None if capacity is None else min_dim(capacity, num_tokens)

    def treats_tokens_apart(self) -> bool:
        """Whether the experts of a token depend on that token only."""
        return self.expert_capacity is None and self.capacity_factor is None and self.token_rounding is None

    def rounds(self, num_tokens: int, num_experts: int, experts_per_token: int) -> bool:
        """Whether token rounding applies; warns once of sizes for which it does not."""
        if self.token_rounding is None or num_tokens == 0:
            return False
        try:
            if num_tokens * experts_per_token >= num_experts * self.rounding_tile:
                return True
        except InconclusiveDimensionOperation as error:
            least = f"{num_tokens}*{experts_per_token} >= {num_experts * self.rounding_tile}"
            raise ValueError(f"token_rounding={self.token_rounding!r} needs to know whether {least}") from error
        warn_once(
            f"token_rounding={self.token_rounding!r} does not apply: {num_tokens} tokens with {experts_per_token} of "
            f"{num_experts} experts each are fewer than rounding_tile={self.rounding_tile} to an expert"
        )
        return False


def check_router(router: Router) -> Router:
    """`router`; ValueError if it is none."""
    if not isinstance(router, Router):
        raise ValueError(f"router={shown(router)} must be a Router")
    return router


class Routing(NamedTuple):
    """What the router decided. K' is K, plus `rounding_slots` when token rounding adds experts to a token.

    The counts, losses and shares are those of all tokens of the call; with an `axis_name`, of all devices along it.

    Attributes:
      experts: `(T, K')` int32, best first; -1 marks an empty slot (none possible, dropped by capacity, or rounding).
      weights: `(T, K')` float32, 0 in an empty slot. The gradient flows through them.
      tokens_per_expert: `(E,)` int32, tokens each expert computes.
      demand: `(E,)` int32, tokens that chose each expert, before any were dropped or added.
      dropped_share: float32, the share of the choices that were dropped.
      load_balancing_loss: float32, `E · Σ_e demand_e / (T·K) · mean_t probability_te` (Switch Transformer), 1 in
        perfect balance.
      z_loss: float32, mean of `logsumexp(logits)²` (ST-MoE).
      entropy: float32, mean entropy of a token's expert probabilities, in nats, at most `log E`.
      weighted_losses: from `moe`, the losses above that its configuration gives a weight, times that weight, by name:
        add their sum to the training loss. Empty from `route`.
      dispatched: rows that a kernel has grouped by these `experts`, for `expert_ffn(..., dispatched=...)`; or None.
    """

    experts: Int[Array, "T K"]
    weights: Float[Array, "T K"]
    tokens_per_expert: Int[Array, " E"]
    demand: Int[Array, " E"]
    dropped_share: Float[Array, ""]
    load_balancing_loss: Float[Array, ""]
    z_loss: Float[Array, ""]
    entropy: Float[Array, ""]
    weighted_losses: Mapping[str, Float[Array, ""]]
    dispatched: Any = None


def route(
    logits: Float[Array, "T E"],
    experts_per_token: int,
    *,
    router: Router | None = None,
    selection_bias: Float[Array, " E"] | None = None,
    axis_name: AxisName = None,
    implementation: Implementation | None = None,
    **options: Any,
) -> Routing:
    """Chooses `experts_per_token` experts for every token, in float32 (float64 logits stay).

    Equal scores go to the lower expert id. A logit of -inf rules its expert out, whatever the scoring, the selection
    bias and the groups: a token with fewer than K possible experts has empty slots, and one without any adds nothing to
    the losses. A row with NaN gets valid, distinct experts and NaN weights. The weights and losses are differentiable,
    the choice is not.

    Args:
      logits: router logits.
      experts_per_token: K.
      router: how to choose; or give its fields as keywords, `route(logits, 2, scoring="sigmoid")`.
      selection_bias: added to the scores for selection only, not to the weights (loss-free balancing).
      axis_name: inside `jax.shard_map`, the mesh axes (one or several) over which the tokens are split: demand, losses
        and statistics are then those of all their devices. Capacity and token rounding are each device's own.
      implementation: None for the best that can run here, or "mosaic_gpu" or "xla". The Hopper kernel is one pass over
        the logits, but its scores can differ from XLA's in the last bits; where scores rank the experts (with a
        selection bias, or with groups), nearly equal ones may then be chosen differently.
      **options: fields of `Router`.

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
    num_experts = logits.shape[1]
    router.check(num_experts, experts_per_token)
    if selection_bias is not None:
        selection_bias = as_array("selection_bias", selection_bias)
        if not jnp.issubdtype(selection_bias.dtype, jnp.floating):
            raise ValueError(f"selection_bias has dtype {selection_bias.dtype}, must be floating")
        if selection_bias.shape != (num_experts,):
            raise ValueError(f"selection_bias has shape {selection_bias.shape}, must be {(num_experts,)}")
    axes = axis_names(axis_name)
    mesh = explicit_mesh(logits, selection_bias)
    if mesh is None:
        return _route(logits, selection_bias, experts_per_token, router, axes, implementation)

    # Capacity and rounding look at all tokens: every device then routes them all.
    of_token = token_axes(logits)
    split = of_token if router.treats_tokens_apart() else ()

    def route_here(by_token, shared):
        routing = _route(by_token, shared, experts_per_token, router, (*axes, *split), implementation)
        return routing._replace(dispatched=None)  # one device's rows

    def specs(spec) -> Routing:
        of_fields: dict[str, Any] = dict.fromkeys(Routing._fields, P()) | {"experts": spec, "weights": spec}
        return Routing(**of_fields)

    routing = per_device(route_here, mesh, split, logits, selection_bias, specs)
    return routing._replace(
        experts=reshard(routing.experts, mesh, of_token), weights=reshard(routing.weights, mesh, of_token)
    )


def axis_names(axis_name: AxisName) -> tuple[str, ...]:
    """The mesh axes as a tuple; none for None."""
    if axis_name is None:
        return ()
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{axis_name=} must be the name of a mesh axis, a tuple of names, or None")
    return tuple(names)


def _route(logits, selection_bias, experts_per_token, router: Router, axes: tuple[str, ...], implementation) -> Routing:
    num_tokens, num_experts = logits.shape
    implementation = choose_router_implementation(implementation, logits, experts_per_token)
    rule = router.rule(experts_per_token)
    if not num_tokens:
        implementation = "xla"  # no kernel without work
    on_hopper = implementation == "mosaic_gpu"
    routed = (_route_on_hopper if on_hopper else kernels_of("xla").router)(logits, selection_bias, rule)
    selected, demand = routed.experts, routed.demand
    experts, weights, tokens_per_expert, dropped = selected, routed.weights, demand, jnp.int32(0)
    if capacity := router.capacity(num_tokens, num_experts, experts_per_token):
        experts = _drop_beyond_capacity(routed, num_experts, capacity)
        weights = jnp.where(experts == EMPTY_SLOT, 0, weights)
        tokens_per_expert = jnp.minimum(demand, capacity)
    elif (mode := router.token_rounding) and router.rounds(num_tokens, num_experts, experts_per_token):
        round_counts = partial(
            round_token_counts,
            mode=mode,
            tile=router.rounding_tile,
            extra_slots=router.rounding_slots,
            implementation=implementation,
        )
        if on_hopper:
            round_counts = sequential_vmap(round_counts)
        wide = widened(logits)
        experts, tokens_per_expert = _without_derivative(round_counts)(ranking_scores(wide, rule), selected, demand)
        weights = weights_of(wide, selected, experts, rule)
    if experts is not selected:
        dropped = demand.sum() - (experts[:, :experts_per_token] != EMPTY_SLOT).sum()

    losses = routed.losses
    if axes:
        losses = _losses_over_devices(routed, axes, num_tokens * experts_per_token)
        demand, tokens_per_expert, dropped = lax.psum((demand, tokens_per_expert, dropped), axes)
    return Routing(
        experts=experts,
        weights=weights,
        tokens_per_expert=tokens_per_expert,
        demand=demand,
        dropped_share=dropped.astype(weights.dtype) / jnp.maximum(demand.sum(), 1).astype(weights.dtype),
        load_balancing_loss=losses.balance,
        z_loss=losses.squared_log,
        entropy=losses.entropy,
        weighted_losses={},
        dispatched=routed.dispatched if experts is selected else None,
    )


def _losses_over_devices(routed: Routed, axes: tuple[str, ...], num_pairs: int) -> Losses:
    """The losses of all devices' tokens; `num_pairs` are one device's."""
    demand, devices = lax.psum((routed.demand, 1), axes)
    probability, squared_log, entropy = lax.pmean(
        (routed.probability, routed.losses.squared_log, routed.losses.entropy), axes
    )
    return Losses(balance_loss(demand, probability, max(num_pairs, 1) * devices), squared_log, entropy)


def update_selection_bias(
    selection_bias: Float[Array, " E"], demand: Int[Array, " E"], rate: float
) -> Float[Array, " E"]:
    """Loss-free balancing (DeepSeek-V3): a bias rises by `rate` where demand is below the mean, and falls above it."""
    demand = demand.astype(selection_bias.dtype)
    return selection_bias + rate * jnp.sign(demand.mean() - demand)


def _kernel(logits, bias, rule: Rule) -> Routed:
    """The Hopper kernel, under `vmap` one example after another."""
    return differentiated_once(lambda logits, bias: kernels_of("mosaic_gpu").router(logits, bias, rule))(logits, bias)


def _route_on_hopper(logits, bias, rule: Rule) -> Routed:
    return _route_with_gradient(reverse_mode_token(REVERSE_MODE_ONLY, logits), logits, bias, rule)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _route_with_gradient(token, logits, bias, rule: Rule) -> Routed:
    return _kernel(logits, bias, rule)


def _forward(_, logits, bias, rule):
    routed = _kernel(logits, bias, rule)
    return routed, (logits, bias, routed.experts, routed.demand)


def _backward(rule, residuals, cotangents: Routed):
    logits, bias, experts, demand = residuals
    backward = kernels_of("mosaic_gpu").router_backward
    d_logits = backward(logits, experts, demand, cotangents.weights, cotangents.losses, cotangents.probability, rule)
    return None, d_logits, None if bias is None else jnp.zeros_like(bias)


_route_with_gradient.defvjp(_forward, _backward)


def _without_derivative(function):
    """`function`, whose results are whole numbers, shielded from differentiation, which kernels have no rule for."""
    shielded = jax.custom_jvp(function)

    @shielded.defjvp
    def _(primals, tangents):
        out = shielded(*primals)
        return out, jax.tree.map(lambda a: np.zeros(a.shape, jax.dtypes.float0), out)

    return shielded


def _drop_beyond_capacity(routed: Routed, num_experts, capacity) -> Int[Array, "T K"]:
    """The choice, with empty slots where an expert already has `capacity` tokens of lower id.

    A pair's rank is its row less its expert's first: the dispatch knows both, and nothing is selected or sorted.
    """
    groups, positions = routed.dispatched or kernels_of("xla").dispatch(routed.experts, num_experts)
    return jnp.where(positions - groups.offsets[routed.experts] < capacity, routed.experts, EMPTY_SLOT)
