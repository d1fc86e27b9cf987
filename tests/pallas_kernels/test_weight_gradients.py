"""Weight and bias gradients: sums over an expert's rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hopper
from tests.numerics import TOLERANCE, assert_close, assert_same_bits
from tests.pallas_kernels.rows import D, N, Rows, over_variants, tolerance, wide
from tests.routings import ROUTINGS


def outer_products(a, b):
    return a[:, :, None] * b[:, None, :]


@over_variants
def test_up_weight_gradients(kernels, rows, dtype, biases, projections):
    x = rows.normal(rows.num_tokens, D, dtype=dtype)
    d_pre = tuple(rows.of_rows(N, dtype=dtype) for _ in range(projections))
    dtypes = ("float32", "bfloat16")[:projections]
    if kernels is hopper:  # which has one dtype for all
        dtypes = dtypes[-1:] * projections
    bias_dtypes = dtypes[::-1] if biases else ()
    run = jax.jit(lambda *args: kernels.up_weight_gradients(*args, dtypes=dtypes, bias_dtypes=bias_dtypes))
    gradients, bias_gradients = run(x, d_pre, rows.groups)

    assert [g.dtype for g in gradients] == list(dtypes)
    assert [g.dtype for g in bias_gradients] == list(bias_dtypes)
    for gradient, d in zip(gradients, d_pre, strict=True):
        expected = rows.sum_by_expert(outer_products(rows.gather(x), wide(d)))
        assert_close(gradient, expected, max(tolerance(kernels, dtype), TOLERANCE[gradient.dtype.name]))
    for gradient, d in zip(bias_gradients, d_pre[: len(bias_gradients)], strict=True):
        assert_close(gradient, rows.sum_by_expert(wide(d)), max(TOLERANCE[dtype], TOLERANCE[gradient.dtype.name]))


@pytest.mark.parametrize(
    ("dtype", "gradient_dtype", "bias_dtype"),
    [
        ("float32", "float32", None),
        ("float32", "float32", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float16", "bfloat16", None),
    ],
)
def test_down_weight_gradients(kernels, rows, dtype, gradient_dtype, bias_dtype):
    dy = rows.normal(rows.num_tokens, D, dtype=dtype)
    weighted_hidden, row_weights = rows.of_rows(N, dtype=dtype), rows.of_rows()
    run = jax.jit(lambda *args: kernels.down_weight_gradients(*args, dtype=gradient_dtype, bias_dtype=bias_dtype))
    gradient, bias_gradient = run(weighted_hidden, dy, row_weights, rows.groups)

    dy_rows = rows.gather(dy)
    assert gradient.dtype == gradient_dtype
    assert_close(
        gradient, rows.sum_by_expert(outer_products(wide(weighted_hidden), dy_rows)), tolerance(kernels, dtype)
    )
    if bias_dtype is None:
        assert bias_gradient is None
    else:
        assert bias_gradient.dtype == bias_dtype
        expected = rows.sum_by_expert(wide(row_weights)[:, None] * dy_rows)
        assert_close(bias_gradient, expected, max(TOLERANCE[dtype], TOLERANCE[bias_dtype]))


def test_rows_of_no_expert_do_not_count(kernels):
    rows = Rows(kernels, "empty_slots")
    x, d_pre = rows.normal(rows.num_tokens, D, dtype="bfloat16"), rows.of_rows(N, dtype="bfloat16")
    unowned = jnp.asarray(rows.expert == -1)[:, None]
    assert unowned.any()

    @jax.jit
    def gradients(d):
        return kernels.up_weight_gradients(x, (d,), rows.groups, dtypes=("float32",), bias_dtypes=("float32",))

    assert_same_bits(gradients(jnp.where(unowned, jnp.nan, d_pre)), gradients(d_pre))


@pytest.mark.default_cases("*")
def test_a_token_that_is_not_finite_reaches_its_own_experts_alone(kernels):
    """A step reads rows past its expert's last: those of the next expert, whose NaN times zero would be NaN."""
    rows = Rows(kernels, "random")
    x, d_pre = rows.normal(rows.num_tokens, D, dtype="bfloat16"), rows.of_rows(N, dtype="bfloat16")
    others = np.setdiff1d(np.arange(rows.num_experts), ROUTINGS["random"].experts[0])

    @jax.jit
    def gradients(x):
        (gradient,), _ = kernels.up_weight_gradients(x, (d_pre,), rows.groups, dtypes=("float32",), bias_dtypes=())
        return gradient[others]

    assert_same_bits(gradients(x.at[0].set(jnp.nan)), gradients(x))


def test_gradients_of_an_unused_expert_are_zero(kernels):
    rows = Rows(kernels, "one_expert_takes_all")
    x, d_pre = rows.normal(rows.num_tokens, D, dtype="bfloat16"), rows.of_rows(N, dtype="bfloat16")
    (gradient,), _ = kernels.up_weight_gradients(x, (d_pre,), rows.groups, dtypes=("float32",), bias_dtypes=())
    assert np.flatnonzero(np.asarray(gradient).any((1, 2))).tolist() == [3]


@pytest.mark.default_cases("*")
def test_sums_are_accumulated_wide_and_rounded_once(kernels):
    rows = Rows(kernels, "many_tiles")
    x, d_pre = rows.normal(rows.num_tokens, D, dtype="bfloat16"), rows.of_rows(N, dtype="bfloat16")
    sums, rounded = (
        kernels.up_weight_gradients(x, (d_pre,), rows.groups, dtypes=(dtype,), bias_dtypes=())[0][0]
        for dtype in ("float32", "bfloat16")
    )
    assert_close(sums, rows.sum_by_expert(outer_products(rows.gather(x), wide(d_pre))), TOLERANCE["float32"])
    assert_same_bits(rounded, sums.astype(jnp.bfloat16))
