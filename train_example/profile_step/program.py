"""What a compiled program's text says of each of its instructions."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*? ([a-z][\w\-]*)\(")
_CALLED = re.compile(r"(?:calls|to_apply|async_execution_thread=\S+, calls)=%?([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_NAMES = {"bitcast", "constant", "get-tuple-element", "iota", "parameter", "reshape", "tuple"}
_COPIES = {"broadcast", "concatenate", "convert", "copy", "copy-start", "pad", "slice", "transpose"}
_MOVES = _NAMES | _COPIES | {"dynamic-slice", "dynamic-update-slice"}
"""Operations that compute nothing: what consists of them alone is a cast, a copy or a fill."""


class Instruction(NamedTuple):
    """An instruction of a compiled program.

    Attributes:
      op_names: where in the source it comes from, its own place first, then those of what is fused into it.
      moves: whether it computes nothing.
    """

    op_names: tuple[str, ...]
    moves: bool


class _Line(NamedTuple):
    name: str
    opcode: str
    op_name: str
    called: str | None


def instructions(text: str) -> dict[str, Instruction]:
    """All instructions of a program, `compiled.as_text()`, by their names."""
    computations: dict[str, list[_Line]] = {}
    lines: list[_Line] = []
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            lines = computations.setdefault(found[1], [])
        elif found := _INSTRUCTION.match(line):
            op_name, called = _OP_NAME.search(line), _CALLED.search(line)
            lines.append(_Line(found[1], found[2], op_name[1] if op_name else "", called[1] if called else None))
    return {line.name: _instruction(line, computations) for lines in computations.values() for line in lines}


def _instruction(line: _Line, computations: dict[str, list[_Line]]) -> Instruction:
    inner = [one for one in _fused(line, computations) if one.called is None]
    names = [line.op_name, *(one.op_name for one in reversed(inner))]  # the root is the last
    return Instruction(tuple(dict.fromkeys(filter(None, names))), all(one.opcode in _MOVES for one in inner or [line]))


def _fused(line: _Line, computations: dict[str, list[_Line]]) -> Iterator[_Line]:
    for one in computations.get(line.called or "", []):
        yield one
        yield from _fused(one, computations)
