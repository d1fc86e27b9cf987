"""Kernels are assembled in threads while jax still lowers the program around them.

XLA assembles the Mosaic kernels of a program one after the other, a second each, once all of it is lowered. A process
keeps what it has assembled, so a kernel that was compiled in a small program of its own is ready when XLA comes to it.
"""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import jax

from pallas_kernels.compat import LoweredKernel, when_a_kernel_is_lowered

_assembled: dict[bytes, Future] = {}


def assemble_early() -> None:
    """From now on, each Mosaic GPU kernel that jax lowers for a device is assembled at once."""
    when_a_kernel_is_lowered(_begin)


def wait_for_assembly() -> None:
    """Returns when every kernel that was begun is assembled.

    Raises:
      Exception: whatever an assembly raised, which the compilation of the program around the kernel will raise again.
    """
    for future in list(_assembled.values()):
        future.result()


def _begin(kernel: LoweredKernel) -> None:
    name = kernel.attributes["kernel_hash"]
    if name in _assembled or "MOSAIC_GPU_DUMP_PTXAS" in os.environ:  # the assembler's reports keep the program's order
        return
    _assembled[name] = _threads().submit(_compile, kernel)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="assembly")  # as many as there are cores, at most 32


def _compile(kernel: LoweredKernel) -> None:
    placement = jax.sharding.SingleDeviceSharding(kernel.device)
    operands = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=placement) for a in kernel.operands]

    def program(*arrays):
        call = jax.ffi.ffi_call(kernel.target, kernel.results, has_side_effect=True)
        return call(*arrays, **kernel.attributes)

    jax.jit(program).lower(*operands).compile()
