"""Bytes that a layer over a mesh receives from other devices, by formula."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.parallelism import Parallelism


@dataclass(frozen=True)
class Traffic:
    """Bytes that one device receives in a pass over a layer, even routing assumed where it matters.

    Attributes:
      tokens: of the tokens, outputs and their gradients.
      parameters: of the parameters that are gathered, and of the gradients' sums.
    """

    tokens: float
    parameters: float

    @property
    def total(self) -> float:
        return self.tokens + self.parameters


def traffic(
    sizes: Sizes, parallel: Parallelism, axes: Mapping[str, int], itemsize: int, *, backward: bool, projections: int = 3
) -> Traffic:
    """Of one layer; `sizes.num_tokens` are one device's.

    A leg brings a device `T·d` numbers of each other device of its group, or, by "all_to_all", of those that have an
    expert of a token. A forward pass has two legs: tokens come, outputs leave. The backward pass has three: tokens come
    again unless they were kept, gradients of the outputs come, and gradients of the tokens leave. Parameters are
    gathered once a pass, unless they were kept, and their gradients are scattered.

    Args:
      sizes: of the layer.
      parallel: the roles of the axes.
      axes: devices along each axis.
      itemsize: bytes of a number.
      backward: whether the pass is forward and backward, or forward alone.
      projections: matrices of an expert.
    """
    tokens, d, n, num_experts, slots = sizes
    expert, tensor, fsdp = (math.prod(axes[a] for a in parallel.axes_of(r)) for r in ("expert", "tensor", "fsdp"))
    again = 0 if parallel.keep_gathered else 1
    others = expert * tensor - 1
    if parallel.exchange_for(slots, expert * tensor) == "all_to_all":
        # Of the experts' devices, those with one of K different experts at least; a share of them is the device itself.
        missed = math.comb(num_experts - num_experts // expert, slots) / math.comb(num_experts, slots)
        others = others * expert * (1 - missed) / expert
    leg = others * tokens * d * itemsize
    stored = projections * num_experts // expert * d * n // tensor * itemsize
    gather = stored * (fsdp - 1) / fsdp
    legs, gathers = (4 + again, 2 + again) if backward else (2, 1)
    return Traffic(legs * leg, gathers * gather)
