"""The router's arithmetic: scores, of which a softmax or a sigmoid is made, and their logarithms."""

import math

from pallas_kernels.contract import Scoring
from pallas_kernels.simt.values import Float, exp2, log2, maximum, multiply_add, reciprocal

LN2 = math.log(2)
LOG2E = math.log2(math.e)
_LEAST = -200.0  # 2 to this is zero; and zero times this is zero, which is not so for -inf


def log_ratio(x: Float, base: Float, scoring: Scoring) -> Float:
    """Logarithm to base 2 of the score of `x` over that of `base`, at least `_LEAST`."""
    if scoring != "sigmoid":
        return maximum((x - base) * LOG2E, _LEAST)
    # log sigmoid(x) = min(x, 0) - log(1 + exp(-|x|)); the differences of the first terms are exact.
    steps = maximum(base * -1.0, 0.0) - maximum(x * -1.0, 0.0)
    return maximum(steps * LOG2E + (_log_of_one_and_power(base) - _log_of_one_and_power(x)), _LEAST)


def sigmoid(x: Float) -> Float:
    return reciprocal(exp2(x * -LOG2E) + 1.0)


def dot(a: list[Float], b: list[Float]) -> Float:
    out = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        out = multiply_add(x, y, out)
    return out


def _log_of_one_and_power(x: Float) -> Float:
    """Of 1 + exp(-|x|), to base 2."""
    return log2(exp2(maximum(x, x * -1.0) * -LOG2E) + 1.0)
