"""Which tests run, and settings of every test: eight CPU devices to shard over, the same hypothesis examples always."""

import gc
import itertools
import os
import shutil
import tempfile
from collections import defaultdict
from fnmatch import fnmatchcase
from pathlib import Path

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
USED_ON_CPUS = "tests/blaze_jax/test_experts.py", "tests/pallas_kernels/test_products.py", "tests/pallas_kernels/xla/"

MORE_CASES = 1
"""Slow cases of a test that CI runs at most."""

INTERPRETED = ("ampere", "hopper")
"""Families that a CPU interprets."""

hypothesis.settings.register_profile("library", derandomize=True, deadline=None, max_examples=30, database=None)
hypothesis.settings.load_profile("library")


def pytest_addoption(parser):
    parser.addoption(
        "--cases",
        choices=("few", "some", "all"),
        default="few",
        help="the telling cases of each test; as in CI, slow tests and some more cases, too; or all",
    )


def pytest_runtest_teardown():
    """Forgets compiled programs before there are too many: then mapping memory fails, and the process ends."""
    if next(TESTS) % 50 == 0 and MAPS.exists() and len(MAPS.read_bytes().splitlines()) > 20_000:
        jax.clear_caches()


def pytest_runtest_setup(item):
    """Has programs compiled with little optimisation, which saves a third of the time, but not those for GPUs.

    Unless a few cases are asked for, the experts and the portable kernels are compiled as users compile them.
    """
    as_users_do = item.config.getoption("--cases") != "few" and item.nodeid.startswith(USED_ON_CPUS)
    little = jax.default_backend() == "cpu" and not (as_users_do or item.get_closest_marker("compile_only"))
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(little))  # of processes that a test starts
    jax.config.update("jax_disable_most_optimizations", little)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem():
    """Marks as slow what `default_cases` leaves out of a test's cases; where it names none, all but the first.

    Each family of kernels then has a first case. What needs a GPU or a compiler for it, or is skipped, always has one.
    Of the slow cases all are marked as `beyond_some` but those that `ci_cases` names, or else what `some_more` chooses.
    """
    cases = yield
    if not isinstance(cases, list) or not cases or not hasattr(cases[0], "callspec"):
        return cases
    kinds = defaultdict(list)
    for case in cases:
        if not case.get_closest_marker("slow"):
            kinds[kind_of(case)].append(case)
    named = named_by("default_cases", cases)
    for (_, *marks), alike in kinds.items():
        first = {alike[0]} if marks or not named else set()
        for case in set(alike) - (named.intersection(alike) or first):
            case.add_marker("slow")
    in_ci = named_by("ci_cases", cases)
    together = defaultdict(list)
    for case in cases:
        together[kind_of(case)[1:]].append(case)
    for alike in together.values():
        slow = [case for case in alike if case.get_closest_marker("slow")]
        for case in set(slow) - (in_ci.intersection(slow) or some_more(slow, set(alike) - set(slow))):
            case.add_marker("beyond_some")
    return cases


def named_by(marker: str, cases: list) -> set:
    """The cases of a test whose ids a marker's patterns name."""
    named = set()
    for pattern in (pattern for mark in cases[0].iter_markers(marker) for pattern in mark.args):
        if not (found := {case for case in cases if fnmatchcase(case.callspec.id, pattern)}):
            raise pytest.Collector.CollectError(
                f"{cases[0].originalname} has no case {pattern!r}, which {marker} names"
            )
        named |= found
    return named


def some_more(slow: list, others: set) -> set:
    """The slow cases of a test that run in CI beside the others: each has the most values that no other one has.

    Whole layers on interpreted kernels are none of them: on a CPU they take minutes, and each kernel has its own tests.
    """
    layers = [case for case in slow if case.nodeid.startswith("tests/blaze_jax/") and kind_of(case)[0] in INTERPRETED]
    values = {case: values_of(case) for case in slow if case not in layers}
    left = set().union(*values.values()) - set().union(*map(values_of, others))
    chosen = set()
    while left and len(chosen) < MORE_CASES:
        best = max(values, key=lambda case: len(values[case] & left))  # the first of equals
        chosen.add(best)
        left -= values[best]
    return chosen


def values_of(case) -> set:
    """The parameters of a case with their values, or where those have no hash, with their places among them."""
    given = case.callspec.params.items()
    return {(name, value if is_hashable(value) else case.callspec.indices[name]) for name, value in given}


def is_hashable(value) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """A worker for each core, which is what xdist takes for None; no other process where they would share a GPU."""
    return None if jax.default_backend() == "cpu" else 0


def pytest_collection_finish():
    """Keeps the collector of garbage from what imports have made, which it would look through again and again."""
    gc.freeze()


def pytest_unconfigure(config):
    if OWN_CACHE and not hasattr(config, "workerinput"):
        shutil.rmtree(OWN_CACHE, ignore_errors=True)


def pytest_collection_modifyitems(config, items):
    """Skips what needs a GPU, or a compiler for it, where there is none; leaves out what `--cases` does; sorts."""
    reasons = {}
    if not on_nvidia_gpu():
        reasons["gpu"] = "needs an NVIDIA GPU since Ampere"
    if missing := missing_compiler():
        reasons["compile_only"] = missing
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    # A case named on the command line, with its brackets, runs in any case.
    marker = {"few": "slow", "some": "beyond_some"}.get(config.getoption("--cases"))
    if marker and "[" not in "".join(config.args):
        others = {item for item in items if item.get_closest_marker(marker)}
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    # The longest first: no worker is left alone with them at the end.
    items.sort(key=lambda item: not any(name in item.nodeid for name in ("tests/train_example", "test_every_gpu")))


def kind_of(case) -> tuple:
    """The family of kernels, if the test faces several, and marks; both portable forms are one family."""
    given = case.callspec.params
    family = next((str(given[name]) for name in ("kernels", "implementation", "family") if name in given), "")
    marks = {mark.name for mark in case.iter_markers() if mark.name != "skipif" or mark.args[0]}
    return family.removesuffix("_batched"), *sorted(marks & {"gpu", "compile_only", "skip", "skipif"})
