"""`--kernels`: where the layer's time goes, kernel by kernel, against what this device can do."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from blaze_jax.benchmark.ceilings import DENSE, CeilingCalls, Ceilings
from blaze_jax.benchmark.inputs import BOTH, FORWARD, PASSES, expert_inputs, forward_and_backward
from blaze_jax.benchmark.kernel_work import kernel_work, work_of
from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.benchmark.timing import Call, KernelTotal, sustain, time_calls
from blaze_jax.dispatch import group_by_expert
from blaze_jax.experts import expert_ffn
from blaze_jax.implementation import choose_implementation, kernels_of

ONE_EXPERT = "one expert"


def measure_kernels(sizes: Sizes, dtype, *, repeats: int, implementation=None) -> dict[str, Any]:
    """Times of both passes of our layer and of each of their kernels, as they go into the JSON file."""
    inputs = expert_inputs(sizes, dtype)
    layer = partial(expert_ffn, implementation=implementation)
    ceiling_calls = CeilingCalls(dtype)
    passes = {
        FORWARD: partial(jax.jit(layer), *inputs),
        BOTH: partial(jax.jit(forward_and_backward(layer)), *inputs, inputs[0]),
    }
    one_expert, one_expert_flops = product_of_one_expert(dtype, implementation)
    timings = time_calls(passes | ceiling_calls.calls | {ONE_EXPERT: one_expert}, repeats=repeats)
    ceilings = ceiling_calls.rates(timings)
    seconds = 1.0 if jax.default_backend() == "gpu" else 0.1
    long_runs = {name: sustain(call, seconds=seconds, warm_seconds=0.3 * seconds) for name, call in passes.items()}
    ceiling_run = partial(sustain, seconds=0.5 * seconds, warm_seconds=0.3 * seconds)

    def pass_record(name: str, flops: float) -> dict[str, Any]:
        run = long_runs[name]
        sustained = {name: getattr(run, name) for name in ("us", "wall_us", "calls", "note")}
        sustained["tflops"] = flops / run.us / 1e6
        return ceilings.pass_record(timings[name], flops) | {"sustained": sustained}

    return {
        "kind": "kernels",
        "sizes": sizes._asdict(),
        "dtype": jnp.dtype(dtype).name,
        "ceilings": ceilings._asdict()
        | {
            "sustained_tflops": ceiling_calls.dense_tflops(ceiling_run(ceiling_calls.calls[DENSE]).us),
            "one_expert_tflops": one_expert_flops / timings[ONE_EXPERT].us / 1e6,
            "sustained_one_expert_tflops": one_expert_flops / ceiling_run(one_expert).us / 1e6,
        },
        "passes": {name: pass_record(name, factor * sizes.forward_flops) for name, factor in PASSES.items()},
        "kernels": kernel_records(timings[BOTH].kernels, sizes, jnp.dtype(dtype).itemsize, ceilings),
    }


def product_of_one_expert(dtype, implementation) -> tuple[Call, float]:
    """The down projection of a single expert, a dense product: what these kernels reach at most. And its FLOPs.

    Of random factors and as long as a pass: a GPU at its power limit multiplies equal numbers faster, and in its first
    milliseconds.
    """
    rows, n, d = (65536, 4096, 4096) if jax.default_backend() == "gpu" else (16, 8, 8)
    w_down = (jax.random.normal(jax.random.key(3), (1, n, d), jnp.float32) * n**-0.5).astype(dtype)
    kernels = kernels_of(choose_implementation(implementation, w_down[0], (w_down,), ()), dtype=dtype)
    groups = group_by_expert(kernels, jnp.zeros((rows, 1), jnp.int32), 1)
    hidden = jax.random.normal(jax.random.key(2), (groups.num_rows, n), jnp.float32).astype(dtype)
    return partial(jax.jit(kernels.down_projection, static_argnums=(4, 5)), hidden, w_down, None, groups, 0, d), (
        2.0 * rows * n * d
    )


def kernel_records(
    kernels: dict[str, KernelTotal], sizes: Sizes, itemsize: int, ceilings: Ceilings
) -> list[dict[str, Any]]:
    """A record for each kernel, the longest first; rates of those whose work is known."""
    table, records = kernel_work(sizes, itemsize), []
    for name, total in sorted(kernels.items(), key=lambda item: -item[1].us):
        record: dict[str, Any] = {"name": name, "launches": total.launches, "us": total.us}
        work = work_of(name, table)
        if work is not None and total.us:
            least, bound = ceilings.least_us(*work)
            record |= {
                "tflops": work.flops / total.us / 1e6,
                "gbs": work.bytes / total.us / 1e3,
                "share_of_ceiling": least / total.us,
                "ceiling": bound,
            }
        records.append(record)
    return records
