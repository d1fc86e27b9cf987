"""Down projection and its backward, through the activation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.numerics import assert_close, assert_same_bits
from tests.pallas_kernels.rows import (
    D,
    N,
    Rows,
    assert_down_backward,
    expert_outputs,
    first_columns,
    over_dtypes_and_biases,
    over_variants,
    tolerance,
    wide,
)


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
    assert_down_backward(kernels, rows, dtype, biases, projections)


@pytest.mark.parametrize(("dtype", "biases", "projections"), [("bfloat16", True, 2), ("float16", False, 1)])
@pytest.mark.slow
def test_down_backward_where_no_tile_reads_rows_of_the_next(kernels, dtype, biases, projections):
    rows = Rows(kernels, "whole_tiles_and_a_tail")
    assert_down_backward(kernels, rows, dtype, biases, projections)


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
