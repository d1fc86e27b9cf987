"""Settings of every test: four CPU devices to shard over, and the same hypothesis examples on every run."""

import os
from collections import defaultdict
from zlib import crc32

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


def pytest_addoption(parser):
    parser.addoption("--parameter-sets", type=int, metavar="N", help="of each test's parameter sets run N at most")


def pytest_collection_modifyitems(config, items):
    """Skips what needs a Hopper GPU, or a compiler for it, where there is none; keeps `--parameter-sets`; sorts."""
    reasons = {}
    if not (jax.default_backend() == "gpu" and jax.devices()[0].compute_capability == "9.0"):
        reasons["gpu"] = "needs a Hopper GPU"
    if missing := missing_for_h200():
        reasons["compile_only"] = missing
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    if most := config.getoption("--parameter-sets"):
        by_test = defaultdict(list)
        for item in items:
            skipped = any(item.iter_markers("skip")) or any(mark.args[0] for mark in item.iter_markers("skipif"))
            by_test[item.nodeid.partition("[")[0], skipped].append(item)
        kept = {item for sets in by_test.values() for item in sorted(sets, key=by_hash_of_name)[:most]}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    # The longest first: no worker is left alone with them at the end.
    items.sort(key=lambda item: "tests/train_example" not in item.nodeid)


def by_hash_of_name(item) -> int:
    """An order without a pattern, the same on every run and worker."""
    return crc32(item.nodeid.encode())
