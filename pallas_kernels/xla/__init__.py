"""Portable forms of every operation, in plain XLA: exact arithmetic, and no buffer wider than the caller asks for.

Their docstrings define what each operation computes, in every family. `experts` has the products of the experts,
`dispatch` what makes rows of tokens and sums of rows, `router` who goes where; `loops` is what they are built from.
"""

import sys
from functools import cache, partial
from typing import Any

from pallas_kernels import contract
from pallas_kernels.fp8 import rounding_operands
from pallas_kernels.xla.dispatch import combine as combine
from pallas_kernels.xla.dispatch import dispatch as dispatch
from pallas_kernels.xla.dispatch import in_parts as in_parts
from pallas_kernels.xla.dispatch import of_experts as of_experts
from pallas_kernels.xla.dispatch import row_range as row_range
from pallas_kernels.xla.experts import column_block as column_block
from pallas_kernels.xla.experts import down_backward as down_backward
from pallas_kernels.xla.experts import down_projection as down_projection
from pallas_kernels.xla.experts import down_weight_gradients as down_weight_gradients
from pallas_kernels.xla.experts import scaled_up_projection as scaled_up_projection
from pallas_kernels.xla.experts import up_backward as up_backward
from pallas_kernels.xla.experts import up_projection as up_projection
from pallas_kernels.xla.experts import up_weight_gradients as up_weight_gradients
from pallas_kernels.xla.router import experts_added as experts_added
from pallas_kernels.xla.router import router as router
from pallas_kernels.xla.router import router_backward as router_backward
from pallas_kernels.xla.router import token_cutoffs as token_cutoffs

unsupported = router_unsupported = dispatch_unsupported = why_kernels_spill = contract.no_limit
decodes = contract.anything_compressed
fp8_multiple = 1
down_operands = up_operands = cast_weights = None
unrounded: Any = sys.modules[__name__]
in_fp8 = cache(partial(rounding_operands, sys.modules[__name__]))
transformable = True
overlaps = False
