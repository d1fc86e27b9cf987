"""The kernels on a machine without a GPU: interpreted, with every race found. The choice of form is made here."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import NamedTuple

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

FEW_BLOCKS = 2

type Takers = Callable[[int, int], Sequence[int]]
"""`(tiles, blocks) -> ` the block that takes each tile, where blocks take one when they are free."""


def at_random(tiles: int, blocks: int) -> Sequence[int]:
    """A block for each tile, the same on every run."""
    return np.random.default_rng(0).integers(blocks, size=tiles).tolist()


class Settings(NamedTuple):
    """What `interpreted` was told, or that nothing is interpreted and blocks are as many as a GPU runs."""

    parameters: plgpu.InterpretGPUParams | None = None
    blocks: int = sys.maxsize
    takers: Takers = at_random


ON_A_GPU = Settings()

_settings: ContextVar[Settings] = ContextVar("settings", default=ON_A_GPU)


@contextmanager
def interpreted(*, detect_races: bool = True, blocks: int = FEW_BLOCKS, takers: Takers = at_random) -> Iterator[None]:
    """Kernels called in here run interpreted, on the CPU; it is slow, and meant for small problems.

    Two accesses to the same memory, one of them a write, raise an error if nothing puts them in order: a `RaceError`
    in the kernels with one value per thread (`simt`), a `RuntimeError` in those that work on tiles. The latter need jax
    0.12, whose interpreter of Pallas Mosaic GPU they run in; on bfloat16 and float16, they compute what a GPU computes,
    up to the order of float32 sums.

    Under `jit` it must be open where kernels are traced and lowered. For a gradient, that is the outermost call.

    Args:
      detect_races: whether kernels that work on tiles are watched, which takes longer; the others always are.
      blocks: how many those kernels have at most.
      takers: which of them takes each tile. On a GPU it is chance; here blocks run one after the other, and the first
        would take all.
    """
    parameters = plgpu.InterpretGPUParams(detect_races=detect_races)
    token = _settings.set(Settings(parameters, blocks, takers))
    try:
        with plgpu.force_gpu_interpret_mode(parameters):
            yield
    finally:
        _settings.reset(token)


def is_interpreted() -> bool:
    return _settings.get().parameters is not None


def interpreter_parameters() -> plgpu.InterpretGPUParams | bool:
    """The value of `interpret` where Pallas does not look for itself."""
    return _settings.get().parameters or False


def in_interpreter(form: Callable) -> Callable:
    """Decorator: inside `interpreted`, calls go to `form` instead."""

    def decorate(function):
        @wraps(function)
        def call(*arguments, **options):
            return (form if is_interpreted() else function)(*arguments, **options)

        return call

    return decorate


def blocks(count: int) -> int:
    """How many blocks to launch where a GPU would run `count`: few, for several tiles each of a small problem."""
    return min(count, _settings.get().blocks)


def tiles_taken(tiles: int, blocks: int) -> np.ndarray:
    """`(blocks, turns)` int32: the tile that a block takes in each turn, and `tiles` where none is left."""
    takers = np.asarray(_settings.get().takers(tiles, blocks))
    own = [np.flatnonzero(takers == block) for block in range(blocks)]
    turns = 1 + max(map(len, own))
    return np.stack([np.pad(o, (0, turns - len(o)), constant_values=tiles) for o in own]).astype(np.int32)
