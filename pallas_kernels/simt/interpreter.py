"""The machine of `simt` that is numpy: all threads of all blocks in lockstep, with masks, and with race detection.

A value is an array with one entry per thread of the launch, or with a single one that holds for all. The words of a
copy count as written when it is started and again when its thread has waited for it; in between they hold nothing, so
that whoever reads them too early is found.
"""

from contextlib import contextmanager
from threading import Lock
from typing import NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from scipy import special

from pallas_kernels.compat import kernel_launch
from pallas_kernels.simt.races import Memory, Threads
from pallas_kernels.simt.values import WARP

_ONE_AT_A_TIME = Lock()  # device: the body of a kernel may keep what belongs to one
_TF32 = np.int32(-1 << 13)  # the bits that tensor cores read


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
            run(threads, [_Pointer(memory, memory.kind, np.zeros(1, np.int64)) for memory in memories])
        return written

    def call(*inputs):
        if any(isinstance(a, Tracer) for a in inputs):
            return jax.pure_callback(interpret, results, *inputs, vmap_method="sequential")
        return [jax.numpy.asarray(a) for a in interpret(*inputs)]

    return kernel_launch(call)(*inputs)


class _Pointer(NamedTuple):
    """A memory, and where in it each thread's index 0 is."""

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


class _Group(NamedTuple):
    """Copies that the `active` threads have yet to wait for: of each, its threads, memory, first words and values."""

    active: np.ndarray
    copies: list


def _matrices(registers, kind) -> np.ndarray:
    """(warps, registers, 8, columns) numbers in float32 from a register in each lane for each matrix."""
    lanes = np.stack([r.reshape(-1, WARP) for r in registers], 1)  # (warps, registers, lanes), 4 bytes each
    lanes = lanes & _TF32 if kind == "float32" else lanes
    return np.ascontiguousarray(lanes).view(kind).reshape(*lanes.shape[:2], 8, -1).astype(np.float32)


class Numpy(Threads):
    """Computes; a value is a `np.ndarray`."""

    integers, floats = Integers, Floats

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.started, self.groups = [], []  # copies that are in no group yet, and groups of copies

    exp2, log2, reciprocal = np.exp2, np.log2, np.reciprocal

    def function(self, name, x):
        of = {"erf": special.erf, "rsqrt": lambda x: 1 / np.sqrt(x)}
        return (of.get(name) or getattr(np, name))(x).astype(np.float32)

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
        self.block_barriers[self.whole(self.per_block, "a block's barrier")] += 1

    def warp_barrier(self):
        self.warp_barriers[self.whole(WARP, "a warp's barrier")] += 1

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
        if when is not None:
            with self.where(when):
                self.start_copy(target, word, source, index, wanted, None)
            return
        with self.where(wanted):
            values = self.load_vector(source, index, 16 // source.memory.array.itemsize)
        values = np.where(np.broadcast_to(wanted, self.index.shape)[:, None], values, np.zeros((), values.dtype))
        active, words = target.memory.touch("write", target.start + word, 4)
        target.memory.filled[words] = False
        first = np.broadcast_to(target.start + word, self.index.shape)
        self.started.append((active, target.memory, first, np.ascontiguousarray(values).view(np.int32)))

    def commit_copies(self):
        self.groups.append(_Group(self.active.copy(), self.started))
        self.started = []

    def wait_for_copies(self, pending):
        before = self.active
        later = sum(group.active.astype(int) for group in self.groups)  # a thread's groups are its own
        for group in self.groups:
            later = later - group.active
            done = group.active & before & (later >= pending)
            for threads, memory, first, values in group.copies:
                self.active = np.zeros_like(before)
                self.active[threads] = done[threads]
                active, words = memory.touch("write", first, 4)
                memory.array[words] = values[active]
            group.active[done] = False
        self.active = before
        self.groups = [group for group in self.groups if group.active.any()]

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

    def pack(self, low, high, kind):
        pair = np.stack(np.broadcast_arrays(low, high), 1).astype(kind)
        return pair.view(np.int32)[:, 0]

    def unpack(self, word, kind):
        pairs = np.ascontiguousarray(word).view(kind).reshape(-1, 2).astype(np.float32)
        return [np.ascontiguousarray(pairs[:, i]) for i in range(2)]

    def store_words(self, pointer, index, words):
        values = np.stack([np.broadcast_to(w, self.index.shape) for w in words], 1)
        values = np.ascontiguousarray(values).view(pointer.memory.array.dtype)
        self.store_vector(pointer, index, values, values.shape[1])
