"""One case of `--mesh`, in a process of its own: `python -m blaze_jax.benchmark.mesh_case CASE.json RESULT.json`.

Experts over the devices of a mesh, and the same work per device on one of them, in turns.
"""

import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import NamedSharding

from blaze_jax.benchmark.device_trace import Kernel, TraceError, busy_ns, trace
from blaze_jax.benchmark.environment import environment
from blaze_jax.benchmark.inputs import BOTH, FORWARD, expert_inputs
from blaze_jax.benchmark.mesh import mesh_of
from blaze_jax.benchmark.plan import MIB, plan_of
from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.benchmark.traffic import traffic
from blaze_jax.config import MoEConfig
from blaze_jax.experts import expert_ffn, experts_over_devices
from blaze_jax.parallelism import Parallelism, transport_options

NAMES = ("w_gate", "w_up", "w_down")
TRAVELS = ("nccl", "memcpyp2p", "memcpy p2p", "all_to_all", "all-gather", "collective")
"""What the names of kernels and copies between devices contain."""


def main(arguments: list[str]) -> None:
    case, result = (Path(name) for name in arguments)
    record = measure(**json.loads(case.read_text()))
    result.write_text(json.dumps({"environment": environment(), "record": record}))


def measure(
    sizes, axes: dict[str, int], options: dict[str, Any], layers: int, dtype: str | None, repeats: int, implementation
) -> dict:
    """The record of a case: `axes` by role, `options` of `Parallelism`."""
    sizes = Sizes(*sizes)
    dtype = dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    devices = math.prod(axes.values())
    if len(jax.devices()) < devices:
        raise ValueError(f"{len(jax.devices())} devices are too few for a mesh of {devices}")
    mesh = mesh_of(axes)
    parallel = Parallelism(mesh, **{role: role for role in axes}, **options)
    config = MoEConfig(
        num_experts=sizes.num_experts, experts_per_token=sizes.experts_per_token, expert_width=sizes.expert_width
    )
    specs = {name: spec for name, spec in parallel.specs(config, sizes.model_width).items() if name in NAMES}
    by_token = NamedSharding(mesh, P(parallel.axes))

    every = expert_inputs(sizes, jnp.dtype(dtype))
    x, *stack, weights, experts = every
    stacks = [dict(zip(NAMES, stack, strict=True))]
    for _ in range(1, layers):
        stacks.append({name: w * jnp.asarray(1.01, w.dtype) for name, w in stacks[-1].items()})
    one_by_one = [stacks, x, weights, experts, jnp.flip(x, 0)]
    # The same tokens on every device, in another order: device 0 has those of the single device.
    spread = [
        jax.device_put(np.concatenate([np.roll(np.asarray(a), i, axis=0) for i in range(devices)]), by_token)
        for a in one_by_one[1:]
    ]
    placed = [{name: jax.device_put(w, NamedSharding(mesh, specs[name])) for name, w in s.items()} for s in stacks]

    def chain(layer: Callable, stacks, x, weights, experts):
        for params in stacks:
            x = layer(x, params, weights, experts)
        return x

    def alone(x, params, weights, experts):
        return expert_ffn(x, weights=weights, experts=experts, implementation=implementation, **params)

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=([dict(specs)] * layers, *[P(parallel.axes)] * 3),
        out_specs=P(parallel.axes),
        check_vma=False,
    )
    def over_devices(stacks, x, weights, experts):
        def layer(x, params, weights, experts):
            settings = {"activation": "swiglu", "save": "pre_activations", "implementation": implementation}
            return experts_over_devices(parallel, specs, params, x, weights, experts, **settings)

        return chain(layer, stacks, x, weights, experts)

    record: dict[str, Any] = {
        "kind": "mesh",
        "sizes": sizes._asdict(),
        "dtype": dtype,
        "mesh": axes,
        "options": options,
        "layers": layers,
        "passes": {},
    }
    for name in (FORWARD, BOTH):
        backward = name == BOTH
        calls, plans, results = {}, {}, {}
        for which, function, arguments in (
            ("one", partial(chain, alone), one_by_one),
            ("mesh", over_devices, [placed, *spread]),
        ):
            run = _both(function) if backward else function
            arguments = arguments if backward else arguments[:-1]
            compiled = jax.jit(run).lower(*arguments).compile(transport_options())
            calls[which] = partial(compiled, *arguments)
            plans[which] = plan_of(compiled.memory_analysis())
            results[which] = jax.block_until_ready(calls[which]())
        errors = _errors(results, devices, backward)
        del results
        times = _in_turns(calls, repeats)
        each = dataclasses.asdict(traffic(sizes, parallel, axes, jnp.dtype(dtype).itemsize, backward=backward))
        received = layers * sum(each.values())
        record["passes"][name] = {
            "one_ms": times["one"],
            "mesh_ms": times["mesh"],
            "share_of_linear": times["one"] / times["mesh"],
            "received_mib": received / MIB,
            "errors": errors,
            "memory_mib": {which: _of_plan(plan) for which, plan in plans.items()},
            **_profile(calls, received),
        }
    stats = jax.devices()[0].memory_stats() or {}
    record["peak_mib_of_process"] = stats.get("peak_bytes_in_use", 0) / MIB
    return record


def _both(function: Callable) -> Callable:
    def run(stacks, x, weights, experts, dy):
        y, vjp = jax.vjp(lambda stacks, x, weights: function(stacks, x, weights, experts), stacks, x, weights)
        y, dy = jax.lax.optimization_barrier((y, dy))  # as in training, where the backward pass follows a loss
        return y, vjp(dy)

    return run


def _errors(results, devices: int, backward: bool) -> dict[str, float]:
    """Scaled errors of what is on device 0. Gradients of parameters are sums over tokens that all devices have."""
    (y_one, y_mesh), pairs = (results[which][0] if backward else results[which] for which in ("one", "mesh")), {}
    pairs["y"] = (y_one, y_mesh, 1)
    if backward:
        (stacks_one, *one), (stacks_mesh, *mesh) = (results[which][1] for which in ("one", "mesh"))
        pairs |= {name: (a, b, 1) for name, a, b in zip(("dx", "d_weights"), one, mesh, strict=True)}
        pairs |= {f"d_{name}": (stacks_one[0][name], stacks_mesh[0][name], devices) for name in NAMES}
    errors = {}
    for name, (one, mesh, times) in pairs.items():
        shard = mesh.addressable_shards[0]
        errors[name] = float(_scaled_error(shard.data, one[shard.index], times))
    return errors


@jax.jit
def _scaled_error(out, one, times):
    ref = times * one.astype(jnp.float32)
    return jnp.linalg.norm(out.astype(jnp.float32) - ref) / jnp.linalg.norm(ref)


def _in_turns(calls: dict[str, Callable], repeats: int, at_once: int = 4) -> dict[str, float]:
    """Milliseconds of each call, launched a few at once so that the host keeps ahead: the median of the turns."""
    samples: dict[str, list[float]] = {which: [] for which in calls}
    for _ in range(max(1, repeats // at_once)):
        for which, call in calls.items():
            out, start = None, time.perf_counter()
            for _ in range(at_once):
                out = call()  # and the results before it are freed
            jax.block_until_ready(out)
            samples[which].append((time.perf_counter() - start) / at_once * 1e3)
    return {which: statistics.median(values) for which, values in samples.items()}


def _profile(calls: dict[str, Callable], received: float) -> dict[str, Any]:
    """By the profiler, of the first GPU: how long it was busy, how long with communication, and with nothing else."""
    try:
        kernels = {
            which: trace(lambda call=call: [jax.block_until_ready(call()) for _ in range(3)])
            for which, call in calls.items()
        }
    except TraceError as error:
        return {"note": str(error)}
    busy = {which: busy_ns(found) / 3e6 for which, found in kernels.items()}
    travelling = [k for k in kernels["mesh"] if _travels(k)]
    computing = [k for k in kernels["mesh"] if not _travels(k)]
    communication, exposed = busy_ns(travelling) / 3e6, busy["mesh"] - busy_ns(computing) / 3e6
    names: dict[str, float] = {}
    for kernel in kernels["mesh"]:
        names[kernel.name[:80]] = names.get(kernel.name[:80], 0.0) + kernel.duration_ns / 3e6
    return {
        "one_busy_ms": busy["one"],
        "mesh_busy_ms": busy["mesh"],
        "communication_ms": communication,
        "exposed_ms": exposed,
        "hidden_share": 1 - exposed / communication if communication else None,
        "received_gb_per_s": received / communication / 1e6 if communication else None,
        "longest_kernels_ms": dict(sorted(names.items(), key=lambda item: -item[1])[:12]),
    }


def _travels(kernel: Kernel) -> bool:
    return any(word in kernel.name.lower() for word in TRAVELS)


def _of_plan(plan) -> dict[str, float] | None:
    return plan and {name: value / MIB for name, value in plan._asdict().items()}


if __name__ == "__main__":
    main(sys.argv[1:])
