"""Kernels for NVIDIA Hopper in Pallas Mosaic GPU: the same operations and signatures as `pallas_kernels.xla`."""

from pallas_kernels.compat import remember_assembler_version
from pallas_kernels.hopper.assembler import why_kernels_spill
from pallas_kernels.hopper.column_block import column_block
from pallas_kernels.hopper.down_backward import down_backward
from pallas_kernels.hopper.down_projection import down_projection
from pallas_kernels.hopper.support import unsupported
from pallas_kernels.hopper.up_backward import up_backward
from pallas_kernels.hopper.up_projection import up_projection
from pallas_kernels.hopper.weight_gradients import down_weight_gradients, up_weight_gradients
from pallas_kernels.mosaic.early_assembly import assemble_early
from pallas_kernels.mosaic.interpreter import interpreted
from pallas_kernels.simt.combine import combine
from pallas_kernels.simt.dispatch import dispatch, dispatch_unsupported, row_range
from pallas_kernels.simt.router import router, router_unsupported
from pallas_kernels.simt.token_selection import experts_added, token_cutoffs
from pallas_kernels.xla.router import router_backward

__all__ = [
    "column_block",
    "combine",
    "dispatch",
    "dispatch_unsupported",
    "down_backward",
    "down_projection",
    "down_weight_gradients",
    "experts_added",
    "interpreted",
    "router",
    "router_backward",
    "router_unsupported",
    "row_range",
    "token_cutoffs",
    "unsupported",
    "up_backward",
    "up_projection",
    "up_weight_gradients",
    "why_kernels_spill",
]

remember_assembler_version()
assemble_early()
