"""Rows in 8 bits against the definition of e4m3, and experts that multiply them against those that do not round."""

import re
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax import MoEConfig, Router, expert_ffn
from blaze_jax.activations import ACTIVATION_NAMES, get_activation
from blaze_jax.implementation import demanded_family
from blaze_jax.linen import MoE
from blaze_jax.oracle import dense_expert_ffn
from blaze_jax.precision import fp8_everywhere
from pallas_kernels import fp8, hopper
from pallas_kernels.compile_only import compile_for_gpu
from pallas_kernels.hopper.fp8 import down_weights, quantize, quantize_columns, quantize_together
from pallas_kernels.hopper.quantization import packed_width, unpaired_column
from tests.expert_problems import make_problem, results
from tests.numerics import assert_close, assert_same_bits, scaled_error
from tests.routings import ROUTINGS, random_experts

REFUSALS = [
    ({"precision": "fp4"}, ValueError, "precision='fp4' must be None or one of fp8"),
    ({"precision": "fp8", "implementation": "mosaic_gpu"}, NotImplementedError, "multiples of 16, got model width 32"),
]


def rows(*shape, seed=0):
    """Rows of all magnitudes, one of zeros, and two with what 8 bits cannot hold."""
    keys = jax.random.split(jax.random.key(seed), 2)
    values = jax.random.normal(keys[0], shape) * jnp.exp(9 * jax.random.normal(keys[1], (*shape[:-1], 1)))
    values = values.at[..., 1, :].set(0).at[..., 2, 3].set(jnp.inf).at[..., 3, 5].set(jnp.nan)
    return values.astype(jnp.bfloat16)


def test_a_rows_numbers_have_the_four_digits_of_e4m3_at_its_scale():
    x = np.asarray(rows(40, 48), np.float32)
    (scaled,) = fp8.quantize(jnp.asarray(x))
    scales, values = np.asarray(scaled.scales), np.asarray(scaled.values, np.float32)
    known = np.isfinite(x).all(-1)
    np.testing.assert_array_equal(np.isnan(scales), ~known)
    assert set(np.frexp(scales[known])[0]) == {0.5}  # powers of two
    largest = np.abs(values[known]).max(-1)
    assert ((largest >= 128) & (largest <= 256) | (largest == 0)).all()
    step = np.maximum(2.0 ** np.floor(np.log2(np.maximum(np.abs(values), 1e-9))), 2.0**-6) / 8
    error = np.abs(values * scales[:, None] - x)[known]
    assert (error <= (step * scales[:, None])[known] / 2).all()
    (decoded,) = fp8.rounded(-1, jnp.asarray(x))
    np.testing.assert_array_equal(np.asarray(decoded)[known], (values * scales[:, None])[known])
    gradient = jax.grad(lambda x: (fp8.rounded(-1, x)[0] * 3).sum())(jnp.ones((2, 16)))
    np.testing.assert_array_equal(gradient, np.full((2, 16), 3))


@pytest.mark.parametrize("width", [16, 1040])
def test_the_kernel_gives_the_same_bits_and_one_scale_for_several_arrays(width):
    arrays = rows(2, 30, width), rows(2, 30, width, seed=1)
    with hopper.interpreted():
        found = quantize(*arrays)
    for ours, theirs in zip(found, fp8.quantize(*arrays), strict=True):
        assert_same_bits(ours.scales, theirs.scales)
        known = np.isfinite(theirs.scales)
        values = np.asarray(theirs.values).view(np.uint16)
        np.testing.assert_array_equal(np.asarray(ours.values).view(np.uint16)[known], values[known])


@pytest.mark.parametrize(
    ("count", "width", "in_place", "columns"),
    [(2, 48, False, 48), (2, 1040, True, 1040), (1, 1040, True, 520), (1, 1152, True, 1152)],
)
@pytest.mark.default_cases("2-48-*", "2-1040-*")
def test_rows_of_several_arrays_lie_side_by_side(count, width, in_place, columns):
    arrays = [rows(30, width, seed=seed) for seed in range(count)]
    with hopper.interpreted():
        found = quantize_together(*arrays, in_place=in_place)
    theirs = fp8.quantize(*arrays)
    assert found.values.shape == (30, columns)
    assert_same_bits(found.scales, theirs[0].scales)
    known = np.isfinite(found.scales)
    expected = np.concatenate([np.asarray(scaled.values).view(np.uint16) for scaled in theirs], axis=1)
    own = np.asarray(found.values).view(np.uint16)[:, : expected.shape[1]]
    np.testing.assert_array_equal(own[known], expected[known])


@pytest.mark.parametrize(
    ("a", "b", "columns", "most_bytes"),
    [(2064, 48, 32, 2**18), (528, 48, 16, 2**16), (16, 16, 8, 2**15)],
)
@pytest.mark.default_cases("528-*")
@pytest.mark.ci_cases("*")
def test_weights_are_quantized_along_columns_to_the_same_bits(a, b, columns, most_bytes, monkeypatch):
    monkeypatch.setattr("pallas_kernels.hopper.fp8.num_sms", lambda: 1)  # so that blocks take several slabs
    weights = rows(3, b, a).swapaxes(1, 2)
    (theirs,) = fp8.quantize(weights, axis=1)
    with hopper.interpreted():
        ours = quantize_columns(weights, columns=columns, most_bytes=most_bytes)
    assert_same_bits(ours.scales, theirs.scales)
    known = np.isfinite(theirs.scales)
    values = np.asarray(theirs.values.swapaxes(1, 2)).view(np.uint16)
    np.testing.assert_array_equal(np.asarray(ours.values).view(np.uint16)[known], values[known])
    with pytest.raises(ValueError, match=f"most_bytes=512 must hold {2 * columns * a} bytes, a slab of"):
        quantize_columns(weights, columns=columns, most_bytes=512)


@pytest.fixture(autouse=True)
def small_sizes():
    with fp8_everywhere():
        yield


@pytest.fixture(scope="module")
def problem():
    return make_problem(random_experts(40, 2, range(3)), 3, d=48, n=80, biases=False, dtype="bfloat16")


@pytest.fixture(scope="module")
def portable(problem):
    with fp8_everywhere():
        return results(partial(expert_ffn, implementation="xla"), problem, precision="fp8")


UNBOUNDED = replace(get_activation("swiglu"), bound=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "activation", "save"),
    [
        (80, "swiglu", "pre_activations"),
        (144, "swiglu", "int8"),
        (208, "gelu", "pre_activations"),
        (128, "swiglu", "inputs"),
        (128, UNBOUNDED, "inputs"),  # rows of 128 are quantized in place
    ],
)
def test_hoppers_products_are_the_portable_ones(n, activation, save):
    options: dict[str, Any] = {"activation": activation, "precision": "fp8", "save": save}
    gated = get_activation(activation).name
    experts = random_experts(40, 2, range(3))
    problem = make_problem(experts, 3, d=48, n=n, activation=gated, biases=False, dtype="bfloat16")
    portable = results(partial(expert_ffn, implementation="xla"), problem, **options)
    with hopper.interpreted():
        found = results(partial(expert_ffn, implementation="mosaic_gpu"), problem, **options)
    assert_close(found, portable)


@pytest.mark.gpu
@pytest.mark.parametrize("save", ["pre_activations", "int8"])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.default_cases("*")
def test_every_routing_gives_the_portable_numbers_on_a_gpu(routing, save):
    problem = make_problem(*ROUTINGS[routing], d=320, n=272, biases=save == "int8", dtype="bfloat16")
    options = {"precision": "fp8", "save": save}
    portable, found, again = (
        results(partial(expert_ffn, implementation=name), problem, **options)
        for name in ("xla", "mosaic_gpu", "mosaic_gpu")
    )
    # An activation that is rounded to the next number of 16 bits, here or there, may be one to the next of 8 bits.
    assert_close(found, portable, tolerance=4e-2)
    assert_same_bits(found, again)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "activation"), [(144, "swiglu"), (208, "gelu")])
def test_activations_with_biases_have_the_bits_of_the_portable_form(n, activation):
    experts = random_experts(40, 2, range(3))
    problem = make_problem(experts, 3, d=48, n=n, activation=activation, dtype="bfloat16")
    options: dict[str, Any] = {
        "weights": problem.weights,
        "experts": experts,
        "activation": activation,
        **problem.params,
    }
    options["precision"] = "fp8"
    portable = expert_ffn(problem.x, **options, implementation="xla")
    with hopper.interpreted():
        found = jax.jit(partial(expert_ffn, **options, implementation="mosaic_gpu"))(problem.x)
    assert_close(found, portable, tolerance=1e-4)


@pytest.mark.parametrize("name", ACTIVATION_NAMES)
def test_no_activation_is_larger_than_its_bound(name):
    activation = get_activation(name)
    most = np.array([1e-3, 0.3, 2, 9, 100], np.float32)
    grid = [np.linspace(-1, 1, 41, dtype=np.float32)] * (1 + activation.gated)
    for limits in product(most, repeat=len(grid)):
        pre = np.meshgrid(*(limit * axis for limit, axis in zip(limits, grid, strict=True)))
        largest = np.abs(activation.function(*map(jnp.asarray, pre))).max()
        assert activation.bound is not None
        assert largest <= np.asarray(activation.bound(*map(jnp.asarray, limits))) * (1 + 1e-6)


def test_scales_of_a_bound_have_four_digits_and_leave_room_for_what_rounding_adds():
    of_tokens = jnp.array([0, 1e-30, 0.7, 1, 3.3, 1e12, 1e30, jnp.inf, jnp.nan], jnp.float32)
    scales = np.asarray(fp8.bounded_scales(jnp.multiply, of_tokens, [2.0, 3.0, 0.0, 0.5]))
    bounds = np.asarray(2 * of_tokens * (3 * of_tokens + 0.5), np.float64)
    known = np.isfinite(bounds) & (bounds < 3e38)
    np.testing.assert_array_equal(np.isnan(scales), ~known)
    digits = np.frexp(scales[known])[0] * 16
    np.testing.assert_array_equal(digits, np.round(digits))
    assert (bounds[known] / scales[known] <= 320 * (1 + 1e-6)).all()
    assert (bounds / scales)[2:6].min() > 320 * 8 / 9


def test_tokens_that_are_aligned_with_all_weights_do_not_overflow():
    """The bound is met: every product of a token and a column is that of their norms."""
    d, n = 64, 48
    direction = np.sign(np.random.default_rng(0).standard_normal(d)) * np.linspace(0.55, 0.99, d)
    x = jnp.asarray(np.outer([1, -1, 1e3, 1e-3, 1e-30, 0], direction), jnp.bfloat16)
    up = jnp.asarray(np.broadcast_to(direction[:, None], (d, n)), jnp.bfloat16)[None]
    params = {"w_gate": up, "w_up": up, "w_down": jnp.full((1, n, d), 1 / n, jnp.bfloat16)}
    options = {"weights": jnp.ones((6, 1)), "experts": jnp.zeros((6, 1), jnp.int32), "activation": "reglu"}
    found, exact = (np.asarray(expert_ffn(x, **params, **options, precision=p), np.float32) for p in ("fp8", None))
    np.testing.assert_allclose(found, exact, rtol=0.3)
    assert exact[2].min() > 1e5


@pytest.mark.parametrize("n", [144, 48])
def test_pairs_of_columns_and_sums_of_squares(n):
    weights = rows(2, 32, n).swapaxes(1, 2)
    (theirs,) = fp8.quantize(weights, axis=1)
    places = 2 * packed_width(n)
    with hopper.interpreted():
        ours = down_weights(weights, jnp.bfloat16, bounded=True)
        _, squares = quantize_columns(weights, columns=16, squares=True)
    assert_same_bits(ours.scales, theirs.scales)
    known = np.isfinite(theirs.scales)
    values = np.asarray(ours.values).view(np.uint8)
    assert values.shape[-1] == places
    bytes_of = np.asarray(theirs.values.swapaxes(1, 2)).view(np.uint8)
    order = unpaired_column(np.arange(places))
    assert sorted(order[order < n]) == list(range(n))
    expected = np.where(order < n, bytes_of[..., np.minimum(order, n - 1)], 0)
    np.testing.assert_array_equal(values[known], expected[known])
    exact = np.square(np.asarray(weights, np.float64)).sum(1)
    np.testing.assert_allclose(np.asarray(squares)[known], exact[known], rtol=1e-6)


def test_errors_are_those_of_three_roundings_and_weight_gradients_follow(problem, portable):
    exact = results(dense_expert_ffn, problem.cast(jnp.float32))
    errors = {name: scaled_error(portable[name], exact[name]) for name in exact}
    # Rounding is 2.6% of a number; an output has that of tokens, of weights twice, and of what is between the products.
    assert 0.03 < errors["y"] < 0.08, errors
    assert max(errors.values()) < 0.1, errors


def test_an_infinite_token_shows_in_its_own_output_alone(problem):
    infinite = problem._replace(x=problem.x.at[7, 3].set(jnp.inf))
    y = expert_ffn(infinite.x, weights=infinite.weights, experts=infinite.experts, precision="fp8", **infinite.params)
    assert np.isnan(np.asarray(y, np.float32)[7]).all()
    assert np.isfinite(np.delete(np.asarray(y, np.float32), 7, axis=0)).all()


@pytest.mark.slow
def test_a_layer_takes_the_precision_of_its_configuration():
    x = jax.random.normal(jax.random.key(0), (2, 12, 32), jnp.bfloat16)
    config = MoEConfig(num_experts=4, experts_per_token=2, expert_width=48, load_balancing_weight=0.0)
    layers = [MoE(replace(config, precision=precision), dtype=jnp.bfloat16) for precision in (None, "fp8")]
    variables = layers[0].init(jax.random.key(1), x)
    plain, rounded = (np.asarray(layer.apply(variables, x), np.float32) for layer in layers)
    assert 0.01 < scaled_error(rounded, plain) < 0.1


@pytest.mark.compile_only
@pytest.mark.parametrize(("activation", "save"), [("swiglu", "pre_activations"), ("gelu", "inputs")])
def test_kernels_spill_nothing(activation, save):
    problem = make_problem(random_experts(256, 2, range(4)), 4, d=512, n=1024, activation=activation, dtype="bfloat16")
    layer = partial(expert_ffn, implementation="mosaic_gpu")
    compiled = compile_for_gpu(partial(results, layer, activation=activation, precision="fp8", save=save), problem)
    names = {kernel.name for kernel in compiled.kernels}
    assert {"moe_quantize", "moe_quantize_columns", "moe_up_projection", "moe_up_backward"} <= names
    assert compiled.spill_bytes == {}
    program = compiled.executable.as_text()
    assert program
    assert not re.search(r"bf16\[4,\d+,\d+\]\S* transpose\(", program)  # of weights


@pytest.mark.parametrize(("options", "error", "message"), REFUSALS)
def test_what_cannot_be_is_refused(options, error, message):
    problem = make_problem(random_experts(8, 2, range(3)), 3, d=32, n=24, biases=False, dtype="bfloat16")
    with pytest.raises(error, match=message):
        results(expert_ffn, problem, **options)


def test_other_gpus_and_dense_training_are_refused():
    problem = make_problem(random_experts(8, 2, range(3)), 3, d=32, n=32, biases=False, dtype="bfloat16")
    with demanded_family("ampere"), pytest.raises(NotImplementedError, match="needs an NVIDIA Hopper GPU"):
        results(expert_ffn, problem, precision="fp8", implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="precision='fp8' must be None with train='dense'"):
        MoEConfig(
            num_experts=4,
            experts_per_token=2,
            expert_width=48,
            router=Router(train="dense", normalize_weights=False),
            precision="fp8",
        )
