"""The kernels on a machine without a GPU: interpreted, with every race found. The choice of form is made here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps

from jax.experimental.pallas import mosaic_gpu as plgpu

FEW_BLOCKS = 2

_parameters: ContextVar[plgpu.InterpretGPUParams | None] = ContextVar("parameters", default=None)


@contextmanager
def interpreted(*, detect_races: bool = True) -> Iterator[None]:
    """Kernels called in here run interpreted, on the CPU; it is slow, and meant for small problems.

    Two accesses to the same memory, one of them a write, raise an error if nothing puts them in order: a `RaceError`
    in the kernels with one value per thread (`simt`), a `RuntimeError` in those that work on tiles. The latter need jax
    0.12, whose interpreter of Pallas Mosaic GPU they run in; on bfloat16 and float16, they compute what a GPU computes,
    up to the order of float32 sums.

    Under `jit` it must be open where kernels are traced and lowered. For a gradient, that is the outermost call.

    Args:
      detect_races: whether kernels that work on tiles are watched, which takes longer; the others always are.
    """
    parameters = plgpu.InterpretGPUParams(detect_races=detect_races)
    token = _parameters.set(parameters)
    try:
        with plgpu.force_gpu_interpret_mode(parameters):
            yield
    finally:
        _parameters.reset(token)


def is_interpreted() -> bool:
    return _parameters.get() is not None


def interpreter_parameters() -> plgpu.InterpretGPUParams | bool:
    """What to pass as `interpret` where Pallas does not look for itself."""
    return _parameters.get() or False


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
    return min(count, FEW_BLOCKS) if is_interpreted() else count
