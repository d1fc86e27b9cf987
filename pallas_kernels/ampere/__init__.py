"""Kernels on what all NVIDIA GPUs since Ampere share: `mma.sync`, `ldmatrix` and `cp.async`.

The same operations and signatures as `pallas_kernels.xla`, written per thread in the language `pallas_kernels.simt`,
whose interpreter runs them and finds races. `docs/performance.md` says why, and what registers they take.

A block multiplies a tile, whose `operands` come through a ring of slots in shared memory, and the `pipeline` keeps
copies under way and tensor cores at work. `row_matmul` is the kernel that finds rows and columns and stores products:
`projections` end a product with a bias or an activation, and `down_backward` with more operands. Compressed weights
arrive as codes, which `decoding` turns into what the tensor cores take. `weight_gradients` contract over an expert's
rows.
"""

import sys
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels import contract
from pallas_kernels.ampere.projections import down_backward as down_backward
from pallas_kernels.ampere.projections import down_projection as down_projection
from pallas_kernels.ampere.projections import up_backward as up_backward
from pallas_kernels.ampere.projections import up_projection as up_projection
from pallas_kernels.ampere.weight_gradients import down_weight_gradients as down_weight_gradients
from pallas_kernels.ampere.weight_gradients import up_weight_gradients as up_weight_gradients
from pallas_kernels.mosaic.device import weights_unsupported
from pallas_kernels.mosaic.interpreter import interpreted as interpreted
from pallas_kernels.routing.combine import combine as combine
from pallas_kernels.routing.dispatch import dispatch as dispatch
from pallas_kernels.routing.dispatch import dispatch_unsupported as dispatch_unsupported
from pallas_kernels.routing.dispatch import row_range as row_range
from pallas_kernels.routing.router import router as router
from pallas_kernels.routing.router import router_unsupported as router_unsupported
from pallas_kernels.routing.token_selection import experts_added as experts_added
from pallas_kernels.routing.token_selection import token_cutoffs as token_cutoffs
from pallas_kernels.xla.experts import column_block as column_block
from pallas_kernels.xla.router import router_backward as router_backward

in_parts = of_experts = None  # these kernels compute all rows at once
in_fp8, fp8_multiple = None, 1
down_operands = up_operands = cast_weights = None
unrounded: Any = sys.modules[__name__]
decodes = contract.one_form_in_16s
why_kernels_spill = contract.no_limit
transformable = False
overlaps = False


def unsupported(x: Array, weights: tuple[Array, ...], biases: tuple[Array, ...]) -> str | None:
    """Why an expert FFN of these arrays cannot run on the kernels, or None if it can.

    Args:
      x: tokens `(T, d)`.
      weights: up weights `(E, d, n)`, then the down weights.
      biases: every bias there is.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"x has dtype {x.dtype}, the tensor cores take bfloat16, float16 or float32"
    return dispatch_unsupported(weights[0].shape[0]) or weights_unsupported(weights, biases)
