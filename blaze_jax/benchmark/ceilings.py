"""What this device reaches at most: a dense product and a copy, measured in the same run as the layers."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from blaze_jax.benchmark.timing import Call, Timing

DENSE = "dense matmul"
COPY = "copy"


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
      dtype: of the factors of the dense product, and of its result.
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
