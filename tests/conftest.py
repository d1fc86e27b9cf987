"""Which tests run, and settings of every test: eight CPU devices to shard over, the same hypothesis examples always."""

import itertools
import os
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from zlib import crc32

import hypothesis
import jax
import pytest

from pallas_kernels.compile_only import missing_compiler
from pallas_kernels.mosaic.device import on_nvidia_gpu

# What somebody tuned on this machine is no part of what is tested.
os.environ["BLAZE_JAX_TUNING"] = ""

# With the extra `compile-only`, jax would complain of every CUDA library that is not there, here and in subprocesses.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

jax.config.update("jax_num_cpu_devices", 8)

# XLA ends a process whose virtual devices do not all come to a collective in time, and a busy machine may run one late.
_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=300"
os.environ["XLA_FLAGS"] = f"{_PATIENCE} {os.environ.get('XLA_FLAGS', '')}".strip()  # a user's own comes last

# A program takes some 15 of the 65,530 mappings that Linux grants a process.
MAPS = Path("/proc/self/maps")
TESTS = itertools.count(1)

# A test's programs serve other processes, too: xdist's workers inherit the folder, and so do subprocesses.
OWN_CACHE = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    OWN_CACHE = tempfile.mkdtemp(prefix="blaze_jax_tests_")
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": OWN_CACHE, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3"}
    jax.config.update("jax_compilation_cache_dir", OWN_CACHE)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)

# Where the layer's and the portable kernels' numbers are held to the oracle and to NumPy on one device.
USED_ON_CPUS = ("tests/blaze_jax/test_experts", "tests/pallas_kernels/test_", "tests/pallas_kernels/xla/")

hypothesis.settings.register_profile("library", derandomize=True, deadline=None, max_examples=30, database=None)
hypothesis.settings.load_profile("library")


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run every test with every parameter set, as CI does")


def pytest_runtest_teardown():
    """Forgets compiled programs before there are too many: then mapping memory fails, and the process ends."""
    if next(TESTS) % 50 == 0 and MAPS.exists() and len(MAPS.read_bytes().splitlines()) > 20_000:
        jax.clear_caches()


def pytest_runtest_setup(item):
    """Has programs compiled with little optimisation, which saves a third of the time, but not those for GPUs.

    With `--all`, the experts and the portable kernels are compiled as users compile them.
    """
    as_users_do = item.config.getoption("--all") and item.nodeid.startswith(USED_ON_CPUS)
    little = jax.default_backend() == "cpu" and not (as_users_do or item.get_closest_marker("compile_only"))
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(little))  # of processes that a test starts
    jax.config.update("jax_disable_most_optimizations", little)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """A worker for each core, which is what xdist takes for None; no other process where they would share a GPU."""
    return None if jax.default_backend() == "cpu" else 0


def pytest_unconfigure(config):
    if OWN_CACHE and not hasattr(config, "workerinput"):
        shutil.rmtree(OWN_CACHE, ignore_errors=True)


def pytest_collection_modifyitems(config, items):
    """Skips what needs a GPU, or a compiler for it, where there is none; leaves sets to `--all`; sorts."""
    reasons = {}
    if not on_nvidia_gpu():
        reasons["gpu"] = "needs an NVIDIA GPU since Ampere"
    if missing := missing_compiler():
        reasons["compile_only"] = missing
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    if not config.getoption("--all"):
        by_test = defaultdict(list)
        for item in items:
            skipped = any(item.iter_markers("skip")) or any(mark.args[0] for mark in item.iter_markers("skipif"))
            by_test[item.nodeid.partition("[")[0], kernels_of(item), skipped].append(item)
        kept = {item for sets in by_test.values() for item in sorted(sets, key=by_hash_of_name)[: by_default(sets[0])]}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    # The longest first: no worker is left alone with them at the end.
    items.sort(key=lambda item: not any(name in item.nodeid for name in ("tests/train_example", "test_every_gpu")))


def by_default(item) -> int:
    """How many parameter sets of the item's test run without `--all`, of each kind of kernels."""
    marker = item.get_closest_marker("default_sets")
    return marker.args[0] if marker else 1


def kernels_of(item) -> str | None:
    """Which kernels the test is of, if it is one of those that face several; both portable forms count as one."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    name = next((str(parameters[name]) for name in ("kernels", "implementation") if name in parameters), None)
    return name and name.removesuffix("_batched")


def by_hash_of_name(item) -> int:
    """An order without a pattern, the same on every run and worker."""
    return crc32(item.nodeid.encode())
