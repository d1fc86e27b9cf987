"""Threads: a kernel's launch, branches and loops, barriers, and what the 32 lanes of a warp tell each other."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from pallas_kernels.mosaic.interpreter import is_interpreted
from pallas_kernels.simt import code, interpreter
from pallas_kernels.simt.values import WARP, Bool, Float, Int, Pointer, Value, machine, running, select


def kernel(
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
      name: what profiles call the kernel.
      outputs: shapes and dtypes of results, int32, float32, bfloat16 or float16.
      blocks: the grid's size.
      warpgroups: how many a block has, of 128 threads each.
      shared: sizes of int32 arrays in shared memory.
      updated: how many of the last inputs come back changed, as the first outputs, in their own memory if XLA can do
        so without a copy; see `Pointer.is_same`.
    """

    def call(*inputs):
        changed = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in inputs[len(inputs) - updated :]]
        results = [*changed, *outputs]
        operands = jax.tree.structure((*inputs, *results, *shared))

        def run(machine, pointers):
            token = running.set(machine)
            try:
                body(*operands.unflatten(map(Pointer, pointers)))
            finally:
                running.reset(token)

        out = (interpreter if is_interpreted() else code).launch(
            run,
            jax.tree.leaves(inputs),
            name=name,
            results=jax.tree.leaves(results),
            blocks=blocks,
            warpgroups=warpgroups,
            shared=jax.tree.leaves(shared),
            updated=updated,
        )
        return jax.tree.structure(results).unflatten(out)

    return call


@contextmanager
def when(condition: Bool) -> Iterator[None]:
    """A context for the threads where the condition holds."""
    with machine().where(condition.value):
        yield


def branch(condition: Bool, body: Callable, otherwise: Sequence) -> list:
    """Takes a branch: what `body()` returns in the threads where the condition holds, `otherwise` in the others."""

    def taken():
        return [v.value for v in body()]

    out = machine().branch(condition.value, taken, [v.value for v in otherwise])
    return [v.of_same_type(x) for v, x in zip(otherwise, out, strict=True)]


def indices(start, stop, step) -> Iterator[Int]:
    """Numbers from `start` below `stop`, for `for`, which must not be left early: each thread makes its own turns."""
    for i in machine().indices(Int(start).value, Int(stop).value, Int(step).value):
        yield Int(i)


def loop(start, stop, step, body: Callable, carry: Sequence) -> list:
    """Repeats `carry = body(i, *carry)` for each `i` of `indices(start, stop, step)`, and returns the last `carry`."""
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
    """Index of the block in the grid."""
    return Int(machine().block())


def block_barrier() -> None:
    """Waits for all threads of the block, which then see what each has written."""
    machine().block_barrier()


def warp_barrier() -> None:
    """Waits for all lanes of the warp, which then see what each has written."""
    machine().warp_barrier()


def lanes_with_equal_bits(x: Int, bits: int) -> Int:
    """Bit mask of the warp's lanes whose last few bits are the same.

    Found bit by bit, which is faster than the instruction for it: there, lanes wait for other values' turn.
    """
    same = Int(-1)
    for bit in range(bits):
        mine = (x >> bit) & 1
        same = same & (lanes_where(mine.equals(1)) ^ (mine - 1))
    return same


def lanes_where(x: Bool) -> Int:
    """Bit mask of the warp's lanes where the condition holds."""
    return Int(machine().ballot(x.value))


def warp_maximum(x: Int) -> Int:
    """The largest value of the warp, in all its lanes."""
    return Int(machine().warp_maximum(x.value))


def shuffle(x: Any, lane) -> Any:
    """The value of another lane."""
    if isinstance(x, Float):
        return shuffle(x.bits(), lane).as_float()
    return Int(machine().shuffle(x.value, Int(lane).value))


def shuffle_up(x: Int, distance) -> Int:
    """The value of the lane so many before this one; its own where there is none."""
    return Int(machine().shuffle_up(x.value, Int(distance).value))


def shuffle_xor(x: Any, mask) -> Any:
    """The value of the lane whose number is this one's `^ mask`."""
    if isinstance(x, Float):
        return shuffle_xor(x.bits(), mask).as_float()
    return Int(machine().shuffle_xor(x.value, Int(mask).value))


def transposed_words(words: Sequence[Int], quad: Int) -> list[Int]:
    """Word j of lane i of four neighbours becomes word i of lane j; `quad` is the lane's number among them."""
    words = list(words)
    for bit in (1, 2):
        upper = (quad & bit).equals(bit)
        for i in range(4):
            if not i & bit:
                low, high = words[i], words[i + bit]
                other = shuffle_xor(select(upper, low, high), bit)
                words[i], words[i + bit] = select(upper, other, low), select(upper, high, other)
    return words


def combine_lanes(operation: Callable, x, group: int, start: int = 1):
    """`x` combined by `operation` over each group of lanes, a power of two, the same in all of them.

    From `start` on: lanes nearer than that already hold the same.
    """
    while start < group:
        x = operation(x, shuffle_xor(x, start))
        start *= 2
    return x


def exclusive_warp_sum(x: Int, lane: Int) -> tuple[Int, Int]:
    """Sum of `x` over the lanes before this one, and over all lanes."""
    running = x
    for distance in (1, 2, 4, 8, 16):
        neighbour = shuffle_up(running, distance)
        running = running + select(lane >= distance, neighbour, 0)
    return running - x, shuffle(running, WARP - 1)
