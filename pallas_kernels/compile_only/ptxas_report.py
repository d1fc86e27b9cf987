"""The report of NVIDIA's assembler, ptxas, on each kernel that it assembles: registers, stack, spills."""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

_KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+?)(?:_mosaic_gpu_kernel)?' for.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


class KernelReport(NamedTuple):
    """The report on one kernel.

    Attributes:
      name: the kernel's, as in profiles.
      registers: how many a thread has.
      stack_bytes: size of a thread's stack frame.
      spill_store_bytes: bytes written to memory for want of registers, summed over the spilling instructions.
      spill_load_bytes: read back, likewise.
    """

    name: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int

    @property
    def spill_bytes(self) -> int:
        return self.spill_store_bytes + self.spill_load_bytes


def parse_ptxas_report(text: str) -> list[KernelReport]:
    """The kernels in what `ptxas -v` printed, in its order."""
    numbers = ("registers", "stack", "stores", "loads")
    return [KernelReport(found["name"], *(int(found[n]) for n in numbers)) for found in _KERNEL.finditer(text)]


@contextmanager
def captured_ptxas_report() -> Iterator[list[KernelReport]]:
    """A list that holds, after the block, the kernels whose report appeared on standard output inside it.

    The report comes from native code, so it is the process's file descriptor that is turned away for a while, and not
    `sys.stdout`.
    """
    kernels: list[KernelReport] = []
    sys.stdout.flush()
    with tempfile.TemporaryFile() as capture:
        before = os.dup(1)
        os.dup2(capture.fileno(), 1)
        try:
            yield kernels
        finally:
            sys.stdout.flush()
            os.dup2(before, 1)
            os.close(before)
            capture.seek(0)
            kernels += parse_ptxas_report(capture.read().decode(errors="replace"))
