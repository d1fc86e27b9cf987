"""Floats as integers of the same order, and sorting networks that a thread runs on a few of them."""

import functools
from collections.abc import Iterator, Sequence

from pallas_kernels.simt.values import Float, Int, maximum, minimum, permute_bytes, select

NOTHING = -(1 << 31)
"""Below the key of -inf."""

MINUS_INFINITY = NOTHING + (1 << 23) - 1
"""The key of -inf."""


def key_of(x: Float) -> Int:
    """The integer that orders like the float. Adding zero makes -0 a 0 and any NaN the one with the largest key."""
    bits = (x + 0.0).bits()
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def value_of(key: Int) -> Float:
    """The float of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).as_float()


def largest_of(keys: Sequence[Int]) -> Int:
    return functools.reduce(maximum, keys)


def sorted_descending(keys: Sequence[Int]) -> list[Int]:
    """The keys, largest first."""
    keys = list(keys)
    for i, j in _exchanges(len(keys)):
        keys[i], keys[j] = maximum(keys[i], keys[j]), minimum(keys[i], keys[j])
    return keys


def sorted_with_bytes(keys: Sequence[Int], bytes_: Int) -> tuple[list[Int], Int]:
    """Keys in descending order, and the bytes that go with them; equals keep their order."""
    keys = list(keys)
    for turn in range(len(keys)):
        for i in range(turn % 2, len(keys) - 1, 2):
            swap = keys[i + 1] > keys[i]
            keys[i], keys[i + 1] = maximum(keys[i], keys[i + 1]), minimum(keys[i], keys[i + 1])
            order = [0, 1, 2, 3]
            order[i], order[i + 1] = i + 1, i
            bytes_ = select(swap, permute_bytes(bytes_, order), bytes_)
    return keys, bytes_


def _exchanges(n: int) -> Iterator[tuple[int, int]]:
    """Pairs of places whose exchange, larger one first, sorts n values (Batcher's merge exchange)."""
    span = 1
    while span < n:
        apart = span
        while apart:
            for start in range(apart % span, n - apart, 2 * apart):
                for i in range(start, min(start + apart, n - apart)):
                    if i // (2 * span) == (i + apart) // (2 * span):
                        yield i, i + apart
            apart //= 2
        span *= 2
