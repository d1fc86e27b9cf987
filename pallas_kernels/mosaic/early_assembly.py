"""Kernels are assembled in threads while jax still lowers the program around them.

XLA assembles the Mosaic kernels of a program one after the other, a second each, once all of it is lowered. A process
keeps what it has assembled, so a kernel that was compiled in a small program of its own is ready when XLA comes to it.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

begun: dict[bytes, Future] = {}
"""The assembly of each kernel, by its hash."""


def assemble_early(name: bytes, compile_alone: Callable[[], Any]) -> None:
    """Begins to assemble the kernel of that hash, unless that was done before."""
    if name in begun or "MOSAIC_GPU_DUMP_PTXAS" in os.environ:  # the assembler's reports keep the program's order
        return
    begun[name] = _threads().submit(compile_alone)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="assembly")  # as many as there are cores, at most 32
