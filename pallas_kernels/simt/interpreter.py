"""The machine of `simt` that is numpy: all threads of all blocks in lockstep, with masks, and with race detection.

A value is an array with one entry per thread of the launch, or with a single one that holds for all. Lockstep is one of
the many orders in which a GPU may run threads. Another order could give another result where two threads touch a word,
one of them to write it, and no barrier lies between: that is an error.

The words of a copy count as written when it is started and again when its thread has waited for it; in between they
hold nothing, so that whoever reads them too early is found.
"""

from contextlib import contextmanager
from threading import Lock
from typing import NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from scipy import special

from pallas_kernels.compat import kernel_launch
from pallas_kernels.simt.values import WARP

_ONE_AT_A_TIME = Lock()  # device: the body of a kernel may keep what belongs to one
_TF32 = np.int32(-1 << 13)  # the bits that tensor cores read
_CONFLICTS = {"read": ("write", "add"), "write": ("read", "write", "add"), "add": ("read", "write")}


def launch(run, inputs, *, name, results, blocks, warpgroups, shared, updated):
    """Results of a kernel whose threads do `run(machine, pointers)`; see `threads.kernel`."""

    def interpret(*inputs):
        threads = Numpy(name, blocks, warpgroups * 128)
        # Changed inputs always get memory of their own: what a kernel forgets to copy is found missing.
        arrays, written = [np.asarray(a) for a in inputs], [np.zeros(o.shape, o.dtype) for o in results]
        memories = [Memory(threads, f"argument {i}", a.reshape(-1)) for i, a in enumerate(arrays)]
        memories += [Memory(threads, f"output {i}", a.reshape(-1), empty=True) for i, a in enumerate(written)]
        # On a GPU an input and what it changes to may be one memory, in which threads race.
        for after in range(len(inputs), len(inputs) + updated):
            memories[after].accesses = memories[after - updated].accesses
        for i, size in enumerate(shared):
            words = np.zeros(blocks * size, np.int32)
            memories.append(Memory(threads, f"shared array {i}", words, shared=True, empty=True))
        with _ONE_AT_A_TIME, np.errstate(all="ignore"):
            run(threads, [_Pointer(memory, memory.array.dtype.name, np.zeros(1, np.int64)) for memory in memories])
        return written

    def call(*inputs):
        if any(isinstance(a, Tracer) for a in inputs):
            return jax.pure_callback(interpret, results, *inputs, vmap_method="sequential")
        return [jax.numpy.asarray(a) for a in interpret(*inputs)]

    return kernel_launch(call)(*inputs)


class RaceError(RuntimeError):
    """Two threads touched a word, one of them to write it, and no barrier between them says which came first."""


class Memory:
    """An array in device memory, or one for each block in shared memory, and who touched each of its words.

    Attributes:
      accesses: for reads, writes and atomic adds, of those to each word that no barrier has put in the past: the lowest
        thread, -1 for nobody, the highest one, and when the last was.
      filled: which words somebody has written.
    """

    def __init__(self, threads: "Numpy", name: str, array: np.ndarray, *, shared=False, empty=False):
        self.threads, self.name, self.array, self.shared = threads, f"{threads.name}: {name}", array, shared
        self.size = array.size // threads.blocks if shared else array.size
        self.accesses = {kind: np.full((3, array.size), -1, np.int32) for kind in _CONFLICTS}
        self.filled = np.full(array.size, not empty)
        self.lowest, self.highest = np.zeros((2, array.size), np.int32)  # threads of the access at hand

    def touch(self, kind: str, index: np.ndarray, count: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """The active threads and the words `(threads, count)` they touch, after a check of both."""
        active = np.flatnonzero(self.threads.active)
        index = np.broadcast_to(index, self.threads.active.shape)[active]
        wrong = (index < 0) | (index > self.size - count) | (index % count != 0)
        if wrong.any():
            word, thread = index[wrong][0], self.threads.describe(active[wrong][0])
            raise IndexError(f"{self.name}, word {word}, {count} at a time of {self.size}, touched by {thread}")
        if self.shared:
            index = index + active // self.threads.per_block * self.size
        words = index[:, None] + np.arange(count)
        if kind != "write" and not self.filled[words].all():
            word = words[~self.filled[words]][0] % self.size
            raise RaceError(f"{self.name}, word {word} is read, but nobody has written it")
        self.filled[words] = True
        self._check(kind, words.reshape(-1), np.repeat(active, count).astype(np.int32))
        return active, words

    def _check(self, kind, words, threads):
        # Threads are in order, and an assignment's last value wins.
        self.highest[words], self.lowest[words[::-1]] = threads, threads[::-1]
        low, high = self.lowest[words], self.highest[words]
        if kind == "write":
            self._fail(kind, kind, words, (low, high), (low, high), low < high)
        for other in _CONFLICTS[kind]:
            unordered, first, last = self._join(other, words, low, high)
            former_low, former_high, _ = self.accesses[other][:, words]
            self._fail(other, kind, words, (former_low, former_high), (low, high), unordered & (first < last))
        unordered, first, last = self._join(kind, words, low, high)
        now = np.full_like(low, self.threads.time)
        self.accesses[kind][:, words] = np.where(unordered, first, low), np.where(unordered, last, high), now

    def _join(self, kind, words, low, high):
        """Whether no barrier lies between former accesses and those of `low` to `high`, and the ends of both together.

        Threads of several blocks meet at no barrier; those of a block, or of a warp, at its own.
        """
        former_low, former_high, time = self.accesses[kind][:, words]
        first, last, threads = np.minimum(former_low, low), np.maximum(former_high, high), self.threads
        of_block = np.where(first // threads.per_block == last // threads.per_block, threads.block_barrier_at[last], 0)
        barrier = np.where(first // WARP == last // WARP, threads.warp_barrier_at[last], of_block)
        return (former_low >= 0) & (time >= barrier), first, last

    def _fail(self, one, other, words, former, now, wrong):
        if wrong.any():
            i = np.flatnonzero(wrong)[0]
            differ = [(a[i], b[i]) for a in former for b in reversed(now) if a[i] != b[i]]
            a, b = map(self.threads.describe, differ[0])
            where = f"{self.name}, word {words[i] % self.size}"
            raise RaceError(f"{where}: {one} by {a} (or others) and {other} by {b}, with no barrier between them")


class _Pointer(NamedTuple):
    """A memory, and where in it each thread's index 0 is."""

    memory: Memory
    kind: str
    start: np.ndarray


class _Copy(NamedTuple):
    """A copy of each of some threads, and what they have yet to wait for.

    Attributes:
      pending: the threads that have not waited for it.
      group: each thread's number of its group.
      memory: where it goes.
      first: each thread's first word there.
      values: the words.
    """

    pending: np.ndarray
    group: np.ndarray
    memory: Memory
    first: np.ndarray
    values: np.ndarray


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


def _matrices(registers, kind) -> np.ndarray:
    """(warps, registers, 8, columns) numbers in float32 from a register in each lane for each matrix."""
    lanes = np.stack([r.reshape(-1, WARP) for r in registers], 1)  # (warps, registers, lanes), 4 bytes each
    lanes = lanes & _TF32 if kind == "float32" else lanes
    return np.ascontiguousarray(lanes).view(kind).reshape(*lanes.shape[:2], 8, -1).astype(np.float32)


class Numpy:
    """Computes; a value is a `np.ndarray`. Threads in `active` follow the current instruction.

    Attributes:
      time: barriers so far; `block_barrier_at` and `warp_barrier_at` have, for each thread, that of the last one that
        ordered its block, or its warp.
      groups: of copies, that each thread has committed; `copies` are those that some thread has yet to wait for.
    """

    integers, floats = Integers, Floats

    def __init__(self, name: str, blocks: int, per_block: int):
        self.name, self.blocks, self.per_block = name, blocks, per_block
        self.index = np.arange(blocks * per_block, dtype=np.int32)
        self.lane = self.index % WARP
        self.active = np.ones(self.index.size, bool)
        self.time = 0
        self.block_barrier_at, self.warp_barrier_at, self.groups = np.zeros((3, self.index.size), np.int32)
        self.copies = []

    def describe(self, thread) -> str:
        return f"thread {thread % self.per_block} of block {thread // self.per_block}"

    def whole(self, size: int, operation: str) -> None:
        """Checks that of each group of `size` threads all are active, or none."""
        groups = self.active.reshape(-1, size)
        torn = groups.any(1) & ~groups.all(1)
        if torn.any():
            missing = np.flatnonzero(torn)[0] * size + np.flatnonzero(~groups[torn][0])[0]
            raise RaceError(f"{self.name}: {operation} that {self.describe(missing)} does not reach")

    exp2, log2, reciprocal = np.exp2, np.log2, np.reciprocal

    def function(self, name, x):
        of = {"erf": special.erf, "rsqrt": lambda x: 1 / np.sqrt(x)}
        return (of.get(name) or getattr(np, name))(x).astype(np.float32)

    def constant(self, kind, x):
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

    def either_pointer(self, condition, pointer: _Pointer, otherwise: _Pointer):
        known = np.broadcast_to(condition, self.index.shape)[self.active]
        assert known.all() or not known.any(), f"{self.name}: threads choose different arrays"
        return pointer if known.any() else otherwise

    def offset(self, pointer: _Pointer, index):
        return pointer._replace(start=pointer.start + index)

    def load(self, pointer: _Pointer, index):
        return self.load_vector(pointer, index, 1)[:, 0].copy()

    def load_vector(self, pointer: _Pointer, index, size):
        active, words = pointer.memory.touch("read", pointer.start + index, size)
        out = np.zeros((self.index.size, size), pointer.memory.array.dtype)
        out[active] = pointer.memory.array[words]
        return out

    def load_word(self, pointer: _Pointer, index):
        return self.load_vector(pointer, index, 4 // pointer.memory.array.itemsize).view(np.int32)[:, 0].copy()

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
        carry = [np.broadcast_to(c, (self.index.size, *c.shape[1:])) for c in carry]
        for i in self.indices(start, stop, step):
            carry = [self.select(self.active, a, b) for a, b in zip(body(i, *carry), carry, strict=True)]
        return carry

    def thread(self):
        return self.index % self.per_block

    def warp(self):
        return self._lanes(self.thread() // WARP).reshape(-1)  # a GPU shuffles to have it the same in the whole warp

    def block(self):
        return self.index // self.per_block

    def block_barrier(self):
        self.whole(self.per_block, "a block's barrier")
        self.time += 1
        self.block_barrier_at[self.active] = self.warp_barrier_at[self.active] = self.time

    def warp_barrier(self):
        self.whole(WARP, "a warp's barrier")
        self.time += 1
        self.warp_barrier_at[self.active] = self.time

    def _lanes(self, x) -> np.ndarray:
        """`x` as (warps, 32), for an operation that whole warps must take part in."""
        self.whole(WARP, "an operation of a warp")
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

    def start_copy(self, target, word, source, index, wanted, when):
        with self.where(True if when is None else when):
            with self.where(wanted):
                values = self.load_vector(source, index, 16 // source.memory.array.itemsize)  # zeros in other threads
            first = np.broadcast_to(target.start + word, self.index.shape)
            _, words = target.memory.touch("write", first, 4)
            target.memory.filled[words] = False
            self.copies.append(_Copy(self.active, self.groups.copy(), target.memory, first, values.view(np.int32)))

    def commit_copies(self):
        self.groups[self.active] += 1

    def wait_for_copies(self, pending):
        for number, copy in enumerate(self.copies):
            with self.where(copy.pending & (copy.group < self.groups - pending)):
                active, words = copy.memory.touch("write", copy.first, 4)
                copy.memory.array[words] = copy.values[active]
                self.copies[number] = copy._replace(pending=copy.pending & ~self.active)
        self.copies = [copy for copy in self.copies if copy.pending.any()]

    def load_matrices(self, pointer, word, transposed):
        self._lanes(word)
        rows = self.load_vector(pointer, np.broadcast_to(word, self.index.shape), 4)
        matrices = rows.view(np.int16).reshape(-1, 4, 8, 8)  # warp, matrix, row, column
        matrices = matrices.swapaxes(2, 3) if transposed else matrices
        registers = np.ascontiguousarray(matrices).view(np.int32).reshape(-1, 4, WARP)
        return [np.ascontiguousarray(registers[:, i]).reshape(-1) for i in range(4)]

    def to_tf32(self, x):
        finite = np.isfinite(x.view(np.float32))
        return np.where(finite, (x + np.int32(1 << 12)) & _TF32, np.where(x & 0x7FFFFF, np.int32(0x7FFFFFFF), x))

    def multiply(self, sums, a, b, kind):
        a, b = (_matrices([self._lanes(r) for r in registers], kind) for registers in (a, b))
        left = np.concatenate([np.concatenate([a[:, 0], a[:, 2]], 2), np.concatenate([a[:, 1], a[:, 3]], 2)], 1)
        right = np.concatenate([b[:, 0], b[:, 1]], 2)  # its columns are rows here
        products = (left @ right.swapaxes(1, 2)).reshape(-1, 2, WARP, 2)  # warp, upper or lower, lane, column
        parts = [products[:, i // 2, :, i % 2].reshape(-1) for i in range(4)]
        return [np.asarray(s + p, np.float32) for s, p in zip(sums, parts, strict=True)]

    def multiply_pairs(self, a, b, kind):
        low, high = (x * y for x, y in zip(self.unpack(a, kind), self.unpack(b, kind), strict=True))
        return self.pack(low, high, kind)

    def pack(self, low, high, kind):
        pair = np.stack(np.broadcast_arrays(low, high), 1).astype(kind)
        return pair.view(np.int32)[:, 0]

    def pack_e4m3(self, numbers):
        return np.stack(np.broadcast_arrays(*numbers), 1).astype("float8_e4m3fn").view(np.int32)[:, 0]

    def unpack(self, word, kind):
        pairs = np.ascontiguousarray(word).view(kind).reshape(-1, 2).astype(np.float32)
        return [np.ascontiguousarray(pairs[:, i]) for i in range(2)]

    def store_words(self, pointer, index, words):
        values = np.stack([np.broadcast_to(w, self.index.shape) for w in words], 1)
        values = np.ascontiguousarray(values).view(pointer.memory.array.dtype)
        self.store_vector(pointer, index, values, values.shape[1])
