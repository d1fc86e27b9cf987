"""Tokens in ranges, computed one after the other: what has a row for each pair then exists for one range.

A range has rows of all experts, so that the tiles of every kernel keep a GPU as busy as those of all tokens would.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from pallas_kernels.compat import is_symbolic_dim, vary_over, varying_axes
from pallas_kernels.contract import EMPTY_SLOT, Dispatch

RANGE_BYTES = 2**29
"""Of a range's activation, at least: its products take hundreds of times as long as their launches."""

ROWS_PER_EXPERT = 2**15
"""Of a range, at least: adding to the gradients of the weights then takes about 1% of the time of its products."""

FEWEST = 4
"""Ranges, at least: fewer would save little."""


@dataclass(frozen=True)
class TokenRanges:
    """As many ranges of `size` tokens each as cover `num_tokens`, which are at least `size`.

    Where they do not divide the tokens, the first one overlaps with the second, and leaves the tokens there to it.
    """

    num_tokens: int
    size: int

    def __post_init__(self):
        if not 1 <= self.size <= self.num_tokens:
            raise ValueError(f"size={self.size} of a range must be from 1 to num_tokens={self.num_tokens}")

    @property
    def count(self) -> int:
        """The fewest that cover the tokens: with one more, a token would be in three ranges, and count twice."""
        return -(-self.num_tokens // self.size)

    def start(self, i: Int[Array, "..."]) -> Int[Array, "..."]:
        """First token of range `i`: a function of the loop's count alone, so that XLA lets kernels write there."""
        if self.num_tokens == self.count * self.size:
            return i * self.size
        return jnp.maximum(self.num_tokens - (self.count - i) * self.size, 0)

    def dispatch(self, group: Callable[[Int[Array, "size K"]], Dispatch], experts: Int[Array, "T K"]) -> Dispatch:
        """Each one's pairs as `group` groups them, stacked; token ids are those of all T tokens."""
        second = self.num_tokens - (self.count - 1) * self.size

        def of_range(i):
            start = self.start(i)
            token = start + jnp.arange(self.size, dtype=jnp.int32)[:, None]
            mine = (i > 0) | (token < second)
            groups = group(jnp.where(mine, self.of(experts, start), EMPTY_SLOT))
            tokens = groups.expert_token_indices
            return groups._replace(expert_token_indices=jnp.where(tokens < self.size, start + tokens, self.num_tokens))

        return lax.map(of_range, jnp.arange(self.count, dtype=jnp.int32))

    def of(self, array: Shaped[Array, "T ..."], start: Int[Array, ""]) -> Shaped[Array, "size ..."]:
        """The entries of a range's tokens."""
        return lax.dynamic_slice_in_dim(array, start, self.size)

    def one_by_one(self, step: Callable, sums, *stacks):
        """`step(start, *own) -> (by_token, terms, others)` for each range, where its first token is `start`.

        Args:
          step: of the range's entries `own` in `stacks`.
          sums: what the terms of the first range are added to.
          *stacks: pytrees of arrays `(count, ...)`, or None.

        Returns:
          What is by token as arrays `(T, ...)`, the sums, and the others stacked.
        """
        first = (jnp.int32(0), *jax.tree.map(lambda array: array[0], stacks))
        by_token, _, others = jax.eval_shape(step, *first)
        varying = varying_axes(sums, stacks)
        whole = [_empty(a, (self.num_tokens, *a.shape[1:]), varying) for a in jax.tree.leaves(by_token)]
        stacked = [_empty(a, (self.count, *a.shape), varying) for a in jax.tree.leaves(others)]

        def turn(i, carry):
            whole, sums, stacked = carry
            start = self.start(i)
            own = jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, i, keepdims=False), stacks)
            by_token, terms, others = step(start, *own)
            # XLA lets the kernels write there, if nothing is between the two.
            whole = [
                lax.dynamic_update_slice_in_dim(a, own, start, 0)
                for a, own in zip(whole, jax.tree.leaves(by_token), strict=True)
            ]
            stacked = [
                lax.dynamic_update_index_in_dim(a, own, i, 0)
                for a, own in zip(stacked, jax.tree.leaves(others), strict=True)
            ]
            return whole, jax.tree.map(jnp.add, sums, terms), stacked

        whole, sums, stacked = lax.fori_loop(0, self.count, turn, (whole, vary_over(sums, varying), stacked))
        return (
            jax.tree.unflatten(jax.tree.structure(by_token), whole),
            sums,
            jax.tree.unflatten(jax.tree.structure(others), stacked),
        )


def _empty(like: jax.ShapeDtypeStruct, shape: tuple[int, ...], varying: frozenset[str]) -> Array:
    """Of which all is written: XLA would take as long to fill it with zeros as a kernel to write it."""
    return vary_over(lax.empty(shape, like.dtype), varying)


def token_ranges(num_tokens: int, slots: int, num_experts: int, row_bytes: int) -> TokenRanges | None:
    """The ranges of T tokens with K slots, whose activation has `row_bytes` a row; None where they would save little.

    Every range adds to float32 gradients of the weights. At 4 TB/s and 500 TFLOP/s this takes 333·E/R of the time of
    its products, for R rows, whatever the widths.
    """
    rows = max(RANGE_BYTES // row_bytes, ROWS_PER_EXPERT * num_experts)
    if is_symbolic_dim(num_tokens) or num_tokens * slots < FEWEST * rows:
        return None
    return TokenRanges(num_tokens, -(-num_tokens // (num_tokens * slots // rows)))
