"""Work of kernels by name, and their rates against what the device reaches."""

import jax
import jax.numpy as jnp
import pytest

from blaze_jax.benchmark import rates
from blaze_jax.benchmark.rates import COPY, DENSE, Ceilings, kernel_records, kernel_work, run_record, work_of
from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.benchmark.tables import terminal
from blaze_jax.benchmark.timing import KernelTotal

SIZES = Sizes(1000, 64, 32, 8, 2)


def test_the_products_of_all_kernels_are_the_pass():
    table = kernel_work(SIZES, 2)
    products = [name for name in table if "combine" not in name and "dispatch" not in name]
    assert sum(table[name].flops for name in products) == 3 * SIZES.forward_flops


def test_a_kernel_is_found_by_the_name_that_the_compiler_made_of_it():
    table = kernel_work(SIZES, 2)
    assert work_of("moe_down_backward_mosaic_gpu_2", table) == table["moe_down_backward"]
    assert work_of("input_reduce_fusion", table) is None


def test_rates_and_the_ceiling_that_binds():
    kernels = {"moe_combine_mosaic_gpu": KernelTotal(2, 1.0), "moe_up_projection": KernelTotal(1, 4.0)}
    records = kernel_records(kernels | {"fusion": KernelTotal(3, 2.0)}, SIZES, 2, Ceilings(tflops=10.0, gbs=1e6))
    assert [r["name"] for r in records] == ["moe_up_projection", "fusion", "moe_combine_mosaic_gpu"]
    up, fusion, combine = records
    flops = 2 * 2 * 2000 * 64 * 32
    assert up["tflops"] == pytest.approx(flops / 4e-6 / 1e12)
    assert (up["ceiling"], up["share_of_ceiling"]) == (DENSE, pytest.approx(flops / 4e-6 / 10e12))
    assert "tflops" not in fusion
    num_bytes = 2 * (2000 * 64 * 2 + 1000 * 64 * 2 + 4 * 2000)  # once in each direction
    assert combine["gbs"] == pytest.approx(num_bytes / 1e-6 / 1e9)
    assert Ceilings(1e6, 1.0).least_us(0.0, 1e3) == (pytest.approx(1.0), COPY)


@pytest.mark.slow
@pytest.mark.parametrize("watts", [600.0, None])
def test_kernels_alone_have_rates_and_energies_next_to_the_dense_product(monkeypatch, watts):
    def take_turns(calls, **_):
        jax.block_until_ready([call() for call in calls.values()])
        return {name: {"us": 3.0, "mhz": 1400.0, "watts": watts} for name in calls}

    monkeypatch.setattr(rates, "take_turns", take_turns)
    record = rates.measure_kernels(Sizes(16, 8, 4, 3, 2), jnp.dtype("float32"), repeats=1)
    product, alone = 2.0 * 32 * 8 * 4, record["alone"]
    assert sum(name.startswith("moe_") for name in alone) == 6
    up = alone["moe_up_projection"]
    assert (up["us"], up["tflops"]) == (3.0, pytest.approx(2 * product / 3e6))
    assert up["pj_per_flop"] == (watts and pytest.approx(3 * watts * 1e6 / (2 * product)))
    less_copies = run_record({"us": 3.0, "watts": watts}, product, {"us": 1.0, "watts": watts and 500.0})
    assert less_copies["tflops"] == pytest.approx(product / 2e6)
    assert less_copies["pj_per_flop"] == (watts and pytest.approx((3 * watts - 500) * 1e6 / product))
    shown = next(line for line in terminal(record).splitlines() if "moe_up_projection" in line).split()
    of_dense = 2 * product / alone[DENSE]["tflops"] / 3e6
    assert shown[3] == f"{of_dense:.0%}"
    assert shown[4:] == (["1400", "600", f"{up['pj_per_flop']:.3f}", f"{1 / of_dense:.0%}"] if watts else ["1400"])
