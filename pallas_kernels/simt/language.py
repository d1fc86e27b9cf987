"""Code with one value per CUDA thread, for kernels that are about single numbers and not about tiles.

Scalars and short vectors with operators, typed pointers, loops, and the warp operations that Pallas has no words for.
A body written in these terms runs on two machines: `simt_code` makes it a Hopper kernel, and inside `interpreted()`,
`simt_interpreter` runs it in numpy on any CPU and looks for races.
"""

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Self

import jax
import numpy as np

from pallas_kernels.mosaic.interpreter import interpreted, is_interpreted
from pallas_kernels.simt import code as simt_code
from pallas_kernels.simt import interpreter as simt_interpreter
from pallas_kernels.simt.interpreter import WARP, RaceError

__all__ = [
    "WARP",
    "Bool",
    "Float",
    "Int",
    "Long",
    "Pointer",
    "RaceError",
    "Vector",
    "block",
    "block_barrier",
    "branch",
    "clear",
    "combine_lanes",
    "count_bits",
    "exclusive_warp_sum",
    "exp2",
    "interpreted",
    "lanes_where",
    "lanes_with_equal_bits",
    "log2",
    "loop",
    "maximum",
    "minimum",
    "multiply_add",
    "permute_bytes",
    "reciprocal",
    "select",
    "shuffle",
    "simt_kernel",
    "thread",
    "total",
    "warp",
    "warp_barrier",
    "warp_maximum",
    "when",
]

_machine: ContextVar[Any] = ContextVar("machine")  # what runs the body at hand


def simt_kernel(
    body: Callable,
    *,
    name: str,
    outputs: Sequence[jax.ShapeDtypeStruct] = (),
    blocks: int,
    warpgroups: int,
    shared: Sequence[int] = (),
    updated: int = 0,
) -> Callable[..., list[jax.Array]]:
    """A kernel whose body `body(*inputs, *outputs, *shared)` runs in every thread, on pointers.

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

    def run(machine, pointers):
        token = _machine.set(machine)
        try:
            body(*(Pointer(p) for p in pointers))
        finally:
            _machine.reset(token)

    make = simt_interpreter.kernel if is_interpreted() else simt_code.kernel
    return make(run, name=name, outputs=outputs, blocks=blocks, warpgroups=warpgroups, shared=shared, updated=updated)


class _Value:
    """What each thread holds one of; `value` belongs to the machine."""

    kind: str

    def __init__(self, value):
        if isinstance(value, _Value):
            value = value.value
        elif isinstance(value, bool | int | float | np.integer):
            value = _machine.get().constant(self.kind, value)
        self.value = value

    def of_same_type(self, value) -> Self:
        return type(self)(value)

    def _apply(self, operation: str, other) -> Self:
        return type(self)(_operate(operation, self, type(self)(other)))

    def _compare(self, operation: str, other) -> "Bool":
        return Bool(_operate(operation, self, type(self)(other)))


def _operate(operation: str, *values: _Value):
    return _machine.get().operate(operation, *(v.value for v in values))


class Bool(_Value):
    """The outcome of a comparison."""

    kind = "bool"

    def __and__(self, other):
        return self._apply("andi", other)

    def __or__(self, other):
        return self._apply("ori", other)

    def __invert__(self):
        return self._apply("xori", True)


class _Integer(_Value):
    def __add__(self, other):
        return self._apply("addi", other)

    def __sub__(self, other):
        return self._apply("subi", other)

    def __mul__(self, other):
        return self._apply("muli", other)


class Int(_Integer):
    """A 32-bit integer. Comparisons and `>>` are signed, division is not."""

    kind = "int32"

    def __floordiv__(self, other):
        return self._apply("divui", other)

    def __mod__(self, other):
        return self._apply("remui", other)

    def __and__(self, other):
        return self._apply("andi", other)

    def __or__(self, other):
        return self._apply("ori", other)

    def __xor__(self, other):
        return self._apply("xori", other)

    def __lshift__(self, other):
        return self._apply("shli", other)

    def __rshift__(self, other):
        return self._apply("shrsi", other)

    def __lt__(self, other):
        return self._compare("cmpi.slt", other)

    def __le__(self, other):
        return self._compare("cmpi.sle", other)

    def __gt__(self, other):
        return self._compare("cmpi.sgt", other)

    def __ge__(self, other):
        return self._compare("cmpi.sge", other)

    def equals(self, other) -> Bool:
        return self._compare("cmpi.eq", other)

    def as_float(self) -> "Float":
        """The float32 of these bits."""
        return Float(_machine.get().convert("bitcast", "float32", self.value))

    def to_float(self) -> "Float":
        """The nearest float32."""
        return Float(_machine.get().convert("sitofp", "float32", self.value))

    def long(self) -> "Long":
        return Long(_machine.get().convert("extui", "int64", self.value))


class Long(_Integer):
    """A 64-bit index, for arrays of more than 2³¹ elements."""

    kind = "int64"

    def __init__(self, value):
        super().__init__(value.long() if isinstance(value, Int) else value)


class Float(_Value):
    """A float32."""

    kind = "float32"

    def __add__(self, other):
        return self._apply("addf", other)

    def __sub__(self, other):
        return self._apply("subf", other)

    def __mul__(self, other):
        return self._apply("mulf", other)

    def __gt__(self, other):
        return self._compare("cmpf.OGT", other)

    def equals(self, other) -> Bool:
        return self._compare("cmpf.OEQ", other)

    def bits(self) -> Int:
        return Int(_machine.get().convert("bitcast", "int32", self.value))


class Vector(_Value):
    """A few consecutive elements of an array, in its type until `wide()` makes them float32."""

    def __init__(self, value, kind: str, size: int):
        super().__init__(value)
        self.kind, self.size = kind, size

    @classmethod
    def zeros(cls, kind: str, size: int) -> "Vector":
        return cls(_machine.get().zero_vector(kind, size), kind, size)

    def of_same_type(self, value) -> "Vector":
        return Vector(value, self.kind, self.size)

    def __add__(self, other: "Vector"):
        return self.of_same_type(_operate("addf", self, other))

    def __mul__(self, factor: Float):
        factors = _machine.get().broadcast(factor.value, self.size)
        return self.of_same_type(_machine.get().operate("mulf", self.value, factors))

    def wide(self) -> "Vector":
        return self.to("float32")

    def to(self, kind: str) -> "Vector":
        """The elements in another floating type."""
        if kind == self.kind:
            return self
        operation = "extf" if kind == "float32" else "truncf"
        return Vector(_machine.get().convert_vector(operation, kind, self.value), kind, self.size)

    def elements(self) -> list:
        """Its scalars."""
        of = Int if self.kind == "int32" else Float
        return [of(_machine.get().element(self.value, i)) for i in range(self.size)]


class Pointer:
    """An array in device or shared memory, indexed flat by `Int` or `Long`; `p[i]` loads, `p[i] = v` stores."""

    def __init__(self, pointer):
        self.pointer = pointer
        self.kind: str = pointer.kind

    def is_same(self, other: "Pointer") -> Bool:
        """Whether it is the same memory. An output may be that of the input it comes from, but need not."""
        return Bool(_machine.get().is_same(self.pointer, other.pointer))

    def at(self, index) -> "Pointer":
        """The array from `index` on; constant indices into it cost no arithmetic."""
        return Pointer(_machine.get().offset(self.pointer, _index(index)))

    def __getitem__(self, index):
        """`Int`, or `Float` whatever the array's floating type."""
        if self.kind in ("int32", "float32"):
            return (Int if self.kind == "int32" else Float)(_machine.get().load(self.pointer, _index(index)))
        return self.load_vector(index, 1).wide().elements()[0]

    def __setitem__(self, index, value):
        of = Int if self.kind == "int32" else Float
        _machine.get().store(self.pointer, _index(index), of(value).value)

    def load_vector(self, index, size: int) -> Vector:
        """`size` elements from `index`, a multiple of `size`, on."""
        return Vector(_machine.get().load_vector(self.pointer, _index(index), size), self.kind, size)

    def store_vector(self, index, value: Vector) -> None:
        _machine.get().store_vector(self.pointer, _index(index), value.value, value.size)

    def add(self, index, value) -> None:
        """Atomic add; integer sums do not depend on their order."""
        _machine.get().atomic_add(self.pointer, _index(index), Int(value).value)


def _index(index):
    return (index if isinstance(index, Long) else Int(index)).value


def minimum(a, b) -> Int:
    return Int(a)._apply("minsi", b)


def maximum(a, b) -> Any:
    """The larger one; NaN if one is NaN."""
    return a._apply("maximumf", b) if isinstance(a, Float) else Int(a)._apply("maxsi", b)


def select(condition: Bool, a, b) -> Any:
    """`a` where the condition holds, else `b`; one of them has a type, and a Python number takes it."""
    like = a if isinstance(a, _Value) else b if isinstance(b, _Value) else Int(b)
    a, b = like.of_same_type(a), like.of_same_type(b)
    return like.of_same_type(_machine.get().select(condition.value, a.value, b.value))


def when(condition: Bool):
    """Decorator: runs the function, in the threads where the condition holds."""

    def run(body):
        branch(condition, body, [])

    return run


def branch(condition: Bool, body: Callable, otherwise: Sequence) -> list:
    """What `body()` returns in the threads where the condition holds, `otherwise` in the others: a branch taken."""
    out = _machine.get().branch(
        condition.value, lambda: [v.value for v in (body() or ())], [v.value for v in otherwise]
    )
    return [v.of_same_type(x) for v, x in zip(otherwise, out, strict=True)]


def loop(start, stop, step, body: Callable, carry: Sequence = ()) -> list:
    """`carry = body(i, *carry)` for i from `start` below `stop`; the body of an empty carry returns nothing."""
    carry = [c if isinstance(c, _Value) else Int(c) for c in carry]

    def once(i, *values):
        out = body(Int(i), *(c.of_same_type(v) for c, v in zip(carry, values, strict=True)))
        return [c.of_same_type(v).value for c, v in zip(carry, out or (), strict=True)]

    out = _machine.get().loop(Int(start).value, Int(stop).value, Int(step).value, once, [c.value for c in carry])
    return [c.of_same_type(v) for c, v in zip(carry, out, strict=True)]


def clear(array: Pointer, size: int, threads: int) -> None:
    """Zeroes an array together with the block's other threads, and waits for them."""

    def zero(i):
        array[i] = 0

    loop(thread(), size, threads, zero)
    block_barrier()


def thread() -> Int:
    """Index of the thread in its block."""
    return Int(_machine.get().thread())


def warp() -> Int:
    """Index of the warp in its block, known to the compiler to be the same for the whole warp.

    All the warp's lanes must ask for it together: a GPU waits for those that do not.
    """
    return Int(_machine.get().warp())


def block() -> Int:
    return Int(_machine.get().block())


def block_barrier() -> None:
    _machine.get().block_barrier()


def warp_barrier() -> None:
    _machine.get().warp_barrier()


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
    return Int(_machine.get().ballot(x.value))


def warp_maximum(x: Int) -> Int:
    """The largest value of the warp, in all its lanes."""
    return Int(_machine.get().warp_maximum(x.value))


def shuffle(how: str, x, by) -> Any:
    """Another lane's value: of lane `by` ("idx"), of this one `^ by` ("bfly"), or of this one `- by` ("up")."""
    if isinstance(x, Float):
        return shuffle(how, x.bits(), by).as_float()
    return Int(_machine.get().shuffle(how, x.value, Int(by).value))


def combine_lanes(operation: Callable, x, group: int, start: int = 1):
    """`x` combined by `operation` over each group of lanes, a power of two, the same in all of them.

    From `start` on: lanes nearer than that already hold the same.
    """
    while start < group:
        x = operation(x, shuffle("bfly", x, start))
        start *= 2
    return x


def add(a, b):
    return a + b


def total(values: Sequence) -> Any:
    """Sum of a list, from the first on."""
    return functools.reduce(add, values)


def exclusive_warp_sum(x: Int, lane: Int) -> tuple[Int, Int]:
    """Sum of `x` over the lanes before this one, and over all lanes."""
    running = x
    for distance in (1, 2, 4, 8, 16):
        neighbour = shuffle("up", running, distance)
        running = running + select(lane >= distance, neighbour, 0)
    return running - x, shuffle("idx", running, WARP - 1)


def count_bits(x: Int) -> Int:
    return Int(_machine.get().count_bits(x.value))


def permute_bytes(x: Int, order: Sequence[int]) -> Int:
    """Byte i of the result is byte `order[i]`."""
    return Int(_machine.get().permute_bytes(x.value, list(order)))


def multiply_add(a: Float, b, c) -> Float:
    """The sum a · b + c, rounded once."""
    return Float(_machine.get().multiply_add(a.value, Float(b).value, Float(c).value))


def exp2(x: Float) -> Float:
    """2^x to 2 units in the last place; zero below the normal numbers."""
    return Float(_machine.get().function("ex2", x.value))


def log2(x: Float) -> Float:
    """Base-2 logarithm, to an absolute error of 2^-22 or so."""
    return Float(_machine.get().function("lg2", x.value))


def reciprocal(x: Float) -> Float:
    """1/x to a unit in the last place; of numbers below the normal ones, infinity."""
    return Float(_machine.get().function("rcp", x.value))
