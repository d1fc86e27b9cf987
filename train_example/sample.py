"""Text from the model."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Key

from train_example.model import Decoder
from train_example.step import Tree

_TEMPERATURE = 0.8


def generate(model: Decoder, variables: Tree, prompt: bytes, length: int, context: int, key: Key[Array, ""]) -> str:
    """`prompt` and what the model adds to it, as UTF-8 with what is not printable replaced.

    Args:
      model: the model.
      variables: its parameters and router state.
      prompt: at least one byte, `context` at most.
      length: bytes in all.
      context: S, the model sees this many bytes back.
      key: randomness.
    """
    tokens = jnp.zeros(length, jnp.int32).at[: len(prompt)].set(jnp.frombuffer(prompt, jnp.uint8))
    tokens = _continue(model, len(prompt), context, variables, tokens, key)
    text = bytes(tokens.tolist()).decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _continue(
    model: Decoder, first: int, context: int, variables: Tree, tokens: Int[Array, " N"], key: Key[Array, ""]
) -> Int[Array, " N"]:
    """`tokens` from `first` on replaced by samples. Runs its whole context for every byte: slow, but short."""

    def add(position: Int[Array, ""], tokens: Int[Array, " N"]) -> Int[Array, " N"]:
        start = jnp.maximum(position - context, 0)
        window = lax.dynamic_slice_in_dim(tokens, start, min(context, tokens.size))
        logits = jnp.asarray(model.apply(variables, window[None]))[0, position - 1 - start]
        choice = jax.random.categorical(jax.random.fold_in(key, position), logits / _TEMPERATURE)
        return tokens.at[position].set(choice.astype(jnp.int32))

    return lax.fori_loop(first, tokens.size, add, tokens)
