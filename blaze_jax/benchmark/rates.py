"""Rates that this device reaches at most, by a dense product and a copy in the same run, and those of our kernels."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from blaze_jax.activations import get_activation
from blaze_jax.benchmark.back_to_back import take_turns
from blaze_jax.benchmark.results import Record, head
from blaze_jax.benchmark.sizes import BOTH, FORWARD, PASSES, Sizes, expert_inputs, forward_and_backward
from blaze_jax.benchmark.timing import Call, KernelTotal, Timing, time_calls
from blaze_jax.dispatch import group_by_expert
from blaze_jax.experts import expert_ffn
from blaze_jax.implementation import choose_implementation, kernels_of
from blaze_jax.schedule import block_width
from pallas_kernels.contract import place_values

DENSE = "dense matmul"
COPY = "copy"
ONE_EXPERT = "one expert"
COPIES = "copies"


class Ceilings(NamedTuple):
    """Rates of the dense product, in TFLOP/s, and of the copy, in GB/s read and written together."""

    tflops: float
    gbs: float

    def least_us(self, flops: float, num_bytes: float) -> tuple[float, str]:
        """The least microseconds that the work can take at these rates, and which of the two limits it."""
        by_flops, by_bytes = flops / self.tflops / 1e6, num_bytes / self.gbs / 1e3
        return max((by_flops, DENSE), (by_bytes, COPY))

    def pass_record(self, timing: Timing, flops: float) -> dict[str, Any]:
        """Times and rates of a pass of so many operations, as they go into the JSON file."""
        tflops = flops / timing.us / 1e6
        rates = {"tflops": tflops, "share_of_dense": tflops / self.tflops}
        return {**timing.record(), "samples_us": timing.samples_us, **rates}


class CeilingCalls:
    """The two calls to time together with others.

    Args:
      dtype: the dense product's.
    """

    def __init__(self, dtype):
        on_gpu = jax.default_backend() == "gpu"
        self.width = 8192 if on_gpu else 512
        self.copied_bytes = 2**30 if on_gpu else 2**24
        factor = jax.random.normal(jax.random.key(1), (self.width, self.width), jnp.float32).astype(dtype)
        source = jnp.ones(self.copied_bytes // 4, jnp.float32)
        self.calls: dict[str, Call] = {
            DENSE: partial(jax.jit(jnp.dot), factor, factor),
            COPY: partial(jax.jit(jnp.copy), source),
        }

    def rates(self, timings: Mapping[str, Timing]) -> Ceilings:
        """The ceilings from the times of the two calls."""
        return Ceilings(self.dense_tflops(timings[DENSE].us), 2 * self.copied_bytes / timings[COPY].us / 1e3)

    def dense_tflops(self, us: float) -> float:
        """TFLOP/s of the dense product that takes so many microseconds."""
        return 2 * self.width**3 / us / 1e6


class Work(NamedTuple):
    """Floating-point operations, and the bytes that must be read and written at least once."""

    flops: float
    bytes: float


def kernel_work(sizes: Sizes, itemsize: int) -> dict[str, Work]:
    """The work of each kernel in a forward and backward pass over the layer, by the words that its name contains."""
    tokens, d, n, experts, slots = sizes
    pairs = tokens * slots
    product = 2.0 * pairs * d * n
    matrix = experts * d * n * itemsize
    wide, narrow, token = pairs * d * itemsize, pairs * n * itemsize, tokens * d * itemsize
    ids = 4.0 * pairs
    return {
        "moe_up_projection": Work(2 * product, token + 2 * matrix + 3 * narrow),
        "moe_down_projection": Work(product, narrow + matrix + wide),
        "moe_combine": Work(4.0 * pairs * d, 2 * (wide + token + ids)),  # once in each direction
        "moe_down_backward": Work(product, token + matrix + 5 * narrow),
        "moe_down_weight_gradients": Work(product, token + narrow + matrix),
        "moe_up_weight_gradients": Work(2 * product, token + 2 * narrow + 2 * matrix),
        "moe_up_backward": Work(2 * product, 2 * narrow + 2 * matrix + wide),
        "moe_dispatch_count": Work(0.0, ids),
        "moe_dispatch_place": Work(0.0, 3 * ids),
    }


def work_of(kernel_name: str, table: dict[str, Work]) -> Work | None:
    """The work of the kernel that the profiler calls so, None for one that the table lacks."""
    matches = [name for name in table if name in kernel_name]
    return table[max(matches, key=len)] if matches else None


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


def measure_kernels(sizes: Sizes, dtype, *, repeats: int, implementation=None) -> Record:
    """Times both passes of our layer, and their kernels, in single runs and back to back, next to this device's rates.

    Kernels that multiply run alone, back to back, since a driver tells the watts of tens of milliseconds.
    """
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
    products, work = products_of_layer(sizes, inputs, implementation)
    alone = products | {ONE_EXPERT: one_expert, DENSE: ceiling_calls.calls[DENSE]}
    work |= {ONE_EXPERT: one_expert_flops, DENSE: 2.0 * ceiling_calls.width**3}
    seconds = 1.0 if jax.default_backend() == "gpu" else 0.1
    long_runs = take_turns(passes | alone, turns=1, seconds=seconds)
    rows = {}
    for name in passes:
        flops = PASSES[name] * sizes.forward_flops
        rows[name] = ceilings.pass_record(timings[name], flops)
        rows[name]["sustained"] = long_runs[name] | run_record(long_runs[name], flops)
    fewer = {"note": f"kernels alone get {MOST_TOKENS} tokens"} if sizes.num_tokens > MOST_TOKENS else {}
    return head("kernels", sizes, dtype) | {
        **fewer,
        "ceilings": ceilings._asdict()
        | {
            "sustained_tflops": ceiling_calls.dense_tflops(long_runs[DENSE]["us"]),
            "one_expert_tflops": one_expert_flops / timings[ONE_EXPERT].us / 1e6,
            "sustained_one_expert_tflops": one_expert_flops / long_runs[ONE_EXPERT]["us"] / 1e6,
        },
        "passes": rows,
        "kernels": kernel_records(timings[BOTH].kernels, sizes, jnp.dtype(dtype).itemsize, ceilings),
        "alone": {
            name: run_record(long_runs[name], flops, long_runs.get(COPIES) if name == IN_PLACE else None)
            for name, flops in work.items()
        },
    }


def run_record(run: Mapping[str, Any], flops: float, without: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Time, TFLOP/s, clock, watts and pJ/FLOP of a call back to back, less the time and the energy of another run.

    "pj_per_flop" is None where the driver does not tell the watts. Those of a kernel less another are what they make.
    """
    us, watts = run["us"], run.get("watts")
    if without is not None:
        us -= without["us"]
        told = None not in (watts, without.get("watts"))
        watts = (watts * run["us"] - without["watts"] * without["us"]) / us if told else None
    tflops = flops / us / 1e6
    energies = {"watts": watts, "pj_per_flop": None if watts is None else watts / tflops}
    return {"us": us, "tflops": tflops, "mhz": run.get("mhz"), **energies}


IN_PLACE = "moe_down_backward"
"""The kernel that writes over what it reads, so that XLA copies that before a call of it alone."""

MOST_TOKENS = 2**17
"""Whole arrays of rows are alive where a kernel runs alone, which the layer avoids for more tokens than these."""


def products_of_layer(sizes: Sizes, inputs: tuple, implementation) -> tuple[dict[str, Call], dict[str, float]]:
    """Each kernel of the layer that multiplies, alone, and the operations of each, by its name in `kernel_work`.

    Of those that the layer launches a block of columns at a time, it is one block, and of many tokens `MOST_TOKENS`.
    `COPIES` are of what the down backward writes over, unless the portable one writes elsewhere.
    """
    sizes = sizes._replace(num_tokens=min(sizes.num_tokens, MOST_TOKENS))
    x, w_gate, w_up, w_down, weights, experts = inputs
    x, weights, experts = (array[: sizes.num_tokens] for array in (x, weights, experts))
    ups, dtype, (_, d, n, num_experts, _) = (w_gate, w_up), x.dtype, sizes
    implementation = choose_implementation(implementation, x, (*ups, w_down), ())
    kernels = kernels_of(implementation, dtype=dtype)
    groups = group_by_expert(kernels, experts, num_experts)
    row_weights = place_values(weights, groups.token_index_map, groups.num_rows)
    columns = block_width(d, kernels.column_block(groups.num_rows, d, n, num_experts, dtype))
    activation = {"activation": get_activation("swiglu").function}
    up = partial(jax.jit(partial(kernels.up_projection, **activation)), x, ups, (), groups)
    pre, hidden = up()
    down_gradients = jax.jit(partial(kernels.down_weight_gradients, dtype=dtype, bias_dtype=None))
    up_gradients = jax.jit(partial(kernels.up_weight_gradients, dtypes=(dtype, dtype), bias_dtypes=()))
    down_backward = jax.jit(partial(kernels.down_backward, **activation))
    down, up_backward = (
        jax.jit(kernels.down_projection, static_argnums=5),
        jax.jit(kernels.up_backward, static_argnums=4),
    )
    calls: dict[str, Call] = {
        "moe_up_projection": up,
        "moe_down_projection": partial(down, hidden, w_down, None, groups, 0, columns),
        IN_PLACE: partial(down_backward, x, w_down, None, pre, row_weights, groups),
        "moe_down_weight_gradients": partial(down_gradients, hidden, x, row_weights, groups),
        "moe_up_weight_gradients": partial(up_gradients, x, pre, groups),
        "moe_up_backward": partial(up_backward, pre, ups, groups, 0, columns),
    }
    work = {name: kernel_work(sizes, dtype.itemsize)[name].flops for name in calls}
    work |= {name: work[name] * columns / d for name in ("moe_down_projection", "moe_up_backward")}
    if implementation == "mosaic_gpu":
        calls[COPIES] = partial(jax.jit(partial(jax.tree.map, jnp.copy)), pre)
    return calls, work


def product_of_one_expert(dtype, implementation) -> tuple[Call, float]:
    """The down projection of a single expert, a dense product, which these kernels reach at most; and its FLOPs.

    Its factors are random and it takes as long as a pass: a GPU at its power limit multiplies equal numbers faster, and
    in its first milliseconds.
    """
    rows, n, d = (65536, 4096, 4096) if jax.default_backend() == "gpu" else (16, 8, 8)
    w_down = (jax.random.normal(jax.random.key(3), (1, n, d), jnp.float32) * n**-0.5).astype(dtype)
    kernels = kernels_of(choose_implementation(implementation, w_down[0], (w_down,), ()), dtype=dtype)
    groups = group_by_expert(kernels, jnp.zeros((rows, 1), jnp.int32), 1)
    hidden = jax.random.normal(jax.random.key(2), (groups.num_rows, n), jnp.float32).astype(dtype)
    product = jax.jit(kernels.down_projection, static_argnums=(4, 5))
    return partial(product, hidden, w_down, None, groups, 0, d), 2.0 * rows * n * d
