"""The parts of a training step, and which of them a kernel belongs to."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from blaze_jax.benchmark.trace import Kernel
from train_example.profile_step.program import Instruction

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
"""What a loop over layers does to take its arrays from stacks and to put them there."""

_BY_KERNEL = {
    CASTS: r"(?i)^mem(cpy|set)",
    "router and dispatch": r"moe_(dispatch|router)",
    "experts": r"moe_",
    "attention": r"sdpa|flash|fmha|cudnn::fusion",
}
"""The same by the kernel's own name, for kernels that the profiler gives no instruction of the program for."""

PARTS = (*(name for name in _BY_OP_NAME if name != CASTS), CASTS, OTHER)


class Part(NamedTuple):
    """What ran of a part, all steps of a trace together.

    Attributes:
      ns: nanoseconds in which its kernels ran; while several kernels run, the first of them counts.
      kernels: the same by the names of kernels, the longest first.
      launches: how many kernels started.
    """

    ns: float
    kernels: dict[str, float]
    launches: int


def part_of(kernel: Kernel, program: Mapping[str, Instruction]) -> str:
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


def by_part(kernels: Iterable[Kernel], program: Mapping[str, Instruction]) -> dict[str, Part]:
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
