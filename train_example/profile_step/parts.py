"""The parts of a training step, and which of them a kernel belongs to, by the compiled program's text."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from blaze_jax.benchmark.timing import Kernel

CASTS, OTHER = "casts and copies", "other"

_BY_OP_NAME = {
    CASTS: r"/working_copy/",
    "optimizer": r"/optimizer/",
    "embedding, head, loss": r"[/(](embedding|head|loss)[/)]",
    "dense feed-forward": r"/(shared_experts|feed_forward)/",
    "router and dispatch": r"/router/|dispatch|/moe/\w+$",
    "experts": r"/experts/",
    "projections": r"/attention/(query|key|value|out)/",
    "attention": r"/attention/|[/(]rotation[/)]",
    "norms and residuals": r"_norm/|_blocks/\w+$",
}
"""A part and where in the source its operations come from: names of modules and of `jax.named_scope`."""

_STACKING = r"dynamic_(update_)?(index|slice)"
"""Operations by which a loop over layers takes its arrays from stacks and puts them there."""

_BY_KERNEL = {
    CASTS: r"(?i)^mem(cpy|set)",
    "router and dispatch": r"moe_(dispatch|router)",
    "experts": r"moe_",
    "attention": r"sdpa|flash|fmha|cudnn::fusion",
}
"""A part and its kernels' own names, where the profiler gives no instruction of the program."""

PARTS = (*(name for name in _BY_OP_NAME if name != CASTS), CASTS, OTHER)


class Part(NamedTuple):
    """The time of a part, all steps of a trace together.

    Attributes:
      ns: nanoseconds in which its kernels ran; while several kernels run, the first of them counts.
      kernels: the same by the names of kernels, the longest first.
      launches: how many kernels started.
    """

    ns: float
    kernels: dict[str, float]
    launches: int


def part_of(kernel: Kernel, program: Mapping[str, "Instruction"]) -> str:
    """The part that a kernel belongs to; `OTHER` if nothing says which."""
    found = program.get(kernel.op) or program.get(kernel.name) or program.get(_as_instruction(kernel.name))
    if found is not None:
        if found.moves:
            return CASTS
        for op_name in found.op_names:
            if part := _first(_BY_OP_NAME, op_name):
                return part
        if any(re.search(_STACKING, op_name) for op_name in found.op_names):
            return CASTS
    return _first(_BY_KERNEL, kernel.name) or OTHER


def by_part(kernels: Iterable[Kernel], program: Mapping[str, "Instruction"]) -> dict[str, Part]:
    """Time of every part, in the order of `PARTS`; together they are the time in which anything ran."""
    times: dict[str, dict[str, float]] = {name: defaultdict(float) for name in PARTS}
    launches, end = dict.fromkeys(PARTS, 0), float("-inf")
    for kernel in sorted(kernels, key=lambda k: k.start_ns):
        name = part_of(kernel, program)
        times[name][kernel.name] += max(0.0, kernel.end_ns - max(end, kernel.start_ns))
        launches[name] += 1
        end = max(end, kernel.end_ns)
    return {
        name: Part(sum(own.values()), dict(sorted(own.items(), key=lambda item: -item[1])), launches[name])
        for name, own in times.items()
    }


def _first(rules: Mapping[str, str], name: str) -> str | None:
    return next((part for part, pattern in rules.items() if re.search(pattern, name)), None)


def _as_instruction(kernel_name: str) -> str:
    """The instruction that XLA names its kernel after: `loop_add_fusion.3` is the kernel `loop_add_fusion_3`."""
    return re.sub(r"_(\d+)$", r".\1", kernel_name)


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
