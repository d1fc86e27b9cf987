"""Down projection and its backward, through the activation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.numerics import assert_close, assert_same_bits
from tests.pallas_kernels.rows import (
    ACTIVATIONS,
    D,
    N,
    Rows,
    first_columns,
    over_dtypes_and_biases,
    over_variants,
    product,
    tolerance,
    wide,
)


def expert_outputs(rows, hidden, w_down, b_down):
    out = product(wide(hidden), rows.per_row(w_down))
    return out if b_down is None else out + rows.per_row(b_down)


@over_dtypes_and_biases
def test_down_projection(kernels, rows, dtype, biases):
    hidden = rows.of_rows(N, dtype=dtype)
    w_down = rows.normal(rows.num_experts, N, D, fan_in=N)
    b_down = rows.normal(rows.num_experts, D) if biases else None
    expected = expert_outputs(rows, hidden, w_down, b_down)
    run = jax.jit(lambda first: kernels.down_projection(hidden, w_down, b_down, rows.groups, first, 8))
    for first_column in first_columns(kernels):
        out = run(first_column)
        assert out.dtype == dtype
        columns = slice(first_column, first_column + 8)
        assert_close(out[rows.owned], expected[rows.owned, columns], tolerance(kernels, dtype))


@over_variants
# A tile's pre-activations are read in whole panels. Rows of a panel past the tile's own belong to the next one, which
# may be writing its gradients there meanwhile. They are not used, but the detector cannot know.
@pytest.mark.parametrize("detect_races", [False])
def test_down_backward(kernels, rows, dtype, biases, projections):
    check_down_backward(kernels, rows, dtype, biases, projections)


@pytest.mark.parametrize(("dtype", "biases", "projections"), [("bfloat16", True, 2), ("float16", False, 1)])
@pytest.mark.slow
def test_down_backward_where_no_tile_reads_rows_of_the_next(kernels, dtype, biases, projections):
    rows = Rows(kernels, "whole_tiles_and_a_tail")
    check_down_backward(kernels, rows, dtype, biases, projections)


def check_down_backward(kernels, rows, dtype, biases, projections):
    dy = rows.normal(rows.num_tokens, D, dtype=dtype)
    w_down = rows.normal(rows.num_experts, N, D, fan_in=D)
    b_down = rows.normal(rows.num_experts, D) if biases else None
    pre = tuple(rows.of_rows(N, dtype=dtype) for _ in range(projections))
    row_weights = rows.of_rows()
    activation = ACTIVATIONS[projections]
    run = jax.jit(lambda *args: kernels.down_backward(*args, activation=activation))
    d_pre, weighted_hidden, d_weights = run(dy, w_down, b_down, pre, row_weights, rows.groups)

    hidden, activation_vjp = jax.vjp(activation, *(p.astype(jnp.float32) for p in pre))
    dy_rows, weight = rows.gather(dy), wide(row_weights)[:, None]
    d_hidden = product(dy_rows, rows.per_row(w_down).swapaxes(1, 2))
    expected_d_pre = activation_vjp(jnp.asarray(weight * d_hidden, jnp.float32))
    expected_d_weights = (expert_outputs(rows, hidden, w_down, b_down) * dy_rows).sum(-1)
    owned = rows.owned
    assert_close([d[owned] for d in d_pre], [d[owned] for d in expected_d_pre], tolerance(kernels, dtype))
    assert_close(weighted_hidden[owned], (weight * wide(hidden))[owned], tolerance(kernels, dtype))
    assert_close(d_weights[owned], expected_d_weights[owned], tolerance(kernels, dtype))
    assert d_weights.dtype == jnp.float32
    assert {d.dtype.name for d in (*d_pre, weighted_hidden)} == {dtype}


def test_expert_without_rows_is_never_read(kernels):
    rows = Rows(kernels, "one_expert_takes_all")
    hidden = rows.of_rows(N, dtype="bfloat16")
    w_down = rows.normal(rows.num_experts, N, D)
    others = (jnp.arange(rows.num_experts) != 3)[:, None, None]
    out, ref = (
        kernels.down_projection(hidden, w, None, rows.groups, 0, D)
        for w in (jnp.where(others, jnp.nan, w_down), w_down)
    )
    assert_same_bits(out, ref)
    assert np.isfinite(wide(out)[rows.owned]).all()
