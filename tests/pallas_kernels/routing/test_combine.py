"""The combine kernel against the portable form, in the interpreter anywhere and on a Hopper GPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hopper, simt, xla
from tests.numerics import TOLERANCE, assert_close, assert_same_bits


def interpret(*arguments):
    with simt.interpreted():
        return hopper.combine(*arguments, blocks=2)


RUNS = [pytest.param(interpret, id="interpreter"), pytest.param(hopper.combine, id="gpu", marks=pytest.mark.gpu)]
over_runs = pytest.mark.parametrize("run", RUNS)


def problem(dtype, slots=3, rows=50, tokens=37, width=24, seed=0):
    rng = np.random.default_rng(seed)
    values = jnp.asarray(rng.standard_normal((rows, width)), dtype)
    positions = jnp.asarray(rng.integers(0, rows + 8, (tokens, slots), np.int32))  # those past the last row are empty
    weights = jnp.asarray(rng.random((tokens, slots)), jnp.float32)
    before = jnp.asarray(rng.standard_normal((tokens, 2 * width)), dtype)
    return values, positions, weights, before


@over_runs
@pytest.mark.parametrize(("slots", "width"), [(1, 24), (8, 24), (19, 264), (40, 24)])  # lanes are 32, of 8 columns
@pytest.mark.parametrize(("weighted", "adds"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_each_tokens_rows(run, dtype, weighted, adds, slots, width):
    values, positions, weights, before = problem(dtype, slots, width=width)
    addend = before[:, 5 : 5 + width] if adds else None
    arguments = (values, positions, weights if weighted else None, before, 8, addend)
    out = run(*arguments)
    assert out.dtype == dtype
    assert_same_bits((out[:, :8], out[:, 8 + width :]), (before[:, :8], before[:, 8 + width :]))
    assert_close(out, xla.combine(*arguments), TOLERANCE[dtype])


@over_runs
def test_slots_that_are_mostly_empty(run):
    values, positions, weights, before = problem("bfloat16", slots=16)
    late = np.arange(16) >= 8
    positions = jnp.where(late & (np.arange(len(positions))[:, None] % 5 > 0), len(values), positions)
    out = run(values, positions, weights, before, 8)
    assert_close(out, xla.combine(values, positions, weights, before, 8), TOLERANCE["bfloat16"])


@over_runs
def test_a_nan_weight_shows_where_all_slots_beside_it_are_empty(run):
    values, positions, weights, before = problem("bfloat16", slots=16)
    positions, weights = positions.at[:, 8:].set(len(values)), weights.at[7, 13].set(jnp.nan)
    out = run(values, positions, weights, before, 8)
    nan = np.isnan(np.asarray(out[:, 8:32], np.float32))
    assert np.flatnonzero(nan.all(1)).tolist() == np.flatnonzero(nan.any(1)).tolist() == [7]


@over_runs
def test_rows_of_nobody_do_not_count(run):
    values, positions, weights, before = problem("bfloat16", slots=6)
    positions = jnp.where(positions == len(values) - 1, len(values), positions)
    arguments = positions, weights.at[3, 0].set(jnp.inf), before, 8
    out = run(values.at[-1].set(jnp.nan), *arguments)
    found, expected = (np.asarray(a, np.float32) for a in (out, xla.combine(values, *arguments)))
    assert not np.isnan(found).any()
    assert np.isinf(expected).any()
    np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))
