"""Launches of kernels: what jax is told of them, when they are assembled, and what an import changes."""

import os
import subprocess
import sys
import threading
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import P
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import kernel_launch, varying_axes
from pallas_kernels.compile_only import on_gpu
from pallas_kernels.compile_only.ptxas_report import captured_ptxas_report
from pallas_kernels.mosaic import launches
from pallas_kernels.mosaic.launches import ASSEMBLY, assemble_early, begun
from tests.numerics import assert_same_bits


def add_number(own: bool):
    """A kernel that no process has seen, so that no cache holds it, launched by this package or by somebody else."""
    number = float(int.from_bytes(os.urandom(3)))

    def moe_add(x_ref, y_ref):
        y_ref[...] = x_ref[...] + number

    mesh = {"grid": (1,), "grid_names": ("block",), "num_threads": 1, "thread_name": "warpgroup"}
    if own:
        launch = partial(launches.kernel, in_place={}, compiler_params=plgpu.CompilerParams(), **mesh)
    else:
        launch = partial(plgpu.kernel, **mesh)
    return lambda x: launch(moe_add, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def wait_for_assembly():
    for thread in threading.enumerate():
        if thread.name == ASSEMBLY:
            thread.join()


def test_a_kernel_is_assembled_once_and_again_after_a_failure():
    name, seen = os.urandom(8), []

    def compile_alone():
        seen.append(1)
        if len(seen) == 1:
            raise RuntimeError("no memory")

    for expected in (1, 2, 2):
        assemble_early(name, compile_alone)
        wait_for_assembly()
        assert len(seen) == expected
    assert name in begun


AT_EXIT = """
import time
from pallas_kernels.mosaic.launches import assemble_early
for name in range(100):
    assemble_early(bytes([name]), lambda: (time.sleep(0.3), print("assembled", flush=True)))
time.sleep(0.1)
"""


def test_what_waits_for_assembly_is_dropped_at_the_end_of_the_program():
    run = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=True)
    assert 1 <= run.stdout.count("assembled") <= (os.cpu_count() or 1)
    assert not run.stderr


@pytest.mark.compile_only
@pytest.mark.parametrize(
    ("own", "reported", "early"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_program_finds_its_kernel_assembled_unless_it_is_another_packages(monkeypatch, own, reported, early):
    if reported:
        monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    lowered = jax.jit(add_number(own)).lower(on_gpu(jnp.zeros((128, 64), jnp.float32)))
    wait_for_assembly()
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    with captured_ptxas_report() as assembled:
        lowered.compile()
    assert [kernel.name for kernel in assembled] == ([] if early else ["moe_add"])


CHANGES = """
import threading
import jax
from jax._src.interpreters import mlir
from jax.experimental.mosaic.gpu import core

def rules():
    by_platform = [mlir._lowerings, *mlir._platform_specific_lowerings.values()]
    seen = [{str(primitive): rule for primitive, rule in rules.items()} for rules in by_platform]
    return seen, core._mosaic_gpu_lowering_rule, threading.active_count()

import jax.experimental.pallas.mosaic_gpu
before = rules()
import pallas_kernels.hopper, pallas_kernels.ampere, blaze_jax
after = rules()
assert all(now[name] is rule for then, now in zip(before[0], after[0]) for name, rule in then.items())
assert after[1:] == before[1:]
"""


def test_an_import_changes_no_rule_of_jax_and_starts_no_thread():
    subprocess.run([sys.executable, "-c", CHANGES], check=True)


@pytest.mark.parametrize("check_vma", [True, False])
def test_results_vary_as_the_arrays_do_together(check_vma):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    numbers = jnp.arange(4.0)

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=check_vma)
    def run(same, split):
        out = kernel_launch(lambda a, b: a[:2] + b)(same, split)
        assert varying_axes(out) == varying_axes(split)
        return out

    assert_same_bits(jax.jit(run)(numbers, numbers), jnp.asarray([0.0, 2.0, 2.0, 4.0]))
