"""The race detector of the interpreter: who touched which word of memory, and which barriers came after.

Threads run in lockstep, one of the many orders in which a GPU may run them. Another order could give another result
where two threads touch a word, one of them to write it, and no barrier lies between: that is an error.
"""

from typing import NamedTuple

import numpy as np

from pallas_kernels.simt.values import WARP


class RaceError(RuntimeError):
    """Two threads touched a word, one of them to write it, and no barrier between them says which came first."""


class Threads:
    """All threads of a launch, of which those in `active` follow the current instruction, and the barriers passed."""

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

    def whole(self, size, operation) -> np.ndarray:
        """Which groups of `size` threads are active, each as a whole."""
        groups = self.active.reshape(-1, size)
        torn = groups.any(1) & ~groups.all(1)
        if torn.any():
            missing = np.flatnonzero(torn)[0] * size + np.flatnonzero(~groups[torn][0])[0]
            raise RaceError(f"{self.name}: {operation} that {self.describe(missing)} does not reach")
        return groups.all(1)


_CONFLICTS = {"read": ("write", "add"), "write": ("read", "write", "add"), "add": ("read", "write")}


class _Access(NamedTuple):
    """Who last read a word (or wrote it, or added to it atomically), of those that no barrier has put in the past.

    Attributes:
      thread: one of them, -1 for nobody.
      reach: how far they are apart: 0 for that thread alone, 1 for threads of its warp, 2 of its block, 3 of several.
      block_barriers: how many the block had passed.
      warp_barriers: how many the warp had passed.
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
