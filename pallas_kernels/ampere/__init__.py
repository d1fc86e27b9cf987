"""Kernels on what all NVIDIA GPUs since Ampere share: `mma.sync`, `ldmatrix` and `cp.async`. Not complete yet.

They are written per thread, in the language of `pallas_kernels.simt`, whose interpreter runs them and finds races.
`docs/performance.md` says why, and what registers they take.
"""

from pallas_kernels.ampere.down_projection import down_projection
from pallas_kernels.ampere.up_projection import up_projection
from pallas_kernels.simt.dispatch import dispatch

__all__ = ["dispatch", "down_projection", "up_projection"]
