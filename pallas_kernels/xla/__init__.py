"""Portable forms of every operation, in plain XLA: exact arithmetic, and no buffer wider than the caller asks for."""

from pallas_kernels.xla.column_block import column_block
from pallas_kernels.xla.combine import combine
from pallas_kernels.xla.dispatch import dispatch, row_range
from pallas_kernels.xla.down_backward import down_backward
from pallas_kernels.xla.down_projection import down_projection
from pallas_kernels.xla.router import router, router_backward
from pallas_kernels.xla.token_selection import experts_added, token_cutoffs
from pallas_kernels.xla.up_backward import up_backward
from pallas_kernels.xla.up_projection import up_projection
from pallas_kernels.xla.weight_gradients import down_weight_gradients, up_weight_gradients

__all__ = [
    "column_block",
    "combine",
    "dispatch",
    "down_backward",
    "down_projection",
    "down_weight_gradients",
    "experts_added",
    "router",
    "router_backward",
    "row_range",
    "token_cutoffs",
    "up_backward",
    "up_projection",
    "up_weight_gradients",
]
