"""The choice of a token from logits: greedy, or drawn with a temperature, of the likeliest ones where that is asked."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; filters apply in this order.

    Attributes:
      temperature: what logits are divided by; 0 takes the likeliest token.
      top_k: only this many of the likeliest tokens stay; None for all. Of equal ones the smaller number comes first.
      top_p: of these only the fewest likeliest stay whose probabilities add up to this (arXiv 1904.09751).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0


def candidates(logits: Float[Array, "B V"], sampling: Sampling) -> tuple[Float[Array, "B k"], Int[Array, "B k"] | None]:
    """Logits of what may be drawn, -inf for what may not, and their tokens; None for all tokens in their order."""
    logits = logits / sampling.temperature
    if sampling.top_k is None and sampling.top_p == 1.0:
        return logits, None
    vocabulary = logits.shape[-1]
    values, tokens = lax.top_k(logits, min(sampling.top_k or vocabulary, vocabulary))
    probabilities = jax.nn.softmax(values)
    before = jnp.cumsum(probabilities, -1) - probabilities
    likely = (before < sampling.top_p).at[:, 0].set(True)
    return jnp.where(likely, values, -jnp.inf), tokens


def choose(logits: Float[Array, "B V"], keys: Key[Array, " B"], sampling: Sampling) -> Int[Array, " B"]:
    """A token of each row, int32, by the row's own key."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    values, tokens = candidates(logits, sampling)
    choice = jax.vmap(jax.random.categorical)(keys, values).astype(jnp.int32)
    return choice if tokens is None else jnp.take_along_axis(tokens, choice[:, None], -1)[:, 0]
