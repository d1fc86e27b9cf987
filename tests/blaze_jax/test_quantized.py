"""Pre-activations kept in 8 bits: how far the gradients are from float32's beside bfloat16's, and everywhere alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax import LoRA, MoEConfig
from blaze_jax.oracle import dense_expert_ffn
from tests.expert_problems import ON_GPUS, each_on_gpus, make_problem, on, results
from tests.layers import random_parameters, random_tokens
from tests.numerics import assert_close, assert_same_bits, scaled_error
from tests.over_devices import Way, on_one_device, over_devices
from tests.pallas_kernels.rows import needs_interpreter
from tests.routings import random_experts

over_families = on("xla", "xla_batched", pytest.param("hopper", marks=needs_interpreter), "ampere", *ON_GPUS)


@over_families
@pytest.mark.parametrize(
    ("activation", "d", "n"), [("swiglu", 72, 136), ("swiglu", 64, 256), ("gelu", 72, 136), ("clamped_swiglu", 40, 8)]
)
@pytest.mark.default_cases("swiglu-72-136-xla", "*_on_gpu")
@pytest.mark.ci_cases("gelu-72-136-ampere", "swiglu-64-256-xla_batched")
def test_gradients_are_at_most_four_times_as_far_from_float32_as_with_bfloat16(kernels, activation, d, n):
    problem = make_problem(random_experts(256, 2, range(8)), 8, d=d, n=n, activation=activation, dtype="bfloat16")
    truth = results(dense_expert_ffn, problem.cast(jnp.float32), activation=activation)
    narrow, ours, again = (kernels.results(problem, activation=activation, save=s) for s in SAVES)
    assert_same_bits(again, ours)
    for name in ("y", "b_down"):
        assert_same_bits(ours[name], narrow[name])
    for name in truth:
        errors = [scaled_error(out[name], truth[name]) for out in (narrow, ours)]
        print(f"{activation}, {d}, {n}, {name}: {errors[0]:.4f} {errors[1]:.4f} {errors[1] / errors[0]:.1f}")
        assert errors[1] < 4 * errors[0], name


SAVES = ("pre_activations", "int8", "int8")


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        *((form, dtype) for dtype in ("float32", "float64") for form in ("xla", "xla_batched")),
        *each_on_gpus(("float32",)),  # float64 is for the portable form alone
    ],
    indirect=["kernels"],
)
@pytest.mark.default_cases("xla-float32")
@pytest.mark.ci_cases("xla_batched-float32", "xla-float64")
def test_wide_layers_are_as_near_as_8_bits_are(kernels, dtype):
    with jax.enable_x64(dtype == "float64"):
        problem = make_problem(random_experts(64, 2, range(4)), 4, d=24, n=136, dtype=dtype)
        truth, ours = results(dense_expert_ffn, problem), kernels.results(problem, save="int8")
        assert {g.dtype.name for g in ours.values()} == {dtype}
        assert_close(ours["y"], truth["y"], kernels.tolerance[dtype])
        assert_close(ours, truth, 0.012)


@over_families
@pytest.mark.default_cases("xla", "*_on_gpu")
@pytest.mark.ci_cases("xla_batched")
def test_a_number_that_is_not_finite_is_seen_in_the_gradients_of_its_row_and_block(kernels):
    """And in no others: of the weights, in those of its expert and block alone."""
    experts = np.arange(8)[:, None] % 4
    problem = make_problem(experts, 4, d=8, n=264, biases=True, dtype="bfloat16")
    for value in (np.inf, -np.inf, np.nan):
        b_up = problem.params["b_up"].at[1, 130].set(value)
        out = kernels.results(problem._replace(params=problem.params | {"b_up": b_up}), save="int8")
        finite = np.isfinite(np.asarray(out["w_gate"], np.float32)).all(1)  # w_up's gradient knows nothing of it
        assert not finite[1, 130]
        assert finite[[0, 2, 3]].all()
        assert finite[1, :128].all()
        assert np.isfinite(np.asarray(out["x"], np.float32)).all(1).tolist() == [e != 1 for e in experts[:, 0]]


WAYS = {
    "permute": {"exchange": "permute"},
    "all_to_all": {"exchange": "all_to_all"},
    "keep_gathered": {"keep_gathered": True},
    "row_budget": {"row_budget": 0.5},
    "chunks": {"chunks": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.ci_cases("all_to_all")
def test_over_devices_as_on_one(way):
    config = MoEConfig(num_experts=8, experts_per_token=2, expert_width=24, save="int8", mean_experts=2)
    params, x = random_parameters(config, use_bias=True), random_tokens(64)
    out = over_devices(Way({"data": 2, "expert": 2}, options=WAYS[way]), params, x, config)
    assert_close(out, on_one_device(params, x, config))


def test_not_with_adapters():
    with pytest.raises(ValueError, match="save='int8' is not for adapters"):
        MoEConfig(num_experts=4, experts_per_token=2, expert_width=8, save="int8", adapter=LoRA(rank=2))
