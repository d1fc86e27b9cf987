"""A frozen embedding that stays in the host's memory, of which a step fetches the rows of its tokens."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from train_example.model import Tree


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class HostEmbedding:
    """Stands in the place of the parameter, without an array on a device.

    Attributes:
      rows: `(V, d)`.
      fetched: whether they are; otherwise their places are filled with the tokens, for a compiler that knows no host.
    """

    rows: np.ndarray
    fetched: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape

    def __getitem__(self, tokens: Int[Array, "B S"]) -> Float[Array, "B S d"]:
        rows = jax.ShapeDtypeStruct((*tokens.shape, self.rows.shape[1]), self.rows.dtype)
        if not self.fetched:
            return jnp.broadcast_to(tokens[..., None], rows.shape).astype(rows.dtype)
        return jax.pure_callback(lambda tokens: self.rows[np.asarray(tokens)], rows, tokens)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.rows, dtype, copy=copy)


def with_host_embedding(params: Tree) -> Tree:
    """The parameters, or their shapes, the embedding among them in the host's memory."""
    embedding = params["embedding"]
    planned = isinstance(embedding, jax.ShapeDtypeStruct)
    rows = np.broadcast_to(np.zeros((), embedding.dtype), embedding.shape) if planned else np.asarray(embedding)
    return {**params, "embedding": HostEmbedding(rows, not planned)}
