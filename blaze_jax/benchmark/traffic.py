"""Bytes that a layer over a mesh receives from other devices, by formula, and the efficiency to expect of many GPUs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from blaze_jax.benchmark.results import Record
from blaze_jax.benchmark.sizes import Sizes, preset
from blaze_jax.parallelism import Parallelism


@dataclass(frozen=True)
class Traffic:
    """Bytes that one device receives in a pass over a layer, even routing assumed where it matters.

    Attributes:
      tokens: tokens, outputs and their gradients.
      parameters: parameters that are gathered, and sums of their gradients.
    """

    tokens: float
    parameters: float

    @property
    def total(self) -> float:
        return self.tokens + self.parameters


def traffic(
    sizes: Sizes, parallel: Parallelism, axes: Mapping[str, int], itemsize: int, *, backward: bool, projections: int = 3
) -> Traffic:
    """The traffic of one layer; `sizes.num_tokens` are one device's.

    A leg brings a device `T·d` numbers of each other device of its group, or, by "all_to_all", of those that have an
    expert of a token. A forward pass has two legs: tokens come, outputs leave. The backward pass has three: tokens come
    again unless they were kept, gradients of the outputs come, and gradients of the tokens leave. Parameters are
    gathered once a pass, unless they were kept, and their gradients are scattered.

    Args:
      sizes: the layer's.
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


TFLOPS = 600
"""Reached by the experts of one H200, forward and backward: 581 (back to back) to 627 at 32768,4096,1024,128,8."""

LINK, NETWORK = 250, 45
"""GB/s that a GPU receives inside a host, as measured of collectives on two H200s, and of 400 Gbit/s between hosts."""

HOST = 8
"""GPUs of a host."""

SMS, COLLECTIVE_SMS = 132, 24
"""Multiprocessors of a GPU, and those that NCCL's channels take while they run."""

TOKENS = 16384
"""Tokens of each GPU."""


def expected(model: str, devices: int) -> tuple[float, float, float]:
    """Milliseconds of communication, and the share of linear with all of it exposed and with all of it hidden.

    Experts are split over the GPUs of a host, parameters are gathered over the hosts. What is hidden costs the SMs that
    move it, and cannot take less time than the links do.
    """
    sizes = preset(model, TOKENS)
    axes = {"expert": min(devices, HOST), "fsdp": max(1, devices // HOST)}
    moved = traffic(sizes, Parallelism(expert="expert", fsdp="fsdp"), axes, 2, backward=True)
    compute = 3 * sizes.forward_flops / TFLOPS / 1e9
    inside, between = moved.tokens / LINK / 1e6, moved.parameters / NETWORK / 1e6
    hidden = max(compute + (inside + between) * COLLECTIVE_SMS / SMS, inside, between)
    return inside + between, compute / (compute + inside + between), compute / hidden


def expected_efficiency(model: str, dtype=None) -> Record:
    """A record of `expected` for 2 to 1024 GPUs. Nothing is measured."""
    rows = {str(1 << i): expected(model, 1 << i) for i in range(1, 11)}
    return {"kind": "expected", "model": model, "devices": rows}
