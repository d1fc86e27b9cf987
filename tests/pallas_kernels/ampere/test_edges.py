"""Where rows or their width end inside of what is copied at a time, nothing of others is read."""

import jax.numpy as jnp
import numpy as np

from tests.numerics import assert_same_bits
from tests.pallas_kernels.rows import N, Rows, assert_down_backward, wide


def test_row_that_is_not_finite_poisons_no_other(kernels):
    """Not even the one before it, after whose end it begins."""
    rows = Rows(kernels, "every_expert")
    hidden, w_down = rows.of_rows(N, dtype="bfloat16"), rows.normal(rows.num_experts, N, 8)
    others = np.arange(rows.num_rows) != 4
    out, ref = (
        kernels.down_projection(h, w_down, None, rows.groups, 0, 8)
        for h in (jnp.where(others[:, None], hidden, jnp.nan), hidden)
    )
    assert_same_bits(out[rows.owned & others], ref[rows.owned & others])
    assert np.isnan(wide(out)[4]).all()


def test_tiles_do_not_race_for_pre_activations(kernels):
    """Their gradients may take their memory."""
    rows = Rows(kernels, "every_expert")
    assert_down_backward(kernels, rows, "bfloat16", biases=False, projections=1)
