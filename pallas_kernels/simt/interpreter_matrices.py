"""How the machine that is numpy copies and multiplies; see `matrices`.

A copy's words count as written when it is started and again when its thread has waited for it; in between they hold
nothing, so that whoever reads them too early is found.
"""

# pyright: reportAttributeAccessIssue=false

from typing import NamedTuple

import ml_dtypes
import numpy as np

from pallas_kernels.simt.races import WARP

_KINDS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
_TF32 = np.int32(-1 << 13)  # the bits that tensor cores read


class _Group(NamedTuple):
    """Copies that the `active` threads have yet to wait for: of each, its threads, memory, first words and values."""

    active: np.ndarray
    copies: list


def _matrices(registers, kind) -> np.ndarray:
    """(warps, registers, 8, columns) numbers in float32 from a register in each lane for each matrix."""
    lanes = np.stack([r.reshape(-1, WARP) for r in registers], 1)  # (warps, registers, lanes), 4 bytes each
    lanes = lanes & _TF32 if kind == "float32" else lanes
    return np.ascontiguousarray(lanes).view(_KINDS[kind]).reshape(*lanes.shape[:2], 8, -1).astype(np.float32)


class InterpreterOfMatrices:
    """The methods that `matrices` calls."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.started, self.groups = [], []

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
        pair = np.stack(np.broadcast_arrays(low, high), 1).astype(_KINDS[kind])
        return pair.view(np.int32)[:, 0]

    def unpack(self, word, kind):
        pairs = np.ascontiguousarray(word).view(_KINDS[kind]).reshape(-1, 2).astype(np.float32)
        return [np.ascontiguousarray(pairs[:, i]) for i in range(2)]

    def store_words(self, pointer, index, words):
        values = np.stack([np.broadcast_to(w, self.index.shape) for w in words], 1)
        values = np.ascontiguousarray(values).view(pointer.memory.array.dtype)
        self.store_vector(pointer, index, values, values.shape[1])
