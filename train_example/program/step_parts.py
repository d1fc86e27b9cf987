"""The parts of a training step: the kernels of each, by the compiled program's text, and the least it must do.

Counted is the model's own arithmetic, without what is computed again for less memory. A matrix product counts three
times, for its result and the gradients of both factors; attention counts the lower half of the scores, twice forward
and five times backward.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp

from blaze_jax.benchmark.rates import Work, kernel_work
from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.benchmark.timing import Kernel
from train_example.config import ModelConfig, TrainConfig

CASTS, OTHER = "casts and copies", "other"

_PARTS = {
    CASTS: (r"/working_copy/", r"(?i)^mem(cpy|set)"),
    "optimizer": (r"/optimizer/", None),
    "embedding, head, loss": (r"[/(](embedding|head|loss)[/)]", None),
    "dense feed-forward": (r"/(shared_experts|feed_forward)/", None),
    "router and dispatch": (r"/router/|dispatch|/moe/\w+$", r"moe_(dispatch|router)"),
    "experts": (r"/experts/", r"moe_"),
    "projections": (r"/attention/(query|key|value|out)/", None),
    "attention": (r"/attention/|[/(]rotation[/)]", r"sdpa|flash|fmha|cudnn::fusion"),
    "norms and residuals": (r"_norm/|_blocks/\w+$", None),
}
"""A part, where in the source its operations come from, by modules and `jax.named_scope`s, and the names of its
kernels, where the profiler gives no instruction of the program. The first that fits counts."""

PARTS = (*(name for name in _PARTS if name != CASTS), CASTS, OTHER)

_STACKING = r"dynamic_(update_)?(index|slice)"
"""Operations by which a loop over layers takes its arrays from stacks and puts them there."""

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*? ([a-z][\w\-]*)\(")
_CALLED = re.compile(r"(?:calls|to_apply|async_execution_thread=\S+, calls)=%?([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_NAMES = {"bitcast", "constant", "get-tuple-element", "iota", "parameter", "reshape", "tuple"}
_COPIES = {"broadcast", "concatenate", "convert", "copy", "copy-start", "pad", "slice", "transpose"}
_MOVES = _NAMES | _COPIES | {"dynamic-slice", "dynamic-update-slice"}
"""Operations that compute nothing: what consists of them alone is a cast, a copy or a fill."""

_FLOAT32 = 4


def by_part(kernels: Iterable[Kernel], program: Mapping[str, str | None], steps: int) -> list[dict[str, Any]]:
    """The time of every part in a step, in the order of `PARTS`, from the kernels of several equal steps.

    Returns:
      For each "part" the "ms" in which its kernels ran, the first of them where several did, so that all parts together
      are the time in which anything ran; "launches"; and "kernels" with the "ms" of each "name", the longest first.
    """
    times: dict[str, Any] = defaultdict(Counter)
    launches, end = Counter(), float("-inf")
    for kernel in sorted(kernels, key=lambda k: k.start_ns):
        name = part_of(kernel, program)
        times[name][kernel.name] += max(0.0, kernel.end_ns - max(end, kernel.start_ns)) / steps / 1e6
        launches[name] += 1
        end = max(end, kernel.end_ns)
    return [
        {
            "part": name,
            "ms": times[name].total(),
            "launches": launches[name] / steps,
            "kernels": [{"name": kernel, "ms": ms} for kernel, ms in times[name].most_common() if ms],
        }
        for name in PARTS
    ]


def part_of(kernel: Kernel, program: Mapping[str, str | None]) -> str:
    """The part that a kernel belongs to; `OTHER` if nothing says which."""
    as_instruction = re.sub(r"_(\d+)$", r".\1", kernel.name)  # XLA calls the kernel of loop_fusion.3 loop_fusion_3
    found = program.get(kernel.op) or program.get(kernel.name) or program.get(as_instruction)
    return found or next((part for part, (_, name) in _PARTS.items() if name and re.search(name, kernel.name)), OTHER)


def parts_of_instructions(text: str) -> dict[str, str | None]:
    """The part that each instruction of a program belongs to, by its name; None if nothing says which.

    `text` is `compiled.as_text()`, where a computation stands before its callers.
    """
    program, bodies = {}, {}
    body: list[tuple[str, str]] = []  # operations and their places, those of called computations instead of the calls
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            body = bodies.setdefault(found[1], [])
        elif found := _INSTRUCTION.match(line):
            place, called = _OP_NAME.search(line), _CALLED.search(line)
            own = place[1] if place else ""
            inner = bodies.get(called[1] if called else None) or [(found[2], own)]
            program[found[1]] = _part_of_operations(own, inner)
            body += inner
    return program


def _part_of_operations(own: str, inner: list[tuple[str, str]]) -> str | None:
    """The part of an instruction from its own place in the source and all operations that are fused into it."""
    if all(operation in _MOVES for operation, _ in inner):
        return CASTS
    places = dict.fromkeys([own, *(place for _, place in reversed(inner))])  # the root is the last
    for place in places:
        for part, (source, _) in _PARTS.items():
            if re.search(source, place):
                return part
    return CASTS if any(re.search(_STACKING, place) for place in places) else None


def step_work(config: TrainConfig, num_parameters: int) -> Mapping[str, list[Work]]:
    """The work of each part of a step, one `Work` for what can be one kernel."""
    model, item = config.model, jnp.dtype(config.dtype).itemsize
    tokens, d = config.batch_size * config.sequence_length, model.width
    moe_layers, all_layers = model.num_layers - model.num_dense_layers, model.num_layers
    query_width, pair_width = _attention_widths(model)

    def product(inner: int, outer: int) -> list[Work]:
        size = item * (tokens * inner + inner * outer + tokens * outer)
        return [Work(2.0 * tokens * inner * outer, size)] * 3

    def feed_forward(width: int) -> list[Work]:
        return (2 * product(d, width) + product(width, d)) if width else []

    kernels = kernel_work(Sizes(tokens, d, model.expert_width, model.num_experts, model.experts_per_token), item)
    dispatch = [work for name, work in kernels.items() if "dispatch" in name]
    experts = [work for name, work in kernels.items() if "dispatch" not in name]
    scores = Work(0.0, 4.0 * _FLOAT32 * tokens * model.num_experts)
    residual, query, pair = (item * tokens * width for width in (d, query_width, pair_width))
    forward = Work(2.0 * tokens * config.sequence_length * query_width, 2 * query + 2 * pair)
    backward = Work(5.0 * tokens * config.sequence_length * query_width, 4 * query + 4 * pair)
    momentum = jnp.dtype(config.momentum_dtype).itemsize
    return {
        "experts": experts * moe_layers,
        "router and dispatch": [*product(d, model.num_experts), scores, *dispatch] * moe_layers,
        "dense feed-forward": feed_forward(model.shared_width) * moe_layers
        + feed_forward(model.dense_width) * model.num_dense_layers,
        "attention": [forward, backward] * all_layers,
        "projections": (2 * product(d, query_width) + 2 * product(d, pair_width)) * all_layers,
        # Forward the residual and a branch in, their sum and its norm out; backward as many.
        "norms and residuals": [Work(0.0, 4.0 * residual)] * (2 * (2 * all_layers + 1)),
        "embedding, head, loss": 2 * product(d, model.vocabulary)
        + [Work(0.0, 3.0 * _FLOAT32 * tokens * model.vocabulary)],
        # The gradients are read twice, for their norm and for the update.
        "optimizer": [Work(0.0, float(num_parameters) * (2 * item + 4 * _FLOAT32 + 2 * momentum))],
        "casts and copies": [Work(0.0, float(num_parameters) * (_FLOAT32 + item) if item != _FLOAT32 else 0.0)],
    }


def _attention_widths(model: ModelConfig) -> tuple[int, int]:
    """The width of all queries of a token, and of all keys, or values."""
    head_width = model.head_width or model.width // model.num_heads
    return model.num_heads * head_width, model.num_kv_heads * head_width


def memory_floor(config: TrainConfig, num_parameters: int) -> Mapping[str, float]:
    """Bytes of the state, and of what the backward pass takes from the forward pass where nothing is computed again.

    The latter are the inputs of all products and norms, queries, keys, values and outputs of attention, and the
    pre-activations of the experts. What lives for a layer only is not counted.
    """
    model, item = config.model, jnp.dtype(config.dtype).itemsize
    tokens, d = config.batch_size * config.sequence_length // config.accumulate, model.width
    copies = 2 * item if item != _FLOAT32 else _FLOAT32  # the working copy and its gradients, or float32 gradients
    accumulated = _FLOAT32 if config.accumulate > 1 else 0
    momentum = jnp.dtype(config.momentum_dtype).itemsize
    query_width, pair_width = _attention_widths(model)
    of_every_layer = (
        4 * d + 2 * query_width + 2 * pair_width
    )  # norms' inputs and outputs, queries to attention's output
    if model.qk_norm is not None:
        of_every_layer += query_width + pair_width
    of_moe_layer = 2 * (model.experts_per_token * model.expert_width + model.shared_width)
    of_dense_layer = 3 * model.dense_width  # two pre-activations and the activation
    moe_layers = model.num_layers - model.num_dense_layers
    values = model.num_layers * of_every_layer + moe_layers * of_moe_layer + model.num_dense_layers * of_dense_layer
    if config.remat != "none":
        values = model.num_layers * d  # the blocks' inputs
    if config.remat == "except-experts":
        values += moe_layers * 2 * model.experts_per_token * model.expert_width
    return {
        "float32 parameters": float(num_parameters) * _FLOAT32,
        "optimizer's moments": float(num_parameters) * (_FLOAT32 + momentum),
        "working copy and gradients": float(num_parameters) * (copies + accumulated),
        "kept for the backward pass": float(item) * tokens * values,
    }
