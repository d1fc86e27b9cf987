"""Compression of bfloat16 weights without loss: fewer bytes on their way to a GPU, where elementwise code decodes them.

The eight bits of sign and mantissa look random and stay as they are. The exponents of trained or drawn weights do not:
a code of 3 or 4 bits names one of the 7 or 15 most frequent ones, and the last code says that the exponent is the next
of a list, the escapes. A weight then takes about 11.2 or 12.1 bits (the idea is ZipMoE's, arXiv 2601.21198; the form is
one that a GPU decodes in any order). Codes are kept as planes, one for each of their bits, so that both widths have one
form. All 65,536 values come back as they were.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial, reduce
from operator import and_
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Array, BFloat16, Int, UInt8

BLOCK = 1024
"""Weights for each of which `first` has an entry."""

_CHUNK = BLOCK << 12  # weights that the encoder looks at together

Bits = Literal[3, 4]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["sign_mantissa", "planes", "exponents", "first", "escapes"],
    meta_fields=["shape"],
)
@dataclass(frozen=True)
class Compressed:
    """A bfloat16 array, compressed; a pytree of arrays of numpy or jax. N are its weights, padded to whole blocks.

    Attributes:
      sign_mantissa: sign, then the seven bits of the mantissa.
      planes: bit b of the code of weight i is bit i % 8 of `planes[b, i // 8]`.
      exponents: the exponent of each code; the last code's has no meaning.
      first: how many escapes stand before each block.
      escapes: exponents of the weights that have the last code, in order; padded with zeros to its capacity.
      shape: the array's shape.
    """

    sign_mantissa: UInt8[Any, " N"]
    planes: UInt8[Any, "bits N/8"]
    exponents: UInt8[Any, " 2**bits"]
    first: Int[Any, " N/1024"]
    escapes: UInt8[Any, " capacity"]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all of it, the capacity of the escapes included."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    @property
    def bits_per_weight(self) -> float:
        """Bits that a weight takes."""
        return 8 * self.nbytes / max(int(np.prod(self.shape)), 1)

    def with_capacity(self, capacity: int) -> "Compressed":
        """The same with room for so many escapes, so that arrays of one shape share a program; at least what it has."""
        if capacity < len(self.escapes):
            raise ValueError(f"{capacity=} must be at least {len(self.escapes)}, the escapes that are there")
        padded = np.zeros(capacity, np.uint8)
        padded[: len(self.escapes)] = np.asarray(self.escapes)
        return Compressed(self.sign_mantissa, self.planes, self.exponents, self.first, padded, self.shape)


def compress(weights: Any, bits: Bits = 4) -> Compressed:
    """Compresses an array on the host; every value comes back as it was, whatever the exponents are.

    Args:
      weights: bfloat16, of any shape, fewer than 2**31 of them.
      bits: of an exponent's code.

    Returns:
      Arrays of numpy, whose `bits_per_weight` says what was reached. Its escapes have no room to spare.

    Raises:
      ValueError: an argument is another.
    """
    if bits not in (3, 4):
        raise ValueError(f"{bits=} must be 3 or 4")
    weights = np.asarray(weights)
    if weights.dtype != ml_dtypes.bfloat16 or weights.size >= 2**31:
        raise ValueError(f"weights are {weights.dtype}{list(weights.shape)}, must be fewer than 2**31 of bfloat16")
    words = np.ascontiguousarray(weights).reshape(-1).view(np.uint16)
    size = -(-words.size // BLOCK) * BLOCK
    histogram = np.zeros(256, np.int64)
    for _, chunk in _chunks(words):
        histogram += np.bincount(_exponents(chunk), minlength=256)
    last = 2**bits - 1
    frequent = np.argsort(-histogram, kind="stable")[:last].astype(np.uint8)
    code_of = np.full(256, last, np.uint8)
    code_of[frequent] = np.arange(last, dtype=np.uint8)

    sign_mantissa = np.zeros(size, np.uint8)
    planes = np.zeros((bits, size // 8), np.uint8)
    escapes, counts = [], np.zeros(size // BLOCK, np.int64)
    for start, chunk in _chunks(words):
        exponents = _exponents(chunk)
        codes = np.zeros(-(-chunk.size // BLOCK) * BLOCK, np.uint8)  # padding has a code that is no escape
        codes[: chunk.size] = code_of[exponents]
        sign_mantissa[start : start + chunk.size] = (chunk >> 8 & 0x80) | (chunk & 0x7F)
        for plane, bit in zip(planes, range(bits), strict=True):
            plane[start // 8 : (start + codes.size) // 8] = np.packbits(codes >> bit & 1, bitorder="little")
        escaped = codes == last
        escapes.append(exponents[escaped[: chunk.size]])
        counts[start // BLOCK : (start + codes.size) // BLOCK] = escaped.reshape(-1, BLOCK).sum(1)
    first = (np.cumsum(counts) - counts).astype(np.int32)
    found = np.concatenate([*escapes, np.zeros(0 if counts.any() else 1, np.uint8)])
    return Compressed(sign_mantissa, planes, np.append(frequent, np.uint8(0)), first, found, weights.shape)


def decompress(compressed: Compressed) -> BFloat16[Array, "..."]:
    """The array, by elementwise code and one small sum, on whatever device it is; under `jax.jit` with what uses it."""
    compressed = jax.tree.map(jnp.asarray, compressed)
    planes = compressed.planes.reshape(len(compressed.planes), -1, BLOCK // 8)
    escaped = reduce(and_, list(planes))  # a byte for eight weights
    counts = lax.population_count(escaped).astype(jnp.int32)
    before = compressed.first[:, None] + jnp.cumsum(counts, 1, dtype=jnp.int32) - counts
    place = jnp.arange(8, dtype=jnp.uint8)
    one = jnp.uint8(1)

    def spread(plane: Array) -> Array:
        return (plane[..., None] >> place) & one

    code = reduce(jnp.bitwise_or, (spread(plane) << jnp.uint8(bit) for bit, plane in enumerate(planes)))
    earlier = lax.population_count(escaped[..., None] & ((one << place) - one)).astype(jnp.int32)
    escape = compressed.escapes.at[before[..., None] + earlier].get(mode="clip")
    exponent = jnp.where(spread(escaped) == one, escape, compressed.exponents.at[code].get(mode="clip"))
    sign_mantissa = compressed.sign_mantissa.astype(jnp.uint16).reshape(code.shape)
    sign, mantissa = sign_mantissa & jnp.uint16(0x80), sign_mantissa & jnp.uint16(0x7F)
    words = sign << jnp.uint16(8) | exponent.astype(jnp.uint16) << jnp.uint16(7) | mantissa
    size = int(np.prod(compressed.shape))
    return lax.bitcast_convert_type(words.reshape(-1)[:size].reshape(compressed.shape), jnp.bfloat16)


def decompressed(tree: Any) -> Any:
    """The tree with every compressed array in it decoded, and all else as it is."""

    def one(leaf: Any) -> Any:
        return decompress(leaf) if isinstance(leaf, Compressed) else leaf

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, Compressed))


def _exponents(words: np.ndarray) -> np.ndarray:
    return (words >> 7).astype(np.uint8)  # without the sign, which is the ninth bit


def _chunks(words: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    return ((start, words[start : start + _CHUNK]) for start in range(0, words.size, _CHUNK))
