"""The layer on the kernels for every GPU since Ampere: in their interpreter, and on a GPU in the tests of Hopper's."""

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import P

from blaze_jax import expert_ffn
from blaze_jax.oracle import dense_expert_ffn
from pallas_kernels import ampere
from tests.blaze_jax.test_experts_hopper import (
    KERNELS,
    test_checkpoint_scan_and_a_jitted_optax_step,
    test_every_activation_with_biases,
    test_every_dtype,
    test_every_routing,
    test_layers_stacked_by_scan,
    test_more_elements_than_32_bits_count,
    test_nan_token_poisons_no_other_row_or_expert,
    test_same_bits_on_every_run_and_in_both_save_modes,
    test_sizes,
)
from tests.expert_problems import apply, lowered, make_problem, results
from tests.numerics import assert_close, assert_same_bits
from tests.routings import ROUTINGS

__all__ = [
    "test_checkpoint_scan_and_a_jitted_optax_step",
    "test_every_activation_with_biases",
    "test_every_dtype",
    "test_every_routing",
    "test_layers_stacked_by_scan",
    "test_more_elements_than_32_bits_count",
    "test_nan_token_poisons_no_other_row_or_expert",
    "test_same_bits_on_every_run_and_in_both_save_modes",
    "test_sizes",
]


@pytest.fixture(autouse=True)
def a100(monkeypatch):
    """An A100, as far as the choice of the kernels goes; what was traced for another GPU is forgotten."""
    monkeypatch.setattr("blaze_jax.implementation.compute_capability", lambda: "8.0")
    jax.clear_caches()
    yield
    jax.clear_caches()


def problem_of(dtype, **options):
    case = ROUTINGS["empty_slots"]
    return make_problem(case.experts, case.num_experts, d=24, n=40, dtype=dtype, **options)


def set_mesh():
    return jax.set_mesh(jax.make_mesh((1,), ("data",)))


@pytest.mark.parametrize(
    ("save", "biases", "dtype", "limit"),
    [
        ("pre_activations", True, "float32", 2e-3),
        ("pre_activations", True, "bfloat16", 2e-2),
        ("inputs", False, "float16", 5e-3),
    ],
)
def test_layer_matches_the_oracle_with_the_same_bits_twice(save, biases, dtype, limit):
    problem = problem_of(dtype, biases=biases)
    with ampere.interpreted():
        out, again = (results(expert_ffn, problem, implementation="mosaic_gpu", save=save) for _ in range(2))
    assert_same_bits(out, again)
    for name, value in results(dense_expert_ffn, problem.cast(jnp.float32)).items():
        assert_close(out[name], value, limit)


@pytest.mark.parametrize(("check_vma", "split"), [(True, "tokens"), (True, "nothing"), (False, "tokens")])
def test_inside_shard_map(check_vma, split):
    case = ROUTINGS["random"]
    problem = make_problem(case.experts[:36], case.num_experts, d=24, n=40)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    by_token = P("data") if split == "tokens" else P()

    def loss(x, params, weights, experts, target, **options):
        return jnp.square(apply(expert_ffn, x, params, weights, experts, **options) - target).sum()

    @partial(jax.shard_map, mesh=mesh, in_specs=(by_token, P(), *[by_token] * 3), out_specs=P(), check_vma=check_vma)
    def over_devices(*arguments):
        value = loss(*arguments, implementation="mosaic_gpu")
        return jax.lax.psum(value, "data") if split == "tokens" else value

    with ampere.interpreted():
        found = jax.jit(jax.value_and_grad(over_devices, argnums=(0, 1, 2)))(*problem)
    expected = jax.value_and_grad(partial(loss, implementation="xla"), argnums=(0, 1, 2))(*problem)
    assert_close(found, expected, 2e-3)


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(("dtype", "mesh"), [("float32", nullcontext), ("bfloat16", set_mesh)])
def test_forward_and_backward_lower_for_cuda(dtype, mesh):
    with mesh():
        text = lowered("cuda", problem_of(dtype), implementation="mosaic_gpu")
    for kernel in KERNELS:
        assert kernel in text, kernel
