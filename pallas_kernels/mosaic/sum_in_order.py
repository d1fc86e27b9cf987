"""Sums of a few parts, in an order that no compiler chooses."""

from functools import reduce
from operator import add

from jaxtyping import Array, Float


def sum_in_order(parts: Float[Array, "parts *rest"]) -> Float[Array, "*rest"]:
    """The sum over the first axis, from the first part to the last.

    XLA times several ways to sum along an axis as it compiles for a GPU, which differ in the last bits, so two
    compilations of one program may (openxla/xla issue 37902).
    """
    return reduce(add, parts)
