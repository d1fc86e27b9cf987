"""Values of a thread: numbers, short vectors, and pointers; all arithmetic is the machine's at hand."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import reduce
from operator import add
from typing import Any, Self

import numpy as np

WARP = 32
"""Threads of a warp."""

running: ContextVar[Any] = ContextVar("machine")
machine = running.get  # what runs the body at hand


class Value:
    """A number or a few, of which each thread holds its own; `value` belongs to the machine."""

    kind: str

    def __init__(self, value):
        if isinstance(value, Value):
            value = value.value
        elif isinstance(value, bool | int | float | np.integer):
            value = machine().constant(self.kind, np.array(value).astype(self.kind).item())  # integers wrap
        self.value = value

    def of_same_type(self, value) -> Self:
        return type(self)(value)

    @property
    def arithmetic(self):
        return machine().integers if self.kind in ("bool", "int32", "int64") else machine().floats


def _operator(of: Callable[[Any], Callable]) -> Any:
    """The method that is an operation `of` the machine's arithmetic; the other operand may be a Python number."""
    return lambda a, b: a.of_same_type(of(a.arithmetic)(a.value, a.of_same_type(b).value))


def _comparison(of: Callable[[Any], Callable]) -> Any:
    return lambda a, b: Bool(of(a.arithmetic)(a.value, a.of_same_type(b).value))


class _Bits(Value):
    __and__ = _operator(lambda integers: integers.bit_and)
    __or__ = _operator(lambda integers: integers.bit_or)
    __xor__ = _operator(lambda integers: integers.bit_xor)


class Bool(_Bits):
    """The outcome of a comparison."""

    kind = "bool"

    def __invert__(self) -> "Bool":
        return self ^ True


class _Number(Value):
    __add__ = _operator(lambda numbers: numbers.add)
    __sub__ = _operator(lambda numbers: numbers.subtract)
    __mul__ = _operator(lambda numbers: numbers.multiply)
    __gt__ = _comparison(lambda numbers: numbers.greater)
    equals = _comparison(lambda numbers: numbers.equal)


class Int(_Number, _Bits):
    """A 32-bit integer. Comparisons and `>>` are signed, division is not."""

    kind = "int32"

    __floordiv__ = _operator(lambda integers: integers.divide)
    __mod__ = _operator(lambda integers: integers.remainder)
    __lshift__ = _operator(lambda integers: integers.shift_left)
    __rshift__ = _operator(lambda integers: integers.shift_right)
    __lt__ = _comparison(lambda integers: integers.less)
    __le__ = _comparison(lambda integers: integers.less_or_equal)
    __ge__ = _comparison(lambda integers: integers.greater_or_equal)

    def as_float(self) -> "Float":
        """The float32 of these bits."""
        return Float(machine().bits_as("float32", self.value))

    def to_float(self) -> "Float":
        """The nearest float32."""
        return Float(machine().to_float(self.value))

    def long(self) -> "Long":
        return Long(machine().to_long(self.value))


class Long(_Number):
    """A 64-bit index, for arrays of more than 2³¹ elements."""

    kind = "int64"

    def __init__(self, value):
        super().__init__(value.long() if isinstance(value, Int) else value)


class Float(_Number):
    """A float32."""

    kind = "float32"

    def bits(self) -> Int:
        return Int(machine().bits_as("int32", self.value))


class Vector(Value):
    """A few consecutive elements of an array, in its type until `wide()` makes them float32."""

    def __init__(self, value, kind: str, size: int):
        super().__init__(value)
        self.kind, self.size = kind, size

    @classmethod
    def zeros(cls, kind: str, size: int) -> "Vector":
        return cls(machine().zero_vector(kind, size), kind, size)

    def of_same_type(self, value) -> "Vector":
        return Vector(value, self.kind, self.size)

    __add__ = _operator(lambda floats: floats.add)

    def __mul__(self, factor: Float):
        factors = machine().broadcast(factor.value, self.size)
        return self.of_same_type(self.arithmetic.multiply(self.value, factors))

    def wide(self) -> "Vector":
        return self.to("float32")

    def to(self, kind: str) -> "Vector":
        """The elements in another floating type."""
        if kind == self.kind:
            return self
        return Vector(machine().convert_vector(kind, self.value), kind, self.size)

    def elements(self) -> list:
        """Its scalars."""
        of = Int if self.kind == "int32" else Float
        return [of(machine().element(self.value, i)) for i in range(self.size)]


class Pointer:
    """An array in device or shared memory, indexed flat by `Int` or `Long`; `p[i]` loads, `p[i] = v` stores."""

    def __init__(self, pointer):
        self.pointer = pointer
        self.kind: str = pointer.kind

    def is_same(self, other: "Pointer") -> Bool:
        """Whether it is the same memory. An output may be that of the input it comes from, but need not."""
        return Bool(machine().is_same(self.pointer, other.pointer))

    def or_else(self, condition: Bool, other: "Pointer") -> "Pointer":
        """This array, or the other one where the condition holds, which must be so in all threads or in none."""
        return Pointer(machine().either_pointer(condition.value, other.pointer, self.pointer))

    def at(self, index) -> "Pointer":
        """The array from `index` on; constant indices into it cost no arithmetic."""
        return Pointer(machine().offset(self.pointer, _index(index)))

    def __getitem__(self, index) -> Any:
        """`Int`, or `Float` whatever the array's floating type."""
        if self.kind in ("int32", "float32"):
            return (Int if self.kind == "int32" else Float)(machine().load(self.pointer, _index(index)))
        return self.load_vector(index, 1).wide().elements()[0]

    def __setitem__(self, index, value):
        of = Int if self.kind == "int32" else Float
        machine().store(self.pointer, _index(index), of(value).value)

    def load_vector(self, index, size: int) -> Vector:
        """`size` elements from `index`, a multiple of `size`, on."""
        return Vector(machine().load_vector(self.pointer, _index(index), size), self.kind, size)

    def load_word(self, index) -> Int:
        """The 32 bits of the elements from `index`, a multiple of as many, on."""
        return Int(machine().load_word(self.pointer, _index(index)))

    def store_vector(self, index, value: Vector) -> None:
        machine().store_vector(self.pointer, _index(index), value.value, value.size)

    def store_words(self, index, words: Sequence[Int]) -> None:
        """Stores registers with two 16-bit elements each from `index`, a multiple of all of them, on."""
        machine().store_words(self.pointer, _index(index), [word.value for word in words])

    def add(self, index, value) -> None:
        """Atomic add; integer sums do not depend on their order."""
        machine().atomic_add(self.pointer, _index(index), Int(value).value)


def _index(index):
    return (index if isinstance(index, Long) else Int(index)).value


def minimum(a, b) -> Int:
    return Int(machine().integers.minimum(Int(a).value, Int(b).value))


def maximum(a, b) -> Any:
    """The larger one; NaN if one is NaN."""
    a = a if isinstance(a, Float) else Int(a)
    return a.of_same_type(a.arithmetic.maximum(a.value, a.of_same_type(b).value))


def select(condition: Bool, a, b) -> Any:
    """`a` where the condition holds, else `b`; one of them has a type, and a Python number takes it."""
    like = a if isinstance(a, Value) else b if isinstance(b, Value) else Int(b)
    a, b = like.of_same_type(a), like.of_same_type(b)
    return like.of_same_type(machine().select(condition.value, a.value, b.value))


def total(values: Sequence) -> Any:
    """Sum of a list, from the first on."""
    return reduce(add, values)


def count_bits(x: Int) -> Int:
    return Int(machine().count_bits(x.value))


def lowest_bit(x: Int) -> Int:
    """The number of the lowest bit that is set, 32 if none is."""
    return count_bits((x - 1) & (x ^ -1))


def permute_bytes(x: Int, order: Sequence[int]) -> Int:
    """Byte i of the result is byte `order[i]`."""
    return Int(machine().permute_bytes(x.value, list(order)))


def multiply_add(a: Float, b, c) -> Float:
    """The sum a · b + c, rounded once."""
    return Float(machine().multiply_add(a.value, Float(b).value, Float(c).value))


def exp2(x: Float) -> Float:
    """2^x to 2 units in the last place; zero below the normal numbers."""
    return Float(machine().exp2(x.value))


def log2(x: Float) -> Float:
    """Base-2 logarithm, to an absolute error of 2^-22 or so."""
    return Float(machine().log2(x.value))


def reciprocal(x: Float) -> Float:
    """1/x to a unit in the last place; of numbers below the normal ones, infinity."""
    return Float(machine().reciprocal(x.value))
