"""Kernels for NVIDIA Hopper in Pallas Mosaic GPU: the same operations and signatures as `pallas_kernels.xla`.

A `tile_kernel` walks over tiles. Its operands come through a ring, by bulk copies and, for rows found by index, by a
`gather`; the `tile_queue` says which tile comes next. `row_matmul` multiplies rows with the weights of their expert,
for the `projections` and `down_backward`, and `decoded_matmul` with compressed ones: `decoding` brings their `codes` to
registers as numbers. `weight_gradients` contract over an expert's rows. `elementwise` functions are activations and
their derivatives. What Pallas has no form for is `inline` code, and `inline_interpreter` has it for
machines without a GPU.
"""

import sys
from functools import cache, partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels import contract
from pallas_kernels.fp8 import in_8_bits
from pallas_kernels.hopper import fp8 as _fp8
from pallas_kernels.hopper.down_backward import down_backward as down_backward
from pallas_kernels.hopper.projections import column_block as column_block
from pallas_kernels.hopper.projections import down_projection as down_projection
from pallas_kernels.hopper.projections import up_backward as up_backward
from pallas_kernels.hopper.projections import up_projection as up_projection
from pallas_kernels.hopper.weight_gradients import down_weight_gradients as down_weight_gradients
from pallas_kernels.hopper.weight_gradients import up_weight_gradients as up_weight_gradients
from pallas_kernels.mosaic.device import weights_unsupported
from pallas_kernels.mosaic.device import why_kernels_spill as why_kernels_spill
from pallas_kernels.mosaic.interpreter import interpreted as interpreted
from pallas_kernels.routing.combine import combine as combine
from pallas_kernels.routing.dispatch import dispatch as dispatch
from pallas_kernels.routing.dispatch import dispatch_unsupported as dispatch_unsupported
from pallas_kernels.routing.dispatch import in_parts as in_parts
from pallas_kernels.routing.dispatch import of_experts as of_experts
from pallas_kernels.routing.dispatch import row_range as row_range
from pallas_kernels.routing.router import router as router
from pallas_kernels.routing.router import router_unsupported as router_unsupported
from pallas_kernels.routing.token_selection import experts_added as experts_added
from pallas_kernels.routing.token_selection import token_cutoffs as token_cutoffs
from pallas_kernels.xla.router import router_backward as router_backward

_in_8_bits = {name: getattr(_fp8, name) for name in ("down_operands", "up_operands", "cast_weights")}
in_fp8 = cache(partial(in_8_bits, sys.modules[__name__], **_in_8_bits))
fp8_multiple = _fp8.WIDTH_MULTIPLE
down_operands = up_operands = cast_weights = None
unrounded: Any = sys.modules[__name__]
decodes = contract.one_form_in_16s
transformable = False
overlaps = True


def unsupported(x: Array, weights: tuple[Array, ...], biases: tuple[Array, ...]) -> str | None:
    """Why an expert FFN of these arrays cannot run on the kernels, or None if it can.

    Args:
      x: tokens `(T, d)`.
      weights: up weights `(E, d, n)`, then the down weights.
      biases: every bias there is.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return (
            f"x has dtype {x.dtype}, the tensor cores take bfloat16 or float16 (MoE(..., dtype=jnp.bfloat16) casts the "
            "tokens; parameters may stay float32)"
        )
    if reason := dispatch_unsupported(weights[0].shape[0]) or weights_unsupported(weights, biases):
        return reason
    if len({weight.dtype for weight in weights[:-1]}) > 1:
        return f"w_gate and w_up have dtypes {weights[0].dtype} and {weights[1].dtype}, must have the same"
    if x.size // 8 >= 2**31:
        return f"x of shape {x.shape} is too large for the gather's 32-bit offsets in units of 16 bytes"
    return None
