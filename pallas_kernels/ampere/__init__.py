"""Kernels on what all NVIDIA GPUs since Ampere share: `mma.sync`, `ldmatrix` and `cp.async`.

The same operations and signatures as `pallas_kernels.xla`. They are written per thread, in the language of
`pallas_kernels.simt`, whose interpreter runs them and finds races. `docs/performance.md` says why, and what registers
they take.
"""

from pallas_kernels import contract
from pallas_kernels.ampere.down_backward import down_backward as down_backward
from pallas_kernels.ampere.down_projection import down_projection as down_projection
from pallas_kernels.ampere.support import unsupported as unsupported
from pallas_kernels.ampere.up_backward import up_backward as up_backward
from pallas_kernels.ampere.up_projection import up_projection as up_projection
from pallas_kernels.ampere.weight_gradients import down_weight_gradients as down_weight_gradients
from pallas_kernels.ampere.weight_gradients import up_weight_gradients as up_weight_gradients
from pallas_kernels.mosaic.interpreter import interpreted as interpreted
from pallas_kernels.simt.combine import combine as combine
from pallas_kernels.simt.dispatch import dispatch as dispatch
from pallas_kernels.simt.dispatch import dispatch_unsupported as dispatch_unsupported
from pallas_kernels.simt.dispatch import row_range as row_range
from pallas_kernels.simt.router import router as router
from pallas_kernels.simt.router import router_unsupported as router_unsupported
from pallas_kernels.simt.token_selection import experts_added as experts_added
from pallas_kernels.simt.token_selection import token_cutoffs as token_cutoffs
from pallas_kernels.xla.column_block import column_block as column_block
from pallas_kernels.xla.dispatch import in_parts as in_parts
from pallas_kernels.xla.dispatch import of_experts as of_experts
from pallas_kernels.xla.router import router_backward as router_backward

transformable = False
why_kernels_spill = contract.no_limit
