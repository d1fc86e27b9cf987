"""Portable forms of every operation, in plain XLA: exact arithmetic, and no buffer wider than the caller asks for."""

from pallas_kernels import contract
from pallas_kernels.xla.column_block import column_block as column_block
from pallas_kernels.xla.combine import combine as combine
from pallas_kernels.xla.dispatch import dispatch as dispatch
from pallas_kernels.xla.dispatch import in_parts as in_parts
from pallas_kernels.xla.dispatch import of_experts as of_experts
from pallas_kernels.xla.dispatch import row_range as row_range
from pallas_kernels.xla.down_backward import down_backward as down_backward
from pallas_kernels.xla.down_projection import down_projection as down_projection
from pallas_kernels.xla.router import router as router
from pallas_kernels.xla.router import router_backward as router_backward
from pallas_kernels.xla.token_selection import experts_added as experts_added
from pallas_kernels.xla.token_selection import token_cutoffs as token_cutoffs
from pallas_kernels.xla.up_backward import up_backward as up_backward
from pallas_kernels.xla.up_projection import up_projection as up_projection
from pallas_kernels.xla.weight_gradients import down_weight_gradients as down_weight_gradients
from pallas_kernels.xla.weight_gradients import up_weight_gradients as up_weight_gradients

transformable = True
unsupported = router_unsupported = dispatch_unsupported = why_kernels_spill = contract.no_limit
