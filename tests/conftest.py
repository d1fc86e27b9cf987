"""Settings of every test: four CPU devices to shard over, and the same hypothesis examples on every run."""

import os

import hypothesis
import jax
import pytest

from pallas_kernels.compile_only import missing_for_h200

# What somebody tuned on this machine is no part of what is tested.
os.environ["BLAZE_JAX_TUNING"] = ""

# With the extra `compile-only`, jax would complain of every CUDA library that is not there, here and in subprocesses.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

jax.config.update("jax_num_cpu_devices", 4)

hypothesis.settings.register_profile("library", derandomize=True, deadline=None, max_examples=30, database=None)
hypothesis.settings.load_profile("library")


def pytest_collection_modifyitems(items):
    """Skips what needs a Hopper GPU, or a compiler for it, where there is none."""
    reasons = {}
    if not (jax.default_backend() == "gpu" and jax.devices()[0].compute_capability == "9.0"):
        reasons["gpu"] = "needs a Hopper GPU"
    if missing := missing_for_h200():
        reasons["compile_only"] = missing
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
