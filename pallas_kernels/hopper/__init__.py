"""Kernels for NVIDIA Hopper in Pallas Mosaic GPU: the same operations and signatures as `pallas_kernels.xla`.

A `tile_kernel` walks over tiles. Its operands come through a ring, by bulk copies and, for rows found by index, by a
`gather`; the `tile_queue` says which tile comes next. `row_matmul` multiplies rows with the weights of their expert,
for the `projections` and `down_backward`; `weight_gradients` contract over an expert's rows. `elementwise` functions
are activations and their derivatives. What Pallas has no form for is `inline` code, and `inline_interpreter` has it for
machines without a GPU.
"""

from pallas_kernels.hopper.down_backward import down_backward as down_backward
from pallas_kernels.hopper.limits import unsupported as unsupported
from pallas_kernels.hopper.limits import why_kernels_spill as why_kernels_spill
from pallas_kernels.hopper.projections import column_block as column_block
from pallas_kernels.hopper.projections import down_projection as down_projection
from pallas_kernels.hopper.projections import up_backward as up_backward
from pallas_kernels.hopper.projections import up_projection as up_projection
from pallas_kernels.hopper.weight_gradients import down_weight_gradients as down_weight_gradients
from pallas_kernels.hopper.weight_gradients import up_weight_gradients as up_weight_gradients
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

transformable = False
overlaps = True
