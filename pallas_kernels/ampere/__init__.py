"""Kernels on what all NVIDIA GPUs since Ampere share: `mma.sync`, `ldmatrix` and `cp.async`.

The same operations and signatures as `pallas_kernels.xla`. They are written per thread, in the language of
`pallas_kernels.simt`, whose interpreter runs them and finds races. `docs/performance.md` says why, and what registers
they take.
"""

from pallas_kernels.ampere.down_backward import down_backward as down_backward
from pallas_kernels.ampere.down_projection import down_projection as down_projection
from pallas_kernels.ampere.up_backward import up_backward as up_backward
from pallas_kernels.ampere.up_projection import up_projection as up_projection
from pallas_kernels.ampere.weight_gradients import down_weight_gradients as down_weight_gradients
from pallas_kernels.ampere.weight_gradients import up_weight_gradients as up_weight_gradients
from pallas_kernels.simt.dispatch import dispatch as dispatch
