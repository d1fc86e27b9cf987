"""The contract of every family of kernels: the types that its operations take and return, their signatures and limits.

`Kernels` is what a family's module looks like; who calls kernels asks what they can do there, and not which family they
are. The portable forms in `pallas_kernels.xla` say in their docstrings what
each operation computes; other families give the same results faster, and may differ in the last bits.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Scoring = Literal["softmax", "softmax_selected", "sigmoid"]

EMPTY_SLOT = -1
"""The expert id of a slot without an expert."""


class Rule(NamedTuple):
    """How experts are chosen and weighted.

    Attributes:
      experts_per_token: K, the experts that each token takes.
      scoring: scores are a "softmax" of the logits or their "sigmoid"; "softmax_selected" ranks as "softmax" does,
        and takes its weights from a softmax over the K selected logits.
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
    """Means over tokens, in the weights' dtype; zero without tokens. A token whose logits are all -inf adds nothing.

    Attributes:
      balance: `E · Σ_e demand_e / (T·K) · mean_t probability_te`, one in perfect balance.
      squared_log: mean `logsumexp(logits)²`.
      entropy: mean entropy of the tokens' expert probabilities, in nats.
    """

    balance: Float[Array, ""]
    squared_log: Float[Array, ""]
    entropy: Float[Array, ""]


class Dispatch[Tiles](NamedTuple):
    """(Token, slot) pairs grouped by expert, a row each (MoEBlaze, arXiv 2601.05296, section 4). R counts all rows.

    Attributes:
      expert_token_indices: `(R,)` int32, token ids concatenated by expert, ascending inside an expert. Rows past the
        last group (there are some if slots are empty) and rows that only align a group hold T, and read zeros.
      expert_token_offsets: `(E + 1,)` int32, where each expert's rows start and the last one's end.
      token_expert_indices: `(T, K)` int32, the expert ids by token; E in the place of an id out of range. None from
        kernels, which got just these.
      token_index_map: `(T, K)` int32, position of (token, slot) in `expert_token_indices`; R for an empty slot.
      tiles: what the kernels that made it cut the groups into; None for the portable ones and for `build_dispatch`.
    """

    expert_token_indices: Int[Array, " R"]
    expert_token_offsets: Int[Array, " E+1"]
    token_expert_indices: Int[Array, "T K"] | None
    token_index_map: Int[Array, "T K"]
    tiles: Tiles

    @property
    def num_rows(self) -> int:
        return self.expert_token_indices.shape[0]

    @property
    def num_experts(self) -> int:
        return self.expert_token_offsets.shape[0] - 1


class Routed(NamedTuple):
    """Results of the router.

    Attributes:
      experts: `(T, K)` int32, distinct, best first; -1 in the slots of a token that has fewer possible experts.
      weights: `(T, K)`, zero in an empty slot.
      demand: `(E,)` int32, tokens of each expert.
      losses: what may be added to a training loss, unweighted.
      probability: `(E,)`, mean over tokens of each expert's probability: with the demand, what the balance loss of
        several devices' tokens is made of.
      dispatch: what `dispatch` of the same module makes of `experts`, where that was no further work; else None.
    """

    experts: Int[Array, "T K"]
    weights: Float[Array, "T K"]
    demand: Int[Array, " E"]
    losses: Losses
    probability: Float[Array, " E"]
    dispatch: Dispatch | None = None


KEY_BITS = 31
"""Bits of the keys by which experts choose tokens."""


class Cutoffs(NamedTuple):
    """Where each expert's list of tokens, best first, is cut off. A comparison then tells which tokens it takes.

    Attributes:
      keys: `(E,)` int32; tokens with larger keys are taken.
      tokens: `(E,)` int32; of the tokens with just that key, those up to this id are taken.
    """

    keys: Int[Array, " E"]
    tokens: Int[Array, " E"]

    def take(self, key: Int[Array, "..."], expert: Int[Array, "..."], token: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Whether `expert` takes `token`, which has that key in its list."""
        cutoff = self.keys[expert]
        return (key > cutoff) | ((key == cutoff) & (token <= self.tokens[expert]))


def accumulator_dtype(*dtypes) -> jnp.dtype:
    """float64 if one of the dtypes is float64, else float32; also where jax promotes no types."""
    return jnp.dtype(jnp.float64 if jnp.float64 in dtypes else jnp.float32)


def no_limit(*_) -> None:
    """Why an operation cannot run, or runs slowly, in a family where nothing stands against it: None."""


class Kernels(Protocol):
    """A family of kernels: a module with these operations, and with what it says of itself.

    `groups` is what the family's own `dispatch` makes of the experts, or what `row_range`, `in_parts` or `of_experts`
    makes of that. Of rows of other groups, an operation that takes `into` keeps what it finds there: the results that
    the same call gave for those groups. Without `into` they hold anything. A family without `in_parts` and `of_experts`
    is given neither `into` nor tokens in several arrays, and need not take them.
    """

    @property
    def transformable(self) -> bool:
        """Whether jax differentiates and batches the operations itself; others are called for one example at a time."""
        ...

    def unsupported(self, x: Array, weights: tuple[Array, ...], biases: tuple[Array, ...], /) -> str | None:
        """Why experts of these arrays cannot run, or None: tokens, up weights and the down weights, all biases."""
        ...

    def router_unsupported(self, logits: Array, experts_per_token: int, /) -> str | None:
        """Why the router cannot take these logits, or None."""
        ...

    def dispatch_unsupported(self, num_experts: int, /) -> str | None:
        """Why rows of so many experts, or groups of experts and parts, cannot be grouped, or None."""
        ...

    def why_kernels_spill(self) -> str | None:
        """The reason why the kernels are slow on this machine and how to mend it, or None."""
        ...

    def router(self, logits: Float[Array, "T E"], bias: Float[Array, " E"] | None, rule: Rule) -> Routed: ...

    def router_backward(
        self,
        logits: Float[Array, "T E"],
        experts: Int[Array, "T K"],
        demand: Int[Array, " E"],
        d_weights: Float[Array, "T K"],
        d_losses: Losses,
        d_probability: Float[Array, " E"],
        rule: Rule,
    ) -> Float[Array, "T E"]: ...

    def token_cutoffs(self, keys: Int[Array, "E T"], wanted: Int[Array, " E"]) -> Cutoffs: ...

    def experts_added(
        self, keys: Int[Array, "E T"], cutoffs: Cutoffs, chosen_key: int, slots: int
    ) -> tuple[Int[Array, "T slots"], Bool[Array, " E"]]: ...

    def dispatch(
        self, experts: Int[Array, "T K"], num_experts: int, *, row_alignment: int = ..., spare_rows: int = ...
    ) -> Dispatch: ...

    def row_range(self, groups: Dispatch, first_row: Int[Array, ""] | int, num_rows: int) -> Dispatch: ...

    @property
    def in_parts(self) -> Callable[[Dispatch, int], tuple[Dispatch, tuple[Dispatch, ...]]] | None:
        """The function that cuts rows by part of the tokens; None where all are computed at once.

        `in_parts(groups, parts)` takes rows that were grouped by expert and part, as id `e * parts + p`. It returns all
        rows by expert, and for each part the rows of its tokens, by the same numbers.
        """
        ...

    @property
    def of_experts(self) -> Callable[..., Dispatch] | None:
        """The function that picks the rows of consecutive experts; None where all are computed at once.

        `of_experts(groups, first, experts, counted_from=None)` has the same numbers of rows, and counts experts from
        `counted_from`, the first one whose weights the operations get; None for `first`.
        """
        ...

    def up_projection(
        self,
        x: Float[Array, "T d"],
        weights: tuple[Float[Array, "E d n"], ...],
        biases: tuple[Float[Array, "E n"], ...],
        groups: Dispatch,
        *,
        activation: Callable[..., Array],
        keep_pre_activations: bool = True,
        into: tuple[tuple[Float[Array, "R n"], ...], Float[Array, "R n"]] | None = None,
    ) -> tuple[tuple[Float[Array, "R n"], ...], Float[Array, "R n"]]: ...

    def down_projection(
        self,
        hidden: Float[Array, "R n"],
        w_down: Float[Array, "E n d"],
        b_down: Float[Array, "E d"] | None,
        groups: Dispatch,
        first_column: Int[Array, ""] | int,
        num_columns: int,
        *,
        into: Float[Array, "R columns"] | None = None,
    ) -> Float[Array, "R columns"]: ...

    def combine(
        self,
        rows: Float[Array, "R columns"],
        token_index_map: Int[Array, "T K"],
        weights: Float[Array, "T K"] | None,
        out: Float[Array, "T d"],
        first_column: Int[Array, ""] | int,
        addend: Float[Array, "T columns"] | None = None,
    ) -> Float[Array, "T d"]: ...

    def column_block(self, num_rows: int, d: int, n: int, num_experts: int, dtype) -> int: ...

    def down_backward(
        self,
        dy: Float[Array, "T d"],
        w_down: Float[Array, "E n d"],
        b_down: Float[Array, "E d"] | None,
        pre_activations: tuple[Float[Array, "R n"], ...],
        row_weights: Float[Array, " R"],
        groups: Dispatch,
        *,
        activation: Callable[..., Array],
        into: Float[Array, "R n"] | None = None,
    ) -> tuple[tuple[Float[Array, "R n"], ...], Float[Array, "R n"], Float[Array, " R"]]: ...

    def down_weight_gradients(
        self,
        weighted_hidden: Float[Array, "R n"],
        dy: Float[Array, "T d"] | tuple[Float[Array, "T_part d"], ...],
        row_weights: Float[Array, " R"],
        groups: Dispatch,
        *,
        dtype,
        bias_dtype,
    ) -> tuple[Float[Array, "E n d"], Float[Array, "E d"] | None]: ...

    def up_weight_gradients(
        self,
        x: Float[Array, "T d"] | tuple[Float[Array, "T_part d"], ...],
        d_pre_activations: tuple[Float[Array, "R n"], ...],
        groups: Dispatch,
        *,
        dtypes: tuple,
        bias_dtypes: tuple,
    ) -> tuple[tuple[Float[Array, "E d n"], ...], tuple[Float[Array, "E n"], ...]]: ...

    def up_backward(
        self,
        d_pre_activations: tuple[Float[Array, "R n"], ...],
        weights: tuple[Float[Array, "E d n"], ...],
        groups: Dispatch,
        first_column: Int[Array, ""] | int,
        num_columns: int,
        *,
        into: Float[Array, "R columns"] | None = None,
    ) -> Float[Array, "R columns"]: ...
