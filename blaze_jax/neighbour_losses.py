"""Losses that look at a token's neighbours in its sequence, so that tokens close together take the same experts.

Few experts have then to be read for a piece of text (BlockFFN, arXiv 2507.08771). A sequence is along the last leading
dimension of the tokens; `segment_ids` part it where several texts are packed into one.
"""

from collections.abc import Collection

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from blaze_jax.active_experts import probabilities_of_relu

_SHARPNESS = 100.0
_ROOM = 1e-5  # of a product's factors, for a logarithm


def neighbour_losses(
    logits: Float[Array, "... S E"],
    mask: Bool[Array, "... S"] | None,
    segment_ids: Int[Array, "... S"] | None,
    names: Collection[str],
    chunk_tokens: int,
    axes: tuple[str, ...],
) -> dict[str, Float[Array, ""]]:
    """The losses of these `names`, over all devices along `axes`; 0 where no token has what it takes.

    - "chunk_loss": the mean over chunks and experts of `1 - Π_t (1 - p_te + 1e-5)` with `p = relu(l) / Σ relu(l)`:
      about the share of the experts that a chunk takes. A chunk are the tokens of a segment among `chunk_tokens`
      positions of a sequence, counted from its start.
    - "locality_loss": the mean over neighbours and experts of the binary cross entropy of `σ(100·l_(t-1))` for the
      target `σ(100·l_t)`, through which gradients flow, too.
    """
    logits = jnp.atleast_2d(logits)  # of a single token, too
    real = jnp.ones(logits.shape[:-1], bool) if mask is None else jnp.atleast_1d(mask)
    segments = jnp.zeros(logits.shape[:-1], jnp.int32) if segment_ids is None else jnp.atleast_1d(segment_ids)
    losses = {}
    if "chunk_loss" in names:
        losses["chunk_loss"] = _mean(*_taken(logits, real, segments, chunk_tokens), axes)
    if "locality_loss" in names:
        losses["locality_loss"] = _mean(*_surprise(logits, real, segments), axes)
    return losses


def _taken(logits, real, segments, size: int) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The sum over chunks of the mean share of experts that some token takes, and the number of chunks."""
    length = logits.shape[-2]
    padding, none = (0, -length % size), [(0, 0)] * (logits.ndim - 2)

    def cut(array, *rest):
        array = jnp.pad(array, [*none, padding, *[(0, 0) for _ in rest]])
        return array.reshape(*array.shape[: logits.ndim - 2], -1, size, *rest)

    real, segments = cut(real), cut(segments)
    taken = cut(probabilities_of_relu(logits), logits.shape[-1])
    likely = taken > 0.5  # each form is exact on its side
    free = jnp.where(likely, jnp.log(jnp.where(likely, 1 - taken, 1) + _ROOM), jnp.log1p(_ROOM - taken * ~likely))
    same = (segments[..., :, None] == segments[..., None, :]) & real[..., :, None] & real[..., None, :]
    of_chunk = -jnp.expm1(jnp.matmul(same.astype(free.dtype), free, precision=lax.Precision.HIGHEST)).mean(-1)
    first = real & ~jnp.tril(same, -1).any(-1)  # of its chunk
    return jnp.where(first, of_chunk, 0).sum(), first.sum().astype(free.dtype)


def _surprise(logits, real, segments) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The sum over neighbours of their mean cross entropy, and their number."""
    before, after = (_SHARPNESS * part for part in (logits[..., :-1, :], logits[..., 1:, :]))
    neighbours = real[..., :-1] & real[..., 1:] & (segments[..., :-1] == segments[..., 1:])
    entropy = (jax.nn.softplus(before) - before * jax.nn.sigmoid(after)).mean(-1)
    return jnp.where(neighbours, entropy, 0).sum(), neighbours.sum().astype(logits.dtype)


def _mean(total, count, axes: tuple[str, ...]):
    if axes:
        total, count = lax.psum((total, count), axes)
    return total / jnp.maximum(count, 1)
