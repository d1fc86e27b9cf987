"""The machine of `simt` that is numpy: all threads of all blocks in lockstep, with masks, and with race detection.

A value is an array with one entry per thread of the launch, or with a single one that holds for all. Lockstep is one
of the many orders in which a GPU may run the threads; whether another order could give another result is what the
race detector answers.
"""

from contextlib import contextmanager
from typing import NamedTuple

import jax
import numpy as np
from jax.core import Tracer

WARP = 32
_WARPGROUP = 128


class RaceError(RuntimeError):
    """Two threads touched a word, one of them to write it, and no barrier between them says which came first."""


def kernel(run, *, name, outputs, blocks, warpgroups, shared, updated):
    """The launcher of a kernel whose threads do `run(machine, pointers)`; see `simt.simt_kernel`."""

    def call(*inputs):
        # Changed inputs always get memory of their own: what a kernel forgets to copy is found missing.
        changed = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in inputs[len(inputs) - updated :]]

        def interpret(*inputs):
            threads = Threads(name, blocks, warpgroups * _WARPGROUP)
            arrays = [np.asarray(a) for a in inputs]
            results = [np.zeros(o.shape, o.dtype) for o in (*changed, *outputs)]
            memories = [Memory(threads, f"argument {i}", a.reshape(-1)) for i, a in enumerate(arrays)]
            memories += [Memory(threads, f"output {i}", a.reshape(-1), empty=True) for i, a in enumerate(results)]
            for i, size in enumerate(shared):
                words = np.zeros(blocks * size, np.int32)
                memories.append(Memory(threads, f"shared array {i}", words, shared=True, empty=True))
            with np.errstate(all="ignore"):
                run(threads, [_Pointer(memory, memory.kind, np.zeros(1, np.int64)) for memory in memories])
            return results

        if any(isinstance(a, Tracer) for a in inputs):
            return jax.pure_callback(interpret, [*changed, *outputs], *inputs, vmap_method="sequential")
        return [jax.numpy.asarray(a) for a in interpret(*inputs)]

    return call


_CONFLICTS = {"read": ("write", "add"), "write": ("read", "write", "add"), "add": ("read", "write")}


class _Access(NamedTuple):
    """Who last read a word (or wrote it, or added to it atomically), of those that no barrier has put in the past.

    Attributes:
      thread: one of them, -1 for nobody.
      reach: how far they are apart: 0 for that thread alone, 1 for threads of its warp, 2 of its block, 3 of several.
      block_barriers: that the block had passed.
      warp_barriers: that the warp had passed.
    """

    thread: np.ndarray
    reach: np.ndarray
    block_barriers: np.ndarray
    warp_barriers: np.ndarray

    @classmethod
    def of_nobody(cls, words: int) -> "_Access":
        return cls(*(np.full(words, -1, np.int32) for _ in cls._fields))


class Memory:
    """An array in device memory, or one for each block in shared memory, and who touched each of its words."""

    def __init__(self, threads: "Threads", name: str, array: np.ndarray, *, shared=False, empty=False):
        self.threads, self.name, self.array, self.shared = threads, name, array, shared
        self.kind = array.dtype.name
        self.size = array.size // threads.blocks if shared else array.size
        self.accesses = {kind: _Access.of_nobody(array.size) for kind in ("read", "write", "add")}
        self.filled = np.full(array.size, not empty)
        self.first, self.last = np.zeros((2, array.size), np.int32)

    def touch(self, kind: str, index: np.ndarray, count: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """The active threads and the words `(threads, count)` they touch, after a check of both."""
        active = np.flatnonzero(self.threads.active)
        index = np.broadcast_to(index, self.threads.active.shape)[active]
        wrong = (index < 0) | (index > self.size - count) | (index % count != 0)
        if wrong.any():
            where, thread = index[wrong][0], self.threads.describe(active[wrong][0])
            raise IndexError(f"{self._name(where)}, {count} at a time of {self.size}, touched by {thread}")
        if self.shared:
            index = index + active // self.threads.per_block * self.size
        words = index[:, None] + np.arange(count)
        if kind != "write" and not self.filled[words].all():
            raise RaceError(
                f"{self._name(words[~self.filled[words]][0] % self.size)} is read, but nobody has written it"
            )
        self.filled[words] = True
        self._check(kind, words.reshape(-1), np.repeat(active, count).astype(np.int32))
        return active, words

    def _check(self, kind, words, threads):
        # Of the threads that touch a word now, the first and the last: an assignment's last value wins.
        self.last[words], self.first[words[::-1]] = threads, threads[::-1]
        first = self.first[words]
        reach = self.threads.reach(first, self.last[words])
        if kind == "write" and reach.any():
            self._fail(kind, kind, words, first, self.last[words], reach > 0)
        for other in _CONFLICTS[kind]:
            access = self.accesses[other]
            met, joined = self._join(access, words, first, reach)
            self._fail(other, kind, words, access.thread[words], self.last[words], met & (joined > 0))
        access = self.accesses[kind]
        met, joined = self._join(access, words, first, reach)
        access.thread[words] = first
        access.reach[words] = np.where(met, joined, reach)
        access.block_barriers[words] = self.threads.block_barriers[first // self.threads.per_block]
        access.warp_barriers[words] = self.threads.warp_barriers[first // WARP]

    def _join(self, access: _Access, words, first, reach):
        """Whether no barrier lies between the former accesses and these, and the reach of both together."""
        past, threads = access.thread[words], self.threads
        joined = np.maximum(np.maximum(access.reach[words], reach), threads.reach(past, first))
        same_block = access.block_barriers[words] == threads.block_barriers[first // threads.per_block]
        same_warp = access.warp_barriers[words] == threads.warp_barriers[first // WARP]
        met = (past >= 0) & ((joined == 3) | same_block & ((joined == 2) | same_warp))
        return met, joined

    def _fail(self, one, other, words, a, b, wrong):
        if wrong.any():
            i = np.flatnonzero(wrong)[0]
            a, b = self.threads.describe(a[i]), self.threads.describe(b[i])
            where = self._name(words[i] % self.size)
            raise RaceError(f"{where}: {one} by {a} (or others) and {other} by {b}, with no barrier between them")

    def _name(self, index) -> str:
        return f"{self.threads.name}: {self.name}, word {index}"


class _Pointer(NamedTuple):
    """Where in a memory each thread's index 0 is."""

    memory: Memory
    kind: str
    start: np.ndarray


def _unsigned(function):
    def apply(a, b):
        return function(a.view(np.uint32), b.view(np.uint32)).astype(np.uint32).view(np.int32)

    return apply


def _add_floats(a, b):
    out = a + b
    return np.where(np.isnan(out), np.uint32(0x7FFFFFFF).view(np.float32), out)  # the only NaN a GPU adds up to


class Integers:
    add, subtract, multiply = np.add, np.subtract, np.multiply
    divide, remainder = _unsigned(np.floor_divide), _unsigned(np.remainder)
    bit_and, bit_or, bit_xor = np.bitwise_and, np.bitwise_or, np.bitwise_xor
    shift_left, shift_right = np.left_shift, np.right_shift
    minimum, maximum = np.minimum, np.maximum
    equal, less, less_or_equal = np.equal, np.less, np.less_equal
    greater, greater_or_equal = np.greater, np.greater_equal


class Floats:
    add, subtract, multiply, maximum = _add_floats, np.subtract, np.multiply, np.maximum
    equal, greater = np.equal, np.greater


class Threads:
    """All threads of a launch, of which those in `active` follow the current instruction."""

    integers, floats = Integers, Floats
    exp2, log2, reciprocal = np.exp2, np.log2, np.reciprocal

    def __init__(self, name: str, blocks: int, per_block: int):
        self.name, self.blocks, self.per_block = name, blocks, per_block
        self.index = np.arange(blocks * per_block, dtype=np.int32)
        self.lane = self.index % WARP
        self.active = np.ones(self.index.size, bool)
        self.block_barriers = np.zeros(blocks, np.int32)
        self.warp_barriers = np.zeros(self.index.size // WARP, np.int32)

    def describe(self, thread) -> str:
        return f"thread {thread % self.per_block} of block {thread // self.per_block}"

    def reach(self, a, b):
        """How far threads are apart, as in `_Access`."""
        return (
            (a != b).astype(np.int32)
            + (a // WARP != b // WARP).astype(np.int32)
            + (a // self.per_block != b // self.per_block).astype(np.int32)
        )

    def constant(self, kind, x):
        if kind in ("int32", "int64"):
            bits = np.dtype(kind).itemsize * 8
            x = (int(x) + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))
        return np.array([x], kind)

    def multiply_add(self, a, b, c):
        return (a.astype(np.float64) * b + c).astype(np.float32)

    def bits_as(self, kind, x):
        return x.view(kind)

    def to_float(self, x):
        return x.astype(np.float32)

    def to_long(self, x):
        return x.view(np.uint32).astype(np.int64)

    def convert_vector(self, kind, x):
        return x.astype(np.dtype(kind))

    def select(self, condition, a, b):
        return np.where(condition[:, None] if a.ndim == 2 else condition, a, b)

    def zero_vector(self, kind, size):
        return np.zeros((1, size), np.dtype(kind))

    def broadcast(self, x, size):
        return np.broadcast_to(x[:, None], (x.size, size))

    def element(self, x, i):
        return np.ascontiguousarray(x[:, i])

    def is_same(self, pointer: _Pointer, other: _Pointer):
        return np.full(1, pointer.memory is other.memory)

    def offset(self, pointer: _Pointer, index):
        return pointer._replace(start=pointer.start + index)

    def load(self, pointer: _Pointer, index):
        return self.load_vector(pointer, index, 1)[:, 0].copy()

    def load_vector(self, pointer: _Pointer, index, size):
        active, words = pointer.memory.touch("read", pointer.start + index, size)
        out = np.zeros((self.index.size, size), pointer.memory.array.dtype)
        out[active] = pointer.memory.array[words]
        return out

    def store(self, pointer: _Pointer, index, x):
        self.store_vector(pointer, index, x[:, None], 1)

    def store_vector(self, pointer: _Pointer, index, x, size):
        active, words = pointer.memory.touch("write", pointer.start + index, size)
        pointer.memory.array[words] = np.broadcast_to(x, (self.index.size, size))[active]

    def atomic_add(self, pointer: _Pointer, index, x):
        active, words = pointer.memory.touch("add", pointer.start + index)
        np.add.at(pointer.memory.array, words[:, 0], np.broadcast_to(x, self.index.shape)[active])

    @contextmanager
    def where(self, condition):
        before = self.active
        self.active = before & condition
        yield
        self.active = before

    def branch(self, condition, body, otherwise):
        with self.where(condition):
            taken = self.active
            out = body() if taken.any() else otherwise
        return [self.select(taken, a, b) for a, b in zip(out, otherwise, strict=True)]

    def indices(self, start, stop, step):
        i = np.broadcast_to(start, self.index.shape)
        while (self.active & (i < stop)).any():
            with self.where(i < stop):
                yield i
            i = np.where(i < stop, i + step, i)

    def loop(self, start, stop, step, body, carry):
        carry = [np.broadcast_to(c, self.index.shape) for c in carry]
        for i in self.indices(start, stop, step):
            carry = [np.where(self.active, a, b) for a, b in zip(body(i, *carry), carry, strict=True)]
        return carry

    def thread(self):
        return self.index % self.per_block

    def warp(self):
        return self._lanes(self.thread() // WARP).reshape(-1)  # a GPU shuffles to have it the same in the whole warp

    def block(self):
        return self.index // self.per_block

    def block_barrier(self):
        self.block_barriers[self._whole(self.per_block, "a block's barrier")] += 1

    def warp_barrier(self):
        self.warp_barriers[self._whole(WARP, "a warp's barrier")] += 1

    def _whole(self, size, operation) -> np.ndarray:
        """Which groups of `size` threads are active, each as a whole."""
        groups = self.active.reshape(-1, size)
        torn = groups.any(1) & ~groups.all(1)
        if torn.any():
            missing = np.flatnonzero(torn)[0] * size + np.flatnonzero(~groups[torn][0])[0]
            raise RaceError(f"{self.name}: {operation} that {self.describe(missing)} does not reach")
        return groups.all(1)

    def _lanes(self, x) -> np.ndarray:
        """`x` as (warps, 32), for an operation that whole warps must take part in."""
        self._whole(WARP, "an operation of a warp")
        return np.broadcast_to(x, self.index.shape).reshape(-1, WARP)

    def _bits(self, lanes) -> np.ndarray:
        """Masks of lanes from (..., 32) truth values."""
        return (lanes.astype(np.uint32) << np.arange(WARP, dtype=np.uint32)).sum(-1, dtype=np.uint32).view(np.int32)

    def ballot(self, x):
        return np.repeat(self._bits(self._lanes(x)), WARP)

    def warp_maximum(self, x):
        return np.repeat(self._lanes(x).max(1), WARP)

    def shuffle(self, x, lane):
        source = np.where((lane >= 0) & (lane < WARP), lane, self.lane) + self.index - self.lane
        return self._lanes(x).reshape(-1)[source]

    def shuffle_up(self, x, distance):
        return self.shuffle(x, self.lane - distance)

    def shuffle_xor(self, x, mask):
        return self.shuffle(x, self.lane ^ mask)

    def count_bits(self, x):
        return np.bitwise_count(x.view(np.uint32)).astype(np.int32)

    def permute_bytes(self, x, order):
        return np.ascontiguousarray(x).view(np.uint8).reshape(-1, 4)[:, order].copy().view(np.int32)[:, 0]
