"""A kernel is assembled while the program around it is still lowered."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper  # noqa: F401  (from here on, kernels are assembled early)
from pallas_kernels.compile_only import on_gpu
from pallas_kernels.compile_only.ptxas_report import captured_ptxas_report
from pallas_kernels.mosaic.early_assembly import begun


@pytest.fixture
def unique_kernel():
    """A kernel that no process has seen, so that no cache holds it."""
    number = float(int.from_bytes(os.urandom(3)))

    def moe_add(x_ref, y_ref):
        y_ref[...] = x_ref[...] + number

    return lambda x: plgpu.kernel(moe_add, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@pytest.mark.compile_only
@pytest.mark.parametrize("early", [True, False])
def test_a_program_finds_its_kernel_assembled(monkeypatch, unique_kernel, early):
    if not early:
        monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    lowered = jax.jit(unique_kernel).lower(on_gpu(jnp.zeros((128, 64), jnp.float32)))
    for assembly in begun.values():
        assembly.result()
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    with captured_ptxas_report() as assembled:
        lowered.compile()
    assert [kernel.name for kernel in assembled] == ([] if early else ["moe_add"])
