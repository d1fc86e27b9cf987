"""Text from the model."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Key

from train_example.model import Decoder
from train_example.step import Tree

_TEMPERATURE = 0.8


def generate(
    model: Decoder,
    variables: Tree,
    prompt: Sequence[int] | np.ndarray,
    length: int,
    context: int,
    key: Key[Array, ""],
    decode: Callable[[Sequence[int]], str],
) -> str:
    """`prompt` and what the model adds to it, with what is not printable replaced.

    Args:
      model: the model.
      variables: its parameters and router state.
      prompt: at least one token, `context` at most.
      length: tokens in all.
      context: S, the model sees this many tokens back.
      key: randomness.
      decode: the text of tokens.
    """
    tokens = jnp.zeros(length, jnp.int32).at[: len(prompt)].set(jnp.asarray(list(prompt), jnp.int32))
    tokens = _continue(model, len(prompt), context, variables, tokens, key)
    text = decode(tokens.tolist())
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _continue(
    model: Decoder, first: int, context: int, variables: Tree, tokens: Int[Array, " N"], key: Key[Array, ""]
) -> Int[Array, " N"]:
    """`tokens` from `first` on replaced by samples. Runs its whole context for every token: slow, but short."""

    def add(position: Int[Array, ""], tokens: Int[Array, " N"]) -> Int[Array, " N"]:
        start = jnp.maximum(position - context, 0)
        window = lax.dynamic_slice_in_dim(tokens, start, min(context, tokens.size))
        logits = jnp.asarray(model.apply(variables, window[None]))[0, position - 1 - start]
        choice = jax.random.categorical(jax.random.fold_in(key, position), logits / _TEMPERATURE)
        return tokens.at[position].set(choice.astype(jnp.int32))

    return lax.fori_loop(first, tokens.size, add, tokens)
