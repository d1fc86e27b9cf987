"""Combine: each token's rows, weighted and added up, written to a block of columns."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.numerics import TOLERANCE, assert_close, assert_same_bits
from tests.pallas_kernels.rows import D, wide


def looped(rows_of_tokens, positions, weights):
    out = np.zeros((len(positions), rows_of_tokens.shape[1]))
    for (token, slot), position in np.ndenumerate(positions):
        if position < len(rows_of_tokens):
            weight = 1 if weights is None else wide(weights)[token, slot]
            out[token] += weight * wide(rows_of_tokens)[position]
    return out


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    ("first", "weighted", "dtype"),
    [(5, True, "float32"), (5, False, "bfloat16"), (8, False, "float32"), (8, True, "bfloat16"), (8, False, "float16")],
)
def test_sums_each_tokens_rows(kernels, rows, dtype, weighted, first, adds):
    values, positions = rows.of_rows(D, dtype=dtype), np.asarray(rows.groups.token_index_map)
    weights = rows.normal(*positions.shape) if weighted else None
    before = rows.normal(rows.num_tokens, 2 * D, dtype=dtype)
    addend = rows.normal(rows.num_tokens, D, dtype=dtype) if adds else None
    out = kernels.combine(values, rows.groups.token_index_map, weights, before, first, addend)
    assert_same_bits((out[:, :first], out[:, first + D :]), (before[:, :first], before[:, first + D :]))
    expected = looped(values, positions, weights) + (wide(addend) if adds else 0)
    assert_close(out[:, first : first + D], expected, TOLERANCE[dtype])


def test_empty_slots_contribute_nothing_unless_nan(kernels):
    values, positions = jnp.full((3, D), 2.0, jnp.bfloat16), jnp.array([[0, 3], [3, 3], [1, 3]])
    weights = jnp.array([[0.5, 0.5], [0.5, 0.5], [0.5, jnp.nan]])
    out = kernels.combine(values, positions, weights, jnp.full((3, D), 9.0, jnp.bfloat16), 0)
    assert_same_bits(out[:2], jnp.array([[1.0], [0.0]], jnp.bfloat16) * jnp.ones(D, jnp.bfloat16))
    assert np.isnan(out[2]).all()


def test_sums_wide(kernels):
    values = jnp.array([[256.0], [1.0], [1.0]], jnp.bfloat16) * jnp.ones(8, jnp.bfloat16)
    out = kernels.combine(values, jnp.array([[0, 1, 2]]), None, jnp.zeros((1, 8), jnp.bfloat16), 0)
    assert out.tolist() == [[258.0] * 8]
    out = kernels.combine(values[1:], jnp.array([[0, 1]]), None, jnp.zeros((1, 8), jnp.bfloat16), 0, values[:1])
    assert out.tolist() == [[258.0] * 8]
