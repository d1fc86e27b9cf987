"""Up projection and its backward with respect to the tokens."""

from functools import partial

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
    over_projections,
    over_variants,
    product,
    tolerance,
    wide,
)


@over_variants
def test_up_projection(kernels, rows, dtype, biases, projections):
    x = rows.normal(rows.num_tokens, D, dtype=dtype)
    weights = tuple(rows.normal(rows.num_experts, D, N, fan_in=D) for _ in range(projections))
    bias = tuple(rows.normal(rows.num_experts, N) for _ in range(projections)) if biases else ()
    activation = ACTIVATIONS[projections]
    pre, hidden = jax.jit(lambda *args: kernels.up_projection(*args, activation=activation))(
        x, weights, bias, rows.groups
    )

    expected = [product(rows.gather(x), rows.per_row(w)) for w in weights]
    expected = [p + rows.per_row(b) for p, b in zip(expected, bias, strict=True)] if bias else expected
    expected_hidden = activation(*(jnp.asarray(p, jnp.float32) for p in expected))
    owned = rows.owned
    assert_close([p[owned] for p in pre], [p[owned] for p in expected], tolerance(kernels, dtype))
    assert_close(hidden[owned], expected_hidden[owned], tolerance(kernels, dtype))
    assert {a.dtype.name for a in (*pre, hidden)} == {dtype}
    assert np.isfinite(wide(hidden)[rows.expert >= 0]).all()


@over_projections
@pytest.mark.slow
def test_activation_without_pre_activations(kernels, projections):
    rows = Rows(kernels, "whole_tiles_and_a_tail")
    x = rows.normal(rows.num_tokens, D, dtype="bfloat16")
    weights = tuple(rows.normal(rows.num_experts, D, N, fan_in=D) for _ in range(projections))
    up = partial(kernels.up_projection, x, weights, (), rows.groups, activation=ACTIVATIONS[projections])
    pre, hidden = jax.jit(lambda: up(keep_pre_activations=False))()
    assert pre == ()
    assert_same_bits(hidden[rows.owned], jax.jit(up)()[1][rows.owned])


@pytest.mark.parametrize(("projections", "dtype"), [(2, "float32"), (1, "bfloat16"), (2, "float16")])
def test_up_backward(kernels, rows, projections, dtype):
    d_pre = tuple(rows.of_rows(N, dtype=dtype) for _ in range(projections))
    weights = tuple(rows.normal(rows.num_experts, D, N, fan_in=N) for _ in range(projections))
    expected = sum(product(wide(d), rows.per_row(w).swapaxes(1, 2)) for d, w in zip(d_pre, weights, strict=True))
    run = jax.jit(lambda first: kernels.up_backward(d_pre, weights, rows.groups, first, 8))
    for first_column in (0, 5, D - 8):
        out = run(first_column)
        assert out.dtype == dtype
        columns = slice(first_column, first_column + 8)
        assert_close(out[rows.owned], expected[rows.owned, columns], tolerance(kernels, dtype))
