"""Compiling for the H200 without one, and reading the assembler's report."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compile_only
from pallas_kernels.compile_only import absent_host, compile_for_gpu, on_gpu
from pallas_kernels.compile_only.ptxas_report import KernelReport, captured_ptxas_report, parse_ptxas_report


def scale_kernel(x):
    """`x · Σx` with all of x in the registers of 128 threads at once."""

    def moe_scale(x_ref, y_ref):
        values = x_ref[...]
        y_ref[...] = values * values.sum()

    return plgpu.kernel(moe_scale, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_without_the_plugin_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(compile_only, "find_spec", lambda name: None)
    absent_host.cache_clear()
    with pytest.raises(NotImplementedError, match=r"cannot compile for the h200: .*blaze_jax\[compile-only\]"):
        on_gpu(jnp.zeros(3))


@pytest.mark.compile_only
def test_placement_is_on_an_h200_and_leaves_jax_where_it_computes():
    devices, environment = jax.devices(), dict(os.environ)
    placed = on_gpu({"a": jnp.zeros((3, 5), jnp.bfloat16)})["a"]
    assert (placed.shape, placed.dtype) == ((3, 5), jnp.bfloat16)
    (device,) = placed.sharding.device_set
    assert (device.device_kind, device.compute_capability) == ("NVIDIA H200", "9.0")
    assert jax.devices() == devices
    assert device not in devices
    assert dict(os.environ) == environment


@pytest.mark.compile_only
@pytest.mark.parametrize("function", [scale_kernel, jax.jit(scale_kernel)], ids=["plain", "jitted"])
def test_a_kernel_that_fits_the_registers_is_reported_each_time(function):
    compiled, again = (compile_for_gpu(function, array(128, 64)) for _ in range(2))
    (kernel,) = compiled.kernels
    assert kernel.name == "moe_scale"
    assert 64 < kernel.registers < 255
    assert kernel.spill_bytes == 0
    assert compiled.spill_bytes == {}
    assert again.kernels == compiled.kernels


@pytest.mark.compile_only
def test_a_program_that_is_in_the_users_cache_is_compiled_again():
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        plans = [compile_for_gpu(lambda x: jnp.sort(x) @ x.T, array(64, 64)).memory for _ in range(2)]
    finally:
        jax.config.update(name, before)
    assert plans[0].temp_size_in_bytes == plans[1].temp_size_in_bytes > 0


@pytest.mark.compile_only
def test_a_kernel_that_does_not():
    compiled = compile_for_gpu(scale_kernel, array(128, 512))
    (kernel,) = compiled.kernels
    assert kernel.registers == 255
    assert kernel.spill_store_bytes > 4 * (512 - 255)
    assert compiled.spill_bytes == {"moe_scale": kernel.spill_store_bytes + kernel.spill_load_bytes}


@pytest.mark.compile_only
def test_memory_plan_of_a_program_without_kernels():
    compiled = compile_for_gpu(lambda x: jnp.cumsum(x, axis=1), array(64, 32), donate_argnums=0)
    size = 4 * 64 * 32
    memory = compiled.memory
    assert (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.alias_size_in_bytes) == (size,) * 3
    assert compiled.kernels == ()


@pytest.mark.compile_only
def test_no_report_is_an_error_not_an_absence_of_spills(monkeypatch):
    monkeypatch.setattr("pallas_kernels.compile_only.ptxas_report.parse_ptxas_report", lambda text: [])
    with pytest.raises(RuntimeError, match="ptxas reported on none of 1 kernels"):
        compile_for_gpu(scale_kernel, array(128, 64))


@pytest.mark.compile_only
def test_a_process_compiles_for_one_compute_capability():
    compile_for_gpu(jnp.sin, array(8))
    with pytest.raises(RuntimeError, match=r"gpu='a100' needs a process of its own: .* capability \(9, 0\)"):
        compile_for_gpu(jnp.sin, array(8), gpu="a100")


REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'moe_combine_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for moe_combine_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1 bytes smem
ptxas info    : Compile time = 32.403 ms

ptxas /tmp/t-1, line 192; info    : Potential out of bound access while accessing symbol 's' of type '.b8'.
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'other' for 'sm_90a'
ptxas info    : Function properties for other
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 16 bytes cumulative stack size, 1 bytes smem
"""
KERNELS = [KernelReport("moe_combine", 40, 0, 0, 0), KernelReport("other", 168, 16, 12, 8)]


def test_one_entry_per_kernel():
    assert parse_ptxas_report(REPORT) == KERNELS
    assert [k.spill_bytes for k in KERNELS] == [0, 20]
    assert parse_ptxas_report("nothing of the kind") == []


def test_captures_what_native_code_prints_and_nothing_after(capfd):
    print("before")
    with captured_ptxas_report() as kernels:
        os.write(1, REPORT.encode())
        assert kernels == []
    print("after")
    assert kernels == KERNELS
    assert capfd.readouterr().out == "before\nafter\n"
