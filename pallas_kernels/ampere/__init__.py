"""Kernels on what all NVIDIA GPUs since Ampere share: `mma.sync`, `ldmatrix` and `cp.async`. Not complete yet.

They are written per thread, in the language of `pallas_kernels.simt`, whose interpreter runs them and finds races. The
alternative was values of Pallas, multiplied by `plgpu.mma`. A tile of one stage without any gather was compiled in that
form (jax 0.11.2): it took 180 registers on the A100 and 170 on the H200 with 64 accumulators in each thread, because
all fragments of a step are alive at once, and 227 with 128 accumulators on the H200. In that form `commit_smem` does
not compile below 9.0; no barrier of a block's warps stands between shared memory's writers and readers; and gathered
rows would have been inline code all the same. What the kernels here take is in `docs/performance.md`.
"""

from pallas_kernels.ampere.down_projection import down_projection
from pallas_kernels.ampere.up_projection import up_projection
from pallas_kernels.simt.dispatch import dispatch

__all__ = ["dispatch", "down_projection", "up_projection"]
