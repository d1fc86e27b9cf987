"""How experts are chosen and weighted: the options, and what follows from them for a layer's sizes."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, get_args

from jax.core import min_dim

from blaze_jax.checks import check_fields, check_integers, check_numbers, shown, warn_once
from blaze_jax.token_rounding import TokenRounding
from pallas_kernels.compat import InconclusiveDimensionOperation
from pallas_kernels.contract import Rule, Scoring

RouterScoring = Literal[Scoring, "relu"]
WeightNorm = Literal["rms"]
Training = Literal["sparse", "dense"]


@dataclass(frozen=True, kw_only=True)
class Router:
    """How experts are chosen and weighted. Checked on construction, and against the layer's sizes by `check`.

    Attributes:
      scoring: "softmax" over all experts before selection, "softmax_selected" over the K selected logits after it, or
        "sigmoid" of each logit; or "relu": a token takes the experts whose logits are above 0, and these are their
        weights (ReMoE, arXiv 2412.14711).
      weight_norm: "rms" divides what "relu" leaves of a token's logits by `sqrt(mean_E relu(l)² + 1e-5)`, and takes it
        times a gain for each expert (BlockFFN, arXiv 2507.08771). A number p, at least 1 or infinite, divides a token's
        weights by their p-norm (MegaBlocks); 1 is what `normalize_weights` does.
      top_p: a token takes its likeliest experts until their probabilities add up to at least this much, with the
        scoring "softmax" (arXiv 2403.07652).
      threshold: a token takes the experts that have at least this probability, with the scoring "softmax": at most K of
        them, the likeliest, and maybe none. The weights are the probabilities.
      train: "dense" to train all experts with every token (DS-MoE, arXiv 2404.05567), as one wide product weighted by
        their probabilities, with the scoring "softmax". Evaluation then takes K experts, or those of the `threshold`,
        by the same weights.
      normalize_weights: divide a token's weights by their sum (already one after "softmax_selected"). None does so for
        K > 1. For K = 1 it would make every weight a constant 1, from which the router learns nothing: True raises.
        With `top_p`, where any token may have one expert, None does not; "relu" has no such weights, and neither has
        a router with a `threshold` or that trains densely.
      weight_scale: factor on the weights (routed_scaling_factor of DeepSeek-V3).
      jitter: in training, the router sees each number of a token times one of its own, uniform from 1 - jitter to
        1 + jitter (Switch Transformer); `moe` then takes a key, and the modules a stream of random numbers, "jitter".
      num_groups: experts fall into this many equal groups of consecutive ids; 1 for no groups.
      groups_per_token: a token chooses only from this many groups, those with the largest sum of their best scores.
      scores_per_group: how many of its best scores a group's sum has: 2 (DeepSeek-V3), or 1 (DeepSeek-V2).
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

    scoring: RouterScoring = "softmax"
    weight_norm: WeightNorm | float | None = None
    top_p: float | None = None
    threshold: float | None = None
    train: Training = "sparse"
    normalize_weights: bool | None = None
    weight_scale: float = 1.0
    jitter: float = 0.0
    num_groups: int = 1
    groups_per_token: int = 1
    scores_per_group: int = 2
    expert_capacity: int | None = None
    capacity_factor: float | None = None
    token_rounding: TokenRounding | None = None
    rounding_tile: int = 128
    rounding_slots: int = 8

    def __post_init__(self):
        counts = ("num_groups", "groups_per_token", "scores_per_group", "rounding_tile", "rounding_slots")
        check_integers(**{name: getattr(self, name) for name in counts})
        check_numbers(weight_scale=self.weight_scale, jitter=self.jitter)
        if self.expert_capacity is not None:
            check_integers(expert_capacity=self.expert_capacity)
        if self.capacity_factor is not None:
            check_numbers(capacity_factor=self.capacity_factor)
        check_numbers(**{name: value for name in ("top_p", "threshold") if (value := getattr(self, name)) is not None})
        if not isinstance(self.weight_norm, str | None):
            check_numbers(weight_norm=self.weight_norm)
        rounding, factor, groups = get_args(TokenRounding), self.capacity_factor, self.num_groups
        scorings, relu, softmax = get_args(RouterScoring), self.scoring == "relu", self.scoring == "softmax"
        probabilities = self.threshold is not None or self.train == "dense"  # are the weights
        fixed = relu or probabilities
        rules = {
            "scoring": (self.scoring in scorings, f"one of {', '.join(scorings)}"),
            "weight_norm": (
                self.weight_norm is None
                or (relu and self.weight_norm == "rms")
                or (not fixed and self.p_norm is not None and self.p_norm >= 1),
                "None, or 'rms' of scoring='relu', or a number of at least 1 where weights may be normalised",
            ),
            "top_p": (
                self.top_p is None or (0 < self.top_p <= 1 and self.scoring == "softmax"),
                "None, or above 0 and at most 1 with scoring='softmax'",
            ),
            "normalize_weights": (
                self.normalize_weights in ((None, False) if fixed else (None, True, False))
                and (self.normalize_weights is None or self.p_norm is None),
                "None, True or False; not True with scoring='relu', a threshold or train='dense'; None with a p-norm",
            ),
            "threshold": (
                self.threshold is None or (0 < self.threshold < 1 and softmax and self.top_p is None),
                "None, or above 0 and below 1 with scoring='softmax' and without top_p",
            ),
            "train": (
                self.train == "sparse" or (self.train == "dense" and softmax and self.top_p is None),
                "sparse, or dense with scoring='softmax' and without top_p",
            ),
            "weight_scale": (0 < self.weight_scale < math.inf, "positive and finite"),
            "jitter": (0 <= self.jitter < 1, "at least 0 and less than 1"),
            "num_groups": (groups >= 1, "at least 1"),
            "groups_per_token": (1 <= self.groups_per_token <= groups, f"from 1 to num_groups={groups}"),
            "scores_per_group": (self.scores_per_group in (1, 2), "1 or 2"),
            "expert_capacity": (self.expert_capacity is None or self.expert_capacity >= 1, "None or at least 1"),
            "capacity_factor": (factor is None or 0 < factor < math.inf, "None or positive and finite"),
            "token_rounding": (self.token_rounding in (None, *rounding), f"None or one of {', '.join(rounding)}"),
            "rounding_tile": (self.rounding_tile >= 1, "at least 1"),
            "rounding_slots": (self.rounding_slots >= 0, "at least 0"),
        }
        if self.open_ended:
            of_number = "where a token has no fixed number of experts"
            without = {"num_groups": 1, "capacity_factor": None, "token_rounding": None}
            for name, value in (without | ({"expert_capacity": None} if self.train == "dense" else {})).items():
                rules[name] = (getattr(self, name) == value, f"{value} {of_number}")
        check_fields(self, rules)
        deciders = {name: getattr(self, name) for name in ("expert_capacity", "capacity_factor", "token_rounding")}
        given = [f"{name}={value!r}" for name, value in deciders.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: one alone may decide which tokens are kept")

    @property
    def open_ended(self) -> bool:
        """Whether the tokens decide how many experts each of them takes."""
        return self.may_take_any or self.train == "dense"

    @property
    def may_take_any(self) -> bool:
        """Whether a token can do without a number K of experts, also in evaluation."""
        return self.scoring == "relu" or self.top_p is not None or self.threshold is not None

    @property
    def p_norm(self) -> float | None:
        """The p of the norm by which weights are divided; None for another one, or for none."""
        return None if isinstance(self.weight_norm, str | None) else float(self.weight_norm)

    def check(self, num_experts: int, experts_per_token: int | None) -> None:
        """Raises ValueError naming the first option that does not fit a layer of these sizes."""
        check_integers(num_experts=num_experts)
        if num_experts < 1:
            raise ValueError(f"{num_experts=} must be at least 1")
        if experts_per_token is None:
            if not self.may_take_any:
                unless = "unless scoring='relu' or with top_p or a threshold"
                raise ValueError(f"{experts_per_token=} must be an integer, {unless}")
            return
        check_integers(experts_per_token=experts_per_token)
        if not 1 <= experts_per_token <= num_experts:
            raise ValueError(f"{experts_per_token=} must be from 1 to {num_experts=}")
        learns = "where experts_per_token=1: every weight would be a constant 1, and the router would not learn"
        alone = experts_per_token == 1 and not self.open_ended
        choice = num_experts // self.num_groups * self.groups_per_token
        enough = f"enough to choose {experts_per_token=} from {choice} experts"
        rules = {
            "normalize_weights": (not (alone and self.normalize_weights), f"None or False {learns}"),
            "weight_norm": (not (alone and self.p_norm), f"None {learns}"),
            "scoring": (not (alone and self.scoring == "softmax_selected"), f"softmax or sigmoid {learns}"),
            "num_groups": (num_experts % self.num_groups == 0, f"a divisor of {num_experts=}"),
            "groups_per_token": (experts_per_token <= choice, enough),
        }
        check_fields(self, rules)

    def rule(self, experts_per_token: int) -> Rule:
        """The part of the options that the kernels carry out, for routers that are not open-ended."""
        if self.scoring == "relu":
            raise ValueError(f"scoring={self.scoring!r} has no rule for {experts_per_token=}: tokens take any number")
        return Rule(
            experts_per_token=experts_per_token,
            scoring=self.scoring,
            normalize=experts_per_token > 1 if self.normalize_weights is None else self.normalize_weights,
            scale=self.weight_scale,
            num_groups=self.num_groups,
            groups_per_token=self.groups_per_token,
            scores_per_group=self.scores_per_group,
        )

    def for_phase(self, train: bool) -> "Router":
        """The router of that phase: rounding, jitter and dense training serve training only."""
        if train:
            return self
        normalize = False if self.train == "dense" else self.normalize_weights
        return replace(self, token_rounding=None, jitter=0.0, train="sparse", normalize_weights=normalize)

    def capacity(self, num_tokens: int, num_experts: int, experts_per_token: int | None) -> int | None:
        """Tokens an expert takes at most, None for no limit."""
        capacity = self.expert_capacity
        if self.capacity_factor is not None and experts_per_token is not None:
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
