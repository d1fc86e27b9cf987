"""Types that the operations of every family of kernels take and return, and the little that all compute in one way.

`family` says which operations there are.
"""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels.codings import is_quantized

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
      groups_per_token: a token chooses only from this many groups, those with the largest sum of their best scores.
      scores_per_group: how many of its best scores a group's sum has, 1 or 2.
    """

    experts_per_token: int
    scoring: Scoring
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
    scores_per_group: int = 2


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


class Sums(NamedTuple):
    """Running sums that kernels add gradients to, in place, instead of writing them: nothing else may use the arrays.

    Attributes:
      arrays: `(S, d, n)` each, of S matrices, in the dtype that the sums shall have; a kernel returns them.
      first: the place of the first expert's among them, int32; None for 0. The others' follow.
    """

    arrays: tuple[Float[Array, "S d n"], ...]
    first: Int[Array, ""] | None = None

    @property
    def dtypes(self) -> tuple:
        return tuple(array.dtype for array in self.arrays)


class Quantized(NamedTuple):
    """Pre-activations in 8 bits: whole numbers from -127 to 127, and what one is worth in a block of a row's columns.

    How long a block is, how numbers are packed and how both arrays lie is a matter of the family of kernels whose up
    projection writes them for its `down_backward`. The largest number of a block is 127 or -127. If one is not finite,
    all of the block are NaN when they are read.

    Attributes:
      values: whole numbers, n bytes for each row, in an integer dtype, where a last block may be filled up.
      scales: the numbers' unit by row and block, in the accumulators' dtype.
    """

    values: Int[Array, "R _"]
    scales: Float[Array, "..."]


MAGNITUDE_BITS, INFINITY_BITS = 0x7FFFFFFF, 0x7F800000
"""Those of a float32 but its sign, which order magnitudes as integers; and infinity's, above which NaN's are."""

BYTE_OFFSET = 2.0**23 + 128
"""Added to a number, in float32, it leaves in the last byte the whole number next to it, plus 128."""


def quantization_scales(largest: Float[Array, "..."]) -> Float[Array, "..."]:
    """The scales of blocks by their largest magnitude: NaN unless that is finite, 1 where all are as good as zero."""
    scales = largest * (1 / 127)
    scales = jnp.where(scales < jnp.finfo(scales.dtype).tiny, jnp.ones_like(scales), scales)
    return jnp.where(largest < jnp.inf, scales, jnp.full_like(scales, jnp.nan))


def accumulator_dtype(*dtypes) -> jnp.dtype:
    """float64 if one of the dtypes is float64, else float32; also where jax promotes no types."""
    return jnp.dtype(jnp.float64 if jnp.float64 in dtypes else jnp.float32)


def anything_compressed(*_) -> bool:
    """`decodes` of kernels that take weights in every form."""
    return True


def nothing_compressed(*_) -> bool:
    """Whether kernels take compressed weights as they are, in a family that takes none: False."""
    return False


def one_form_in_16s(weights: tuple[Any, ...], dtype: DTypeLike) -> bool:
    """`decodes` of the kernels for GPUs: weights of one form, whose outputs come 16 codes at a time, by bfloat16."""
    form = getattr(weights[0], "form", None)
    return dtype == jnp.bfloat16 and all(
        is_quantized(weight) and weight.form == form and weight.shape[-1] % 16 == 0 for weight in weights
    )


def no_limit(*_) -> None:
    """Why an operation cannot run, or runs slowly, in a family where nothing stands against it: None."""


def place_values(values: Num[Array, "..."], rows: Int[Array, "..."], num_rows: int) -> Num[Array, " R"]:
    """`(num_rows,)` zeros with each value in its row, which no other value has; a row of `num_rows` drops its value.

    XLA is told that no row is written twice. Otherwise it would sort the values where it must give equal bits in every
    run; so dropped values need distinct rows as well.
    """
    beyond = num_rows + jnp.arange(rows.size, dtype=rows.dtype).reshape(rows.shape)
    distinct = jnp.where(rows < num_rows, rows, beyond)
    return jnp.zeros(num_rows, values.dtype).at[distinct].set(values, mode="drop", unique_indices=True)
