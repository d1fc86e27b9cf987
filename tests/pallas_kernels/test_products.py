"""Products of rows with their experts' matrices, forward and backward, and sums of products over an expert's rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hopper
from pallas_kernels.contract import Sums
from tests.numerics import TOLERANCE, assert_close, assert_same_bits
from tests.pallas_kernels.rows import (
    ACTIVATIONS,
    D,
    N,
    Rows,
    assert_down_backward,
    expert_outputs,
    first_columns,
    product,
    tolerance,
    wide,
)
from tests.routings import ROUTINGS

over_variants = pytest.mark.parametrize(
    ("dtype", "biases", "projections"),
    [("float32", False, 2), ("float32", True, 1), ("bfloat16", True, 2), ("float16", False, 1)],
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


@pytest.mark.parametrize("projections", [1, 2])
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


@pytest.mark.parametrize(
    ("dtype", "biases"), [("float32", False), ("float32", True), ("bfloat16", True), ("float16", False)]
)
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


def up_gradient(kernels, rows):
    """Tokens, gradients of one pre-activation, and a function of them to the gradient of its weights."""
    x, d_pre = rows.normal(rows.num_tokens, D, dtype="bfloat16"), rows.of_rows(N, dtype="bfloat16")
    run = partial(kernels.up_weight_gradients, dtypes=("float32",), bias_dtypes=("float32",))
    return x, d_pre, jax.jit(lambda x, d: run(x, (d,), rows.groups))


@pytest.mark.default_cases("xla", "ampere")
@pytest.mark.ci_cases("mosaic_gpu")
def test_rows_of_no_expert_do_not_count(kernels):
    rows = Rows(kernels, "empty_slots")
    x, d_pre, gradients = up_gradient(kernels, rows)
    unowned = jnp.asarray(rows.expert == -1)[:, None]
    assert unowned.any()
    assert_same_bits(gradients(x, jnp.where(unowned, jnp.nan, d_pre)), gradients(x, d_pre))


def test_a_token_that_is_not_finite_reaches_its_own_experts_alone(kernels):
    """A step reads rows past its expert's last: those of the next expert, whose NaN times zero would be NaN."""
    rows = Rows(kernels, "random")
    others = np.setdiff1d(np.arange(rows.num_experts), ROUTINGS["random"].experts[0])
    x, d_pre, gradients = up_gradient(kernels, rows)
    ((found,), _), ((expected,), _) = (gradients(tokens, d_pre) for tokens in (x.at[0].set(jnp.nan), x))
    assert_same_bits(found[others], expected[others])


def test_gradients_of_an_unused_expert_are_zero(kernels):
    x, d_pre, gradients = up_gradient(kernels, Rows(kernels, "one_expert_takes_all"))
    ((gradient,), _) = gradients(x, d_pre)
    assert np.flatnonzero(np.asarray(gradient).any((1, 2))).tolist() == [3]


@pytest.mark.default_cases("xla", "ampere")
@pytest.mark.ci_cases("xla_batched", "mosaic_gpu")
def test_sums_are_accumulated_wide_and_rounded_once(kernels):
    rows = Rows(kernels, "many_tiles")
    x, d_pre = rows.normal(rows.num_tokens, D, dtype="bfloat16"), rows.of_rows(N, dtype="bfloat16")
    sums, rounded = (
        kernels.up_weight_gradients(x, (d_pre,), rows.groups, dtypes=(dtype,), bias_dtypes=())[0][0]
        for dtype in ("float32", "bfloat16")
    )
    assert_close(sums, rows.sum_by_expert(outer_products(rows.gather(x), wide(d_pre))), TOLERANCE["float32"])
    assert_same_bits(rounded, sums.astype(jnp.bfloat16))


@pytest.mark.parametrize("sum_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("at", [None, 2])
@pytest.mark.default_cases("xla*-2-float32", "ampere-2-float32", "ampere-None-bfloat16")
@pytest.mark.ci_cases("mosaic_gpu-2-float32", "xla*-None-bfloat16")
def test_gradients_are_added_to_running_sums_in_their_place(kernels, at, sum_dtype):
    """Of other matrices nothing changes. Float32 sums are of gradients that were never rounded."""
    rows = Rows(kernels, "first_expert_empty" if at else "whole_tiles_and_a_tail")  # whose last one is
    x, rows_n = rows.normal(rows.num_tokens, D, dtype="bfloat16"), rows.of_rows(N, dtype="bfloat16")
    matrices, place = rows.num_experts + 3 * bool(at), slice(at or 0, (at or 0) + rows.num_experts)
    up, down = ([rows.normal(matrices, *shape, dtype=sum_dtype) for _ in range(2)] for shape in ((D, N), (N, D)))

    @partial(jax.jit, static_argnames="adding")
    def gradients(x, rows_n, up, down, first, adding=True):
        to = [Sums(tuple(arrays), first) if adding else None for arrays in (up, down[:1])]
        options = {"dtypes": ("float32",) * 2, "bias_dtypes": ()}
        ups, _ = kernels.up_weight_gradients(x, (rows_n, -rows_n), rows.groups, **options, sums=to[0])
        options = {"dtype": "float32", "bias_dtype": None}
        down, _ = kernels.down_weight_gradients(rows_n, x, jnp.ones(rows.num_rows), rows.groups, **options, sums=to[1])
        return *ups, down

    before = *up, down[0]
    added = gradients(x, rows_n, up, down, at)
    of_up = rows.sum_by_expert(outer_products(rows.gather(x), wide(rows_n)))
    for total, array, gradient in zip(added, before, (of_up, -of_up, of_up.swapaxes(1, 2)), strict=True):
        assert total.dtype == sum_dtype
        expected = wide(array)
        expected[place] += gradient
        assert_close(total, expected, TOLERANCE[sum_dtype] / (4 if sum_dtype == "float32" else 1))
        others = np.setdiff1d(np.arange(matrices), np.arange(matrices)[place])
        assert_same_bits(total[others], array[others])
    if sum_dtype == "float32":
        outside = gradients(x, rows_n, up, down, at, adding=False)
        assert_same_bits(added, tuple(a.at[place].add(g) for a, g in zip(before, outside, strict=True)))
