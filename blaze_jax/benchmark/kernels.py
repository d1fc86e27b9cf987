"""`--kernels`: where the layer's time goes, kernel by kernel, against what this device can do."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from blaze_jax.benchmark.ceilings import CeilingCalls, Ceilings
from blaze_jax.benchmark.inputs import BOTH, FORWARD, PASSES, expert_inputs, forward_and_backward
from blaze_jax.benchmark.kernel_work import kernel_work, work_of
from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.benchmark.timing import KernelTotal, Sustained, Timing, sustain, time_calls
from blaze_jax.experts import expert_ffn

_COMBINE = "moe_combine"  # runs once in each direction


def measure_kernels(
    sizes: Sizes, dtype, *, repeats: int, implementation=None, progress: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Times of both passes of our layer and of each of their kernels, as they go into the JSON file."""
    inputs = expert_inputs(sizes, dtype)
    layer = partial(expert_ffn, implementation=implementation)
    ceiling_calls = CeilingCalls(dtype)
    passes = {
        FORWARD: partial(jax.jit(layer), *inputs),
        BOTH: partial(jax.jit(forward_and_backward(layer)), *inputs, inputs[0]),
    }
    timings = time_calls(passes | ceiling_calls.calls, repeats=repeats, progress=progress)
    ceilings = ceiling_calls.rates(timings)
    dense = next(iter(ceiling_calls.calls.values()))
    seconds = 1.0 if jax.default_backend() == "gpu" else 0.1
    long_runs = {name: sustain(call, seconds=seconds, warm_seconds=0.3 * seconds) for name, call in passes.items()}
    dense_run = sustain(dense, seconds=0.5 * seconds, warm_seconds=0.3 * seconds)
    progress()
    return {
        "kind": "kernels",
        "sizes": sizes._asdict(),
        "dtype": jnp.dtype(dtype).name,
        "ceilings": ceilings._asdict() | {"sustained_tflops": ceiling_calls.dense_tflops(_sustained_us(dense_run))},
        "passes": {
            name: pass_record(timings[name], long_runs[name], factor * sizes.forward_flops, ceilings)
            for name, factor in PASSES.items()
        },
        "kernels": kernel_records(timings[BOTH].kernels, sizes, jnp.dtype(dtype).itemsize, ceilings),
    }


def pass_record(timing: Timing, long_run: Sustained | None, flops: float, ceilings: Ceilings) -> dict[str, Any]:
    """A pass's times and rates."""
    record = ceilings.pass_record(timing, flops)
    if long_run is not None:
        us = _sustained_us(long_run)
        record["sustained"] = {
            "us": us,
            "wall_us": long_run.wall_us,
            "calls": long_run.calls,
            "tflops": flops / us / 1e6,
            "note": long_run.note,
        }
    return record


def kernel_records(
    kernels: dict[str, KernelTotal], sizes: Sizes, itemsize: int, ceilings: Ceilings
) -> list[dict[str, Any]]:
    """A record for each kernel, the longest first; rates of those whose work is known."""
    table, records = kernel_work(sizes, itemsize), []
    for name, total in sorted(kernels.items(), key=lambda item: -item[1].us):
        record: dict[str, Any] = {"name": name, "launches": total.launches, "us": total.us}
        work = work_of(name, table)
        if work is not None and total.us:
            work = work.times(2 if _COMBINE in name else 1)
            least, bound = ceilings.least_us(*work)
            record |= {
                "tflops": work.flops / total.us / 1e6,
                "gbs": work.bytes / total.us / 1e3,
                "share_of_ceiling": least / total.us,
                "ceiling": bound,
            }
        records.append(record)
    return records


def print_kernels(record: dict[str, Any]) -> None:
    """The record as tables."""
    ceilings = record["ceilings"]
    print(
        f"  ceilings: dense matmul {ceilings['tflops']:.0f} TFLOP/s ({ceilings['sustained_tflops']:.0f} sustained), "
        f"copy {ceilings['gbs']:.0f} GB/s"
    )
    for name, row in record["passes"].items():
        long_run = row["sustained"]
        flushed = f"{row['us']:10.1f} us ±{row['spread'] / 2:5.1%} {row['tflops']:7.1f} TFLOP/s"
        sustained = f"{long_run['us']:10.1f} us {long_run['tflops']:7.1f} TFLOP/s, wall {long_run['wall_us']:10.1f} us"
        print(
            f"  {name:17s} {flushed} {row['share_of_dense']:6.1%} of dense | "
            f"sustained {sustained}, {long_run['calls']} calls | {row['clock']} time"
        )
    for note in dict.fromkeys(n for row in record["passes"].values() for n in (row["note"], row["sustained"]["note"])):
        if note:
            print(f"  note: {note}")
    if not record["kernels"]:
        print("  no kernels to list: the device's clock is not to be had here")
        return
    print(f"  {'kernel of forward+backward':58s} launches         us  TFLOP/s     GB/s  of its ceiling")
    for row in record["kernels"]:
        line = f"  {row['name'][:58]:58s} {row['launches']:8.1f} {row['us']:10.1f}"
        if "tflops" in row:
            line += f" {row['tflops']:8.1f} {row['gbs']:8.0f} {row['share_of_ceiling']:7.1%} ({row['ceiling']})"
        print(line)
    total = sum(row["us"] for row in record["kernels"])
    print(f"  {'sum of the medians':58s} {'':8s} {total:10.1f}")


def _sustained_us(long_run: Sustained) -> float:
    return long_run.wall_us if long_run.device_us is None else long_run.device_us
