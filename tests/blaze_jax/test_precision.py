"""Where `precision="fp8"` multiplies 8 bits, and where it warns and does not; and over devices as on one."""

import warnings
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax import MoEConfig, expert_ffn
from blaze_jax.precision import LEAST_ROWS, LEAST_WIDTH, fp8_everywhere, kernels_in_fp8, why_fp8_loses
from pallas_kernels import xla
from tests.expert_problems import make_problem, results
from tests.layers import layer, random_parameters, random_tokens
from tests.numerics import assert_close, assert_same_bits, scaled_error
from tests.over_devices import Way, on_one_device, over_devices
from tests.routings import random_experts

X = jax.ShapeDtypeStruct((32768, 4096), jnp.bfloat16)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((1024, 4096, 128, 32768 * 8), None),
        ((LEAST_WIDTH, LEAST_WIDTH, 64, 64 * LEAST_ROWS), None),
        ((LEAST_WIDTH, LEAST_WIDTH, 16, 65536), None),
        ((LEAST_WIDTH, LEAST_WIDTH, 16, 65535), "less than 65536 rows of all experts together are faster so"),
        ((4096, LEAST_WIDTH, 2, 8192), "these have 8192"),
        ((256, 1536, 128, 32768 * 8), "model width 1536 and expert width 256"),
        ((4096, 512, 16, 65536), "model width 512 and expert width 4096"),
        ((1024, 4096, 128, 4096 * 8), "these have 256 on average"),
    ],
)
@pytest.mark.default_cases("*")
def test_the_rule_by_widths_and_rows(sizes, reason):
    found = why_fp8_loses(X, *sizes)
    assert found == reason if reason is None else reason in found


@pytest.mark.parametrize("rows", [8, 4096])
def test_only_programs_of_more_rows_than_experts_warn(rows):
    w_down = jax.ShapeDtypeStruct((16, LEAST_WIDTH, LEAST_WIDTH), jnp.bfloat16)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert kernels_in_fp8(xla, X, (w_down,), rows) is xla
    assert [str(warning.message)[-12:] for warning in warned] == ["6 on average"] * (rows > 16)


@pytest.fixture(scope="module")
def problem():
    return make_problem(random_experts(40, 2, range(3)), 3, d=48, n=80, biases=False, dtype="bfloat16")


def test_where_it_loses_experts_multiply_16_bits_and_a_warning_says_so_once(problem):
    run = partial(results, expert_ffn, problem)
    with pytest.warns(UserWarning, match="precision='fp8' is left out, and experts multiply bfloat16: widths of less"):
        narrow = run(precision="fp8")
    assert_same_bits(narrow, run())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_bits(run(precision="fp8"), narrow)
    with fp8_everywhere():
        forced = results(partial(expert_ffn), problem, precision="fp8")
    assert 0.02 < scaled_error(forced["y"], narrow["y"]) < 0.1
    eager = partial(expert_ffn, weights=problem.weights, experts=problem.experts, precision="fp8", **problem.params)
    assert_same_bits(eager(problem.x), narrow["y"])  # traces of both are kept apart
    with fp8_everywhere():
        assert_same_bits(eager(problem.x), forced["y"])


WAYS = {
    "permute": ({"data": 2, "expert": 2}, {"exchange": "permute"}),
    "all_to_all": ({"expert": 2}, {"exchange": "all_to_all"}),
    "row_budget": ({"expert": 2}, {"row_budget": 0.5}),
    "fsdp": ({"fsdp": 2}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.ci_cases("permute")
def test_over_devices_as_on_one(way):
    config = MoEConfig(num_experts=8, experts_per_token=2, expert_width=24, precision="fp8", mean_experts=2)
    params, x = random_parameters(config, use_bias=True), random_tokens(64)
    axes, options = WAYS[way]
    with fp8_everywhere():
        out = over_devices(Way(axes, options=options), params, x, config)
        expected = on_one_device(params, x, config)
    assert_close(out, expected)
    plain, _ = layer(x, params, replace(config, precision=None))
    assert scaled_error(np.asarray(out[0][1][0]), plain) > 0.005
