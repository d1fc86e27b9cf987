"""A layer over several devices: measured against one of them, its traffic by formula, and what to expect of many.

The two layers that are measured do the same work per device, in turns, in a process of their own: the caller's process
leaves the devices alone.
"""

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding

from blaze_jax.benchmark.memory import MIB, plan_of
from blaze_jax.benchmark.own_process import ProcessError, run_apart
from blaze_jax.benchmark.results import Record, head
from blaze_jax.benchmark.sizes import BOTH, PASSES, PRESETS, Sizes, expert_inputs
from blaze_jax.benchmark.timing import Kernel, TraceError, busy_ns, in_turns, trace
from blaze_jax.experts import compute_experts, expert_ffn
from blaze_jax.parallelism import ROLES, Parallelism, transport_options

NAMES = ("w_gate", "w_up", "w_down")
TRAVELS = ("nccl", "memcpyp2p", "memcpy p2p", "all_to_all", "all-gather", "collective")
"""Parts of the names of kernels and copies between devices."""

_OPTIONS = ("exchange", "chunks", "row_budget", "keep_gathered")
_AT_ONCE = 4


def parse_mesh(text: str) -> dict[str, int]:
    """Devices by role, from "fsdp=2,expert=4"."""
    axes = {}
    for part in text.split(","):
        role, _, devices = part.partition("=")
        if role not in ROLES or not devices.isdecimal() or int(devices) < 1 or role in axes:
            raise argparse.ArgumentTypeError(f"{text!r} must be like fsdp=2,expert=4, of {', '.join(ROLES)}, each once")
        axes[role] = int(devices)
    return axes


def parse_variant(text: str) -> dict[str, Any]:
    """Fields of `Parallelism`, from "chunks=2,exchange=permute"; "default" has none."""
    options = {}
    for part in text.split(",") if text != "default" else []:
        name, _, value = part.partition("=")
        if name not in _OPTIONS:
            raise argparse.ArgumentTypeError(f"{name!r} must be one of {', '.join(_OPTIONS)}")
        try:
            options[name] = value if name == "exchange" else json.loads(value.lower().replace("none", "null"))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} must be a name and its value") from None
    return options


class Case(NamedTuple):
    """A layer over devices: its sizes, the devices by role, and fields of `Parallelism`."""

    sizes: Sizes
    axes: dict[str, int]
    options: dict[str, Any]

    def __str__(self) -> str:
        devices, options = (",".join(f"{k}={v}" for k, v in part.items()) for part in (self.axes, self.options))
        return f"{self.sizes}; {devices}; {options or 'defaults'}"


def measure_mesh(case: Case, dtype, *, layers: int, repeats: int, implementation, case_seconds: float) -> Record:
    """Measures a layer over devices against one of them, in a process of its own: time, communication, memory, errors.

    What went wrong is the record's "status".
    """
    record = head("mesh", case.sizes, dtype) | {"mesh": case.axes, "options": case.options, "layers": layers}
    try:
        arguments = case, record["dtype"], layers, repeats, implementation
        return record | run_apart(measured_here, *arguments, seconds=case_seconds) | {"status": "ok"}
    except ProcessError as error:
        return record | {"status": str(error)}


def measured_here(case: Case, dtype: str, layers: int, repeats: int, implementation) -> Record:
    """The passes of a case's record, and the most memory in use."""
    sizes, axes, options = case
    devices = math.prod(axes.values())
    if jax.config.jax_num_cpu_devices < devices:  # has no effect where there are GPUs
        jax.config.update("jax_num_cpu_devices", devices)
    if len(jax.devices()) < devices:
        raise ValueError(f"{len(jax.devices())} devices are too few for a mesh of {devices}")
    chosen = np.array(jax.devices()[:devices]).reshape(tuple(axes.values()))
    mesh = Mesh(chosen, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    parallel = Parallelism(mesh, **{role: role for role in axes}, **options)
    specs = parallel.specs(sizes.config(), sizes.model_width)
    specs, by_token = {name: specs[name] for name in NAMES}, P(parallel.axes)

    x, *stack, weights, experts = expert_inputs(sizes, jnp.dtype(dtype))
    stacks = [dict(zip(NAMES, stack, strict=True))]
    for _ in range(1, layers):
        stacks.append({name: w * jnp.asarray(1.01, w.dtype) for name, w in stacks[-1].items()})
    one_by_one = [stacks, x, weights, experts, jnp.flip(x, 0)]

    def place(array, spec):
        return jax.device_put(array, NamedSharding(mesh, spec))

    # Every device has the same tokens in another order, the first those of the single device.
    spread = [place(np.concatenate([np.roll(a, i, axis=0) for i in range(devices)]), by_token) for a in one_by_one[1:]]
    placed = [{name: place(w, specs[name]) for name, w in stack.items()} for stack in stacks]

    def alone(x, params, weights, experts):
        return expert_ffn(x, weights=weights, experts=experts, implementation=implementation, **params)

    def chain(layer: Callable, stacks, x, weights, experts):
        for params in stacks:
            x = layer(x, params, weights, experts)
        return x

    settings = {"activation": "swiglu", "save": "pre_activations", "implementation": implementation}
    over_devices = jax.shard_map(
        partial(chain, partial(compute_experts, parallel=parallel, specs=specs, **settings)),
        mesh=mesh,
        in_specs=([specs] * layers, by_token, by_token, by_token),
        out_specs=by_token,
        check_vma=False,
    )
    programs = {"one": (partial(chain, alone), one_by_one), "mesh": (over_devices, [placed, *spread])}
    passes = {}
    for name in PASSES:
        calls, plans = {}, {}
        for which, (function, arguments) in programs.items():
            arguments = arguments if name == BOTH else arguments[:-1]
            compiled = jax.jit(_pass(function)).lower(*arguments).compile(transport_options())
            calls[which] = partial(compiled, *arguments)
            plan = plan_of(compiled.memory_analysis())
            plans[which] = plan and {part: value / MIB for part, value in plan._asdict().items()}
        errors = _errors(calls["one"](), calls["mesh"](), devices)
        # launched a few at once, so that the host keeps ahead
        times = in_turns(calls, max(1, repeats // _AT_ONCE), number=_AT_ONCE)
        one_ms, mesh_ms = (statistics.median(times[which]) * 1e3 for which in ("one", "mesh"))
        itemsize = jnp.dtype(dtype).itemsize
        received = layers * traffic(sizes, parallel, axes, itemsize, backward=name == BOTH).total
        passes[name] = {
            "one_ms": one_ms,
            "mesh_ms": mesh_ms,
            "share_of_linear": one_ms / mesh_ms,
            "received_mib": received / MIB,
            "errors": errors,
            "memory_mib": plans,
            **_profile(calls, received),
        }
    stats = jax.devices()[0].memory_stats() or {}
    return {"passes": passes, "peak_mib_of_process": stats.get("peak_bytes_in_use", 0) / MIB}


def _pass(function: Callable) -> Callable:
    """The layers' outputs by name and, with a cotangent, the gradients, of the first layer's parameters too."""

    def run(stacks, x, weights, experts, *cotangent):
        if not cotangent:
            return {"y": function(stacks, x, weights, experts)}
        y, vjp = jax.vjp(lambda stacks, x, weights: function(stacks, x, weights, experts), stacks, x, weights)
        y, dy = jax.lax.optimization_barrier((y, *cotangent))  # as in training, where the backward pass follows a loss
        d_stacks, dx, d_weights = vjp(dy)
        first, *rest = d_stacks
        return {"y": y, "dx": dx, "d_weights": d_weights, **{f"d_{w}": d for w, d in first.items()}, "rest": rest}

    return run


def _errors(one: dict, mesh: dict, devices: int) -> dict[str, float]:
    """Scaled errors on the first device, where parameters' gradients are sums over the tokens of all devices."""
    errors = {}
    for name in [name for name in one if name != "rest"]:
        shard, times = mesh[name].addressable_shards[0], devices if name.startswith("d_w_") else 1
        errors[name] = float(_scaled_error(shard.data, one[name][shard.index], times))
    return errors


@jax.jit
def _scaled_error(out, one, times):
    ref = times * one.astype(jnp.float32)
    return jnp.linalg.norm(out.astype(jnp.float32) - ref) / jnp.linalg.norm(ref)


def _profile(calls: dict[str, Callable], received: float) -> Record:
    """Busy and communication times of the first device, and how much of the latter no computation hid."""

    def three_times(call: Callable) -> None:
        for _ in range(3):
            jax.block_until_ready(call())

    try:
        one, mesh = (trace(partial(three_times, call)) for call in calls.values())
    except TraceError as error:
        return {"note": str(error)}
    moving: dict[bool, list[Kernel]] = {True: [], False: []}
    names: Counter[str] = Counter()
    for kernel in mesh:
        moving[any(word in kernel.name.lower() for word in TRAVELS)].append(kernel)
        names[kernel.name[:80]] += kernel.duration_ns / 3e6  # pyright: ignore[reportArgumentType]
    one_ms, mesh_ms, communication, computation = (busy_ns(k) / 3e6 for k in (one, mesh, moving[True], moving[False]))
    exposed = mesh_ms - computation
    return {
        "one_busy_ms": one_ms,
        "mesh_busy_ms": mesh_ms,
        "communication_ms": communication,
        "exposed_ms": exposed,
        "hidden_share": 1 - exposed / communication if communication else None,
        "received_gb_per_s": received / communication / 1e6 if communication else None,
        "longest_kernels_ms": dict(names.most_common(12)),
    }


class Traffic(NamedTuple):
    """Bytes that one device receives in a pass over a layer, even routing assumed where it matters.

    Attributes:
      tokens: tokens, outputs and their gradients.
      parameters: parameters that are gathered, and sums of their gradients.
    """

    tokens: float
    parameters: float

    @property
    def total(self) -> float:
        return self.tokens + self.parameters


def traffic(sizes: Sizes, parallel: Parallelism, axes: Mapping[str, int], itemsize: int, *, backward: bool) -> Traffic:
    """The traffic of one layer; `sizes.num_tokens` are one device's.

    A leg brings a device `T·d` numbers of each other device of its group, or, by "all_to_all", of those that have an
    expert of a token. A forward pass has two legs: tokens come, outputs leave. The backward pass has three: tokens come
    again unless they were kept, gradients of the outputs come, and gradients of the tokens leave. Parameters are
    gathered once a pass, unless they were kept, and their gradients are scattered.

    Args:
      sizes: the layer's.
      parallel: the roles of the axes.
      axes: devices along each axis.
      itemsize: bytes of a number.
      backward: whether the pass is forward and backward, or forward alone.
    """
    tokens, d, n, num_experts, slots = sizes
    expert, tensor, fsdp = (math.prod(axes[a] for a in parallel.axes_of(r)) for r in ("expert", "tensor", "fsdp"))
    again = 0 if parallel.keep_gathered else 1
    others = expert * tensor - 1
    if parallel.exchange_for(slots, expert * tensor) == "all_to_all":
        # Of the experts' devices, those with one of K different experts at least; a share of them is the device itself.
        missed = math.comb(num_experts - num_experts // expert, slots) / math.comb(num_experts, slots)
        others = others * expert * (1 - missed) / expert
    leg = others * tokens * d * itemsize
    stored = 3 * num_experts // expert * d * n // tensor * itemsize
    gather = stored * (fsdp - 1) / fsdp
    legs, gathers = (4 + again, 2 + again) if backward else (2, 1)
    return Traffic(legs * leg, gathers * gather)


TFLOPS = 600
"""Reached by the experts of one H200, forward and backward: 581 (back to back) to 627 at 32768,4096,1024,128,8."""

LINK, NETWORK = 250, 45
"""GB/s that a GPU receives inside a host, as measured of collectives on two H200s, and of 400 Gbit/s between hosts."""

HOST = 8
"""GPUs of a host."""

SMS, COLLECTIVE_SMS = 132, 24
"""Multiprocessors of a GPU, and those that NCCL's channels take while they run."""

TOKENS = 16384
"""Tokens of each GPU."""


def expected_efficiency(model: str, dtype=None) -> Record:
    """Computes what 2 to 1024 GPUs communicate, and their share of linear, by formula. Nothing is measured.

    Experts are split over the GPUs of a host, parameters are gathered over the hosts. The record has milliseconds of
    communication, and the share of linear with all of it exposed and with all of it hidden. What is hidden costs the
    SMs that move it, and cannot take less time than the links do.
    """
    sizes, rows = Sizes(TOKENS, *PRESETS[model]), {}
    compute = 3 * sizes.forward_flops / TFLOPS / 1e9
    for devices in (1 << i for i in range(1, 11)):
        axes = {"expert": min(devices, HOST), "fsdp": max(1, devices // HOST)}
        moved = traffic(sizes, Parallelism(expert="expert", fsdp="fsdp"), axes, 2, backward=True)
        inside, between = moved.tokens / LINK / 1e6, moved.parameters / NETWORK / 1e6
        hidden = max(compute + (inside + between) * COLLECTIVE_SMS / SMS, inside, between)
        rows[str(devices)] = inside + between, compute / (compute + inside + between), compute / hidden
    return {"kind": "expected", "model": model, "devices": rows}
