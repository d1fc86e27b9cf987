"""What the lanes of a warp, all 32 of them together, do with each other's values."""

from collections.abc import Callable
from typing import Any

from pallas_kernels.simt.races import WARP
from pallas_kernels.simt.values import Bool, Float, Int, machine, select


def lanes_with_equal_bits(x: Int, bits: int) -> Int:
    """Bit mask of the warp's lanes whose last few bits are the same.

    Found bit by bit, which is faster than the instruction for it: there, lanes wait for other values' turn.
    """
    same = Int(-1)
    for bit in range(bits):
        mine = (x >> bit) & 1
        same = same & (lanes_where(mine.equals(1)) ^ (mine - 1))
    return same


def lanes_where(x: Bool) -> Int:
    """Bit mask of the warp's lanes where the condition holds."""
    return Int(machine().ballot(x.value))


def warp_maximum(x: Int) -> Int:
    """The largest value of the warp, in all its lanes."""
    return Int(machine().warp_maximum(x.value))


def shuffle(x: Any, lane) -> Any:
    """The value of another lane."""
    if isinstance(x, Float):
        return shuffle(x.bits(), lane).as_float()
    return Int(machine().shuffle(x.value, Int(lane).value))


def shuffle_up(x: Int, distance) -> Int:
    """The value of the lane so many before this one; its own where there is none."""
    return Int(machine().shuffle_up(x.value, Int(distance).value))


def shuffle_xor(x: Any, mask) -> Any:
    """The value of the lane whose number is this one's `^ mask`."""
    if isinstance(x, Float):
        return shuffle_xor(x.bits(), mask).as_float()
    return Int(machine().shuffle_xor(x.value, Int(mask).value))


def combine_lanes(operation: Callable, x, group: int, start: int = 1):
    """`x` combined by `operation` over each group of lanes, a power of two, the same in all of them.

    From `start` on: lanes nearer than that already hold the same.
    """
    while start < group:
        x = operation(x, shuffle_xor(x, start))
        start *= 2
    return x


def exclusive_warp_sum(x: Int, lane: Int) -> tuple[Int, Int]:
    """Sum of `x` over the lanes before this one, and over all lanes."""
    running = x
    for distance in (1, 2, 4, 8, 16):
        neighbour = shuffle_up(running, distance)
        running = running + select(lane >= distance, neighbour, 0)
    return running - x, shuffle(running, WARP - 1)
