"""Code with one value per CUDA thread, for kernels that are about single numbers and not about tiles.

Scalars and short vectors with operators, typed pointers, loops, and the warp operations that Pallas has no words for.
A body written in terms of this module, `values` and `warp` runs on two machines: `code` makes it a Hopper kernel, and
inside `interpreted()`, `interpreter` runs it in numpy on any CPU and looks for races.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax

from pallas_kernels.mosaic.interpreter import interpreted as interpreted
from pallas_kernels.mosaic.interpreter import is_interpreted
from pallas_kernels.simt import code, interpreter
from pallas_kernels.simt.values import Bool, Int, Pointer, Value, machine, running


def simt_kernel(
    body: Callable,
    *,
    name: str,
    outputs: Sequence = (),
    blocks: int,
    warpgroups: int,
    shared: Sequence = (),
    updated: int = 0,
) -> Callable[..., list]:
    """A kernel whose body `body(*inputs, *outputs, *shared)` runs in every thread, on pointers.

    Any of these may be None or a tuple of others, of which the body gets the like.

    Args:
      body: what a thread does.
      name: of the kernel in profiles.
      outputs: results, of int32, float32, bfloat16 or float16.
      blocks: of the grid.
      warpgroups: of 128 threads per block.
      shared: sizes of int32 arrays in shared memory.
      updated: so many of the last inputs come back changed, as the first outputs, in their own memory if XLA can do
        so without a copy; see `Pointer.is_same`.
    """

    def call(*inputs):
        changed = inputs[len(inputs) - updated :]
        operands = jax.tree.structure((*inputs, *changed, *outputs, *shared))

        def run(machine, pointers):
            token = running.set(machine)
            try:
                body(*operands.unflatten(map(Pointer, pointers)))
            finally:
                running.reset(token)

        kernel = (interpreter if is_interpreted() else code).kernel(
            run,
            name=name,
            outputs=jax.tree.leaves(outputs),
            blocks=blocks,
            warpgroups=warpgroups,
            shared=jax.tree.leaves(shared),
            updated=updated,
        )
        return jax.tree.structure([*changed, *outputs]).unflatten(kernel(*jax.tree.leaves(inputs)))

    return call


@contextmanager
def when(condition: Bool) -> Iterator[None]:
    """A context for the threads where the condition holds."""
    with machine().where(condition.value):
        yield


def branch(condition: Bool, body: Callable, otherwise: Sequence) -> list:
    """What `body()` returns in the threads where the condition holds, `otherwise` in the others: a branch taken."""

    def taken():
        return [v.value for v in body()]

    out = machine().branch(condition.value, taken, [v.value for v in otherwise])
    return [v.of_same_type(x) for v, x in zip(otherwise, out, strict=True)]


def indices(start, stop, step) -> Iterator[Int]:
    """From `start` below `stop`, for `for`, whose block must not be left early: each thread makes its own turns."""
    for i in machine().indices(Int(start).value, Int(stop).value, Int(step).value):
        yield Int(i)


def loop(start, stop, step, body: Callable, carry: Sequence) -> list:
    """The same where a turn goes on from the one before: `carry = body(i, *carry)`."""
    carry = [c if isinstance(c, Value) else Int(c) for c in carry]

    def once(i, *values):
        out = body(Int(i), *(c.of_same_type(v) for c, v in zip(carry, values, strict=True)))
        return [c.of_same_type(v).value for c, v in zip(carry, out, strict=True)]

    out = machine().loop(Int(start).value, Int(stop).value, Int(step).value, once, [c.value for c in carry])
    return [c.of_same_type(v) for c, v in zip(carry, out, strict=True)]


def clear(array: Pointer, size: int, threads: int) -> None:
    """Zeroes an array together with the block's other threads, and waits for them."""
    for i in indices(thread(), size, threads):
        array[i] = 0
    block_barrier()


def thread() -> Int:
    """Index of the thread in its block."""
    return Int(machine().thread())


def warp() -> Int:
    """Index of the warp in its block, known to the compiler to be the same for the whole warp.

    All the warp's lanes must ask for it together: a GPU waits for those that do not.
    """
    return Int(machine().warp())


def block() -> Int:
    return Int(machine().block())


def block_barrier() -> None:
    machine().block_barrier()


def warp_barrier() -> None:
    machine().warp_barrier()
