"""Combine: each token's rows, weighted and added up, written to a block of columns; portable and as a kernel."""

import contextlib
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hopper, simt, xla
from tests.numerics import TOLERANCE, assert_close, assert_same_bits
from tests.pallas_kernels.rows import wide

RUNS = [
    pytest.param((xla.combine, contextlib.nullcontext), id="xla"),
    pytest.param((partial(hopper.combine, blocks=2), simt.interpreted), id="interpreter"),
    pytest.param((hopper.combine, contextlib.nullcontext), id="gpu", marks=pytest.mark.gpu),
]


both_forms = pytest.mark.default_cases("*")


@pytest.fixture(params=RUNS)
def combine(request):
    function, running = request.param
    with running():
        yield function


def problem(dtype, slots=3, rows=50, tokens=37, width=24, seed=0):
    rng = np.random.default_rng(seed)
    values = jnp.asarray(rng.standard_normal((rows, width)), dtype)
    positions = jnp.asarray(rng.integers(0, rows + 8, (tokens, slots), np.int32))  # those past the last row are empty
    weights = jnp.asarray(rng.random((tokens, slots)), jnp.float32)
    before = jnp.asarray(rng.standard_normal((tokens, 2 * width)), dtype)
    return values, positions, weights, before


def looped(values, positions, weights=None):
    out = np.zeros((len(positions), values.shape[1]))
    for (token, slot), position in np.ndenumerate(positions):
        if position < len(values):
            weight = 1 if weights is None else wide(weights)[token, slot]
            out[token] += weight * wide(values)[position]
    return out


@pytest.mark.parametrize(("slots", "width"), [(1, 24), (8, 24), (19, 264), (40, 24)])  # lanes are 32, of 8 columns
@pytest.mark.parametrize(("weighted", "adds"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.default_cases("*-bfloat16-False-False-1-24", "*-float16-True-True-40-24")
def test_sums_each_tokens_rows(combine, dtype, weighted, adds, slots, width):
    values, positions, weights, before = problem(dtype, slots, width=width)
    addend = before[:, 5 : 5 + width] if adds else None
    out = combine(values, positions, weights if weighted else None, before, 8, addend)
    assert out.dtype == dtype
    assert_same_bits((out[:, :8], out[:, 8 + width :]), (before[:, :8], before[:, 8 + width :]))
    expected = looped(values, positions, weights if weighted else None) + (wide(addend) if adds else 0)
    assert_close(out[:, 8 : 8 + width], expected, TOLERANCE[dtype])


def test_the_portable_form_takes_any_column_and_float32():
    values, positions, weights, before = problem("float32", width=23)
    out = xla.combine(values, positions, weights, before, 5)
    assert_same_bits((out[:, :5], out[:, 28:]), (before[:, :5], before[:, 28:]))
    assert_close(out[:, 5:28], looped(values, positions, weights), TOLERANCE["float32"])


@both_forms
def test_makes_an_array_where_it_gets_none(combine):
    values, positions, weights, before = problem("bfloat16")
    out = combine(values, positions, weights, None, 8, before[:, :24], width=48)
    expected = combine(values, positions, weights, before, 8, before[:, :24])
    assert out.shape == expected.shape
    assert_same_bits(out[:, 8:32], expected[:, 8:32])


@both_forms
def test_writes_some_of_the_tokens(combine):
    values, positions, weights, before = problem("bfloat16")
    out = combine(values, positions[5:20], weights[5:20], before, 8, first_token=5)
    assert_same_bits(out[5:20], combine(values, positions, weights, before, 8)[5:20])
    assert_same_bits((out[:5], out[20:]), (before[:5], before[20:]))


@both_forms
def test_slots_that_are_mostly_empty(combine):
    values, positions, weights, before = problem("bfloat16", slots=16)
    late = np.arange(16) >= 8
    positions = jnp.where(late & (np.arange(len(positions))[:, None] % 5 > 0), len(values), positions)
    out = combine(values, positions, weights, before, 8)
    assert_close(out[:, 8:32], looped(values, positions, weights), TOLERANCE["bfloat16"])


@both_forms
def test_an_empty_slot_counts_only_if_its_weight_is_nan(combine):
    values, positions, weights, before = problem("bfloat16", slots=16)
    positions, weights = positions.at[:, 8:].set(len(values)), weights.at[7, 13].set(jnp.nan)
    out = wide(combine(values, positions.at[6].set(len(values)), weights, before, 8))[:, 8:32]
    assert np.flatnonzero(np.isnan(out).all(1)).tolist() == np.flatnonzero(np.isnan(out).any(1)).tolist() == [7]
    assert (out[6] == 0).all()


@both_forms
def test_rows_of_nobody_do_not_count(combine):
    values, positions, weights, before = problem("bfloat16", slots=6)
    positions = jnp.where(positions == len(values) - 1, len(values), positions)
    arguments = positions, weights.at[3, 0].set(jnp.inf), before, 8
    found = wide(combine(values.at[-1].set(jnp.nan), *arguments))[:, 8:32]
    expected = looped(values, *arguments[:2])
    assert not np.isnan(found).any()
    assert np.isinf(expected).any()
    np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))


@both_forms
def test_sums_wide(combine):
    values = jnp.array([[256.0], [1.0], [1.0]], jnp.bfloat16) * jnp.ones(8, jnp.bfloat16)
    out = combine(values, jnp.array([[0, 1, 2]]), None, jnp.zeros((1, 8), jnp.bfloat16), 0)
    assert out.tolist() == [[258.0] * 8]
    out = combine(values[1:], jnp.array([[0, 1]]), None, jnp.zeros((1, 8), jnp.bfloat16), 0, values[:1])
    assert out.tolist() == [[258.0] * 8]
