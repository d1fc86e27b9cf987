"""Launches of kernels written in Pallas Mosaic GPU.

Results take the memory of operands, and are right also where XLA does not let them. `plgpu.kernel` writes in place
through a `jax.Ref`: the kernel then has one pointer, the operand's, and trusts XLA that the result is there. XLA's
fusion of slices into launches breaks that: given a slice of a stacked array, as in a scan over layers, it hands over
the stack itself and takes the result from fresh memory that nobody wrote (jaxlib 0.11.2 and 0.12.0). So these kernels
have both pointers, read from the operand and write to the result, wherever that is. Those that leave part of it as it
was, or add to it, need the memory itself; who calls them keeps slices away from them by a barrier.

Kernels are assembled in threads while jax still lowers the program around them: XLA assembles those of a program one
after the other, a second each, once all of it is lowered. A process keeps what it has assembled, so a kernel that was
compiled in a small program of its own is ready when XLA comes to it.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from threading import BoundedSemaphore, Thread, main_thread
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import kernel_launch, launch_with_aliases
from pallas_kernels.mosaic.interpreter import interpreter_parameters, is_interpreted


def kernel(
    body: Callable,
    *,
    in_place: Mapping[int, int],
    out_type,
    scratch_types=(),
    compiler_params: plgpu.CompilerParams,
    **mesh,
) -> Callable:
    """`plgpu.kernel`, where result `in_place[i]` takes the memory of operand `i` if XLA can do so without a copy.

    Both are arrays, or pytrees of as many. Inside the kernel whole numbers have 32 bits, also where the caller has
    `jax_enable_x64` on.
    """

    def with_scratch(*refs):
        pl.run_scoped(partial(body, *refs), *scratch_types, collective_axes=mesh["thread_name"])

    def launch(*operands):
        with jax.enable_x64(False):
            if not in_place:
                options = {"scratch_types": scratch_types, "compiler_params": compiler_params}
                return plgpu.kernel(body, out_type=out_type, **options, **mesh)(*operands)
            aliases, before, after = {}, _numbered(operands), _numbered(tuple(out_type))
            for operand, result in in_place.items():
                jax.tree.map(aliases.__setitem__, before[operand], after[result])
            return launch_with_aliases(
                [(plgpu.Mesh(**mesh), with_scratch)],
                out_type,
                input_output_aliases=aliases,
                compiler_params=compiler_params,
                interpret=interpreter_parameters(),
                name=body.__name__,
            )(*operands)

    return kernel_launch(launch, None if is_interpreted() else assemble_early)


def _numbered(trees: tuple) -> tuple:
    """The number of each leaf among all of them, in its place."""
    structure = jax.tree.structure(trees)
    return structure.unflatten(range(structure.num_leaves))


ASSEMBLY = "assembly"
"""The name of the threads that assemble kernels."""

begun: set[bytes] = set()
"""Hashes of the kernels whose assembly has begun; XLA keeps what was assembled."""

_waiting: deque[tuple[bytes, Callable[[], Any]]] = deque()
_free = BoundedSemaphore(os.cpu_count() or 1)  # threads that may still be started


def assemble_early(name: bytes, compile_alone: Callable[[], Any]) -> None:
    """Begins to assemble the kernel of that hash, unless that was done before."""
    if name in begun or "MOSAIC_GPU_DUMP_PTXAS" in os.environ:  # the assembler's reports keep the program's order
        return
    begun.add(name)
    _waiting.append((name, compile_alone))
    if _free.acquire(blocking=False):
        Thread(target=_assemble, name=ASSEMBLY).start()


def _assemble() -> None:
    """Assembles what waits. At the program's end Python waits for the kernel in hand, and no other is begun."""
    try:
        while _waiting and main_thread().is_alive():
            name, compile_alone = _waiting.popleft()
            try:
                compile_alone()
            except Exception:  # XLA raises it again, with the program that the kernel is in
                begun.discard(name)
                logging.getLogger(__name__).debug("early assembly failed", exc_info=True)
    except IndexError:  # another thread took the last one
        pass
    finally:
        _free.release()
