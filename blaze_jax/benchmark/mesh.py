"""A layer over several devices against one of them: times, communication, memory and errors.

Both do the same work per device, in turns, in a process of their own. The caller's process leaves the devices alone.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding

from blaze_jax.benchmark.inputs import BOTH, FORWARD, expert_inputs
from blaze_jax.benchmark.memory import MIB, plan_of
from blaze_jax.benchmark.own_process import ProcessError, run_apart
from blaze_jax.benchmark.results import Record
from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.benchmark.trace import Kernel, TraceError, busy_ns, trace
from blaze_jax.benchmark.traffic import traffic
from blaze_jax.config import MoEConfig
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


def mesh_of(axes: dict[str, int]) -> Mesh:
    """The first devices, with an axis for each role."""
    devices = np.array(jax.devices()[: math.prod(axes.values())]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


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
    """The record of a case, measured in a process of its own; what went wrong is its "status"."""
    kind: Record = {"kind": "mesh", "sizes": case.sizes._asdict(), "dtype": jnp.dtype(dtype).name}
    kind |= {"mesh": case.axes, "options": case.options, "layers": layers}
    try:
        arguments = case, kind["dtype"], layers, repeats, implementation
        return kind | run_apart(measured_here, *arguments, seconds=case_seconds) | {"status": "ok"}
    except ProcessError as error:
        return kind | {"status": str(error)}


def measured_here(case: Case, dtype: str, layers: int, repeats: int, implementation) -> Record:
    """The passes of a case's record, and the most memory in use."""
    sizes, axes, options = case
    devices = math.prod(axes.values())
    if jax.config.jax_num_cpu_devices < devices:  # has no effect where there are GPUs
        jax.config.update("jax_num_cpu_devices", devices)
    if len(jax.devices()) < devices:
        raise ValueError(f"{len(jax.devices())} devices are too few for a mesh of {devices}")
    mesh = mesh_of(axes)
    parallel = Parallelism(mesh, **{role: role for role in axes}, **options)
    specs = parallel.specs(MoEConfig(**sizes.config_fields()), sizes.model_width)
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

    def chain(layer: Callable, stacks, x, weights, experts):
        for params in stacks:
            x = layer(x, params, weights, experts)
        return x

    def alone(x, params, weights, experts):
        return expert_ffn(x, weights=weights, experts=experts, implementation=implementation, **params)

    settings = {"activation": "swiglu", "save": "pre_activations", "implementation": implementation}
    over_devices = jax.shard_map(
        partial(chain, partial(compute_experts, parallel=parallel, specs=specs, **settings)),
        mesh=mesh,
        in_specs=([specs] * layers, by_token, by_token, by_token),
        out_specs=by_token,
        check_vma=False,
    )
    passes = {}
    for name in (FORWARD, BOTH):
        calls, plans = {}, {}
        for which, function, arguments in (
            ("one", partial(chain, alone), one_by_one),
            ("mesh", over_devices, [placed, *spread]),
        ):
            arguments = arguments if name == BOTH else arguments[:-1]
            compiled = jax.jit(_pass(function)).lower(*arguments).compile(transport_options())
            calls[which] = partial(compiled, *arguments)
            plan = plan_of(compiled.memory_analysis())
            plans[which] = plan and {part: value / MIB for part, value in plan._asdict().items()}
        errors = _errors(calls["one"](), calls["mesh"](), devices)
        times = _in_turns(calls, repeats)
        itemsize = jnp.dtype(dtype).itemsize
        received = layers * traffic(sizes, parallel, axes, itemsize, backward=name == BOTH).total
        passes[name] = {
            "one_ms": times["one"],
            "mesh_ms": times["mesh"],
            "share_of_linear": times["one"] / times["mesh"],
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


def _in_turns(calls: dict[str, Callable], repeats: int) -> dict[str, float]:
    """Milliseconds of each call, launched a few at once so that the host keeps ahead: the median of the turns."""
    samples: dict[str, list[float]] = {which: [] for which in calls}
    for _ in range(max(1, repeats // _AT_ONCE)):
        for which, call in calls.items():
            out, start = None, time.perf_counter()
            for _ in range(_AT_ONCE):
                out = call()  # and the results before it are freed
            jax.block_until_ready(out)
            samples[which].append((time.perf_counter() - start) / _AT_ONCE * 1e3)
    return {which: statistics.median(values) for which, values in samples.items()}


def _profile(calls: dict[str, Callable], received: float) -> Record:
    """Busy and communication times of the first device, and how much of the latter no computation hid."""
    try:
        one, mesh = (
            trace(lambda call=call: [jax.block_until_ready(call()) for _ in range(3)]) for call in calls.values()
        )
    except TraceError as error:
        return {"note": str(error)}

    def busy_ms(kernels: list[Kernel], travel: bool | None = None) -> float:
        return busy_ns(k for k in kernels if travel in (None, _travels(k))) / 3e6

    communication, exposed = busy_ms(mesh, True), busy_ms(mesh) - busy_ms(mesh, False)
    names: dict[str, float] = {}
    for kernel in mesh:
        names[kernel.name[:80]] = names.get(kernel.name[:80], 0.0) + kernel.duration_ns / 3e6
    return {
        "one_busy_ms": busy_ms(one),
        "mesh_busy_ms": busy_ms(mesh),
        "communication_ms": communication,
        "exposed_ms": exposed,
        "hidden_share": 1 - exposed / communication if communication else None,
        "received_gb_per_s": received / communication / 1e6 if communication else None,
        "longest_kernels_ms": dict(sorted(names.items(), key=lambda item: -item[1])[:12]),
    }


def _travels(kernel: Kernel) -> bool:
    return any(word in kernel.name.lower() for word in TRAVELS)
