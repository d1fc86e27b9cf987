"""Operands of float32: tensor cores would cut off what they have no bits for."""

import jax.numpy as jnp

from tests.numerics import assert_close
from tests.pallas_kernels.rows import ACTIVATIONS, Rows

NUMBER = 1 + 0.75 * 2**-10
ROUNDED = 1 + 2**-10  # to the 10 bits of tf32


def test_operands_are_rounded_to_the_nearest(kernels):
    """In each place that loads them: rows and columns, as they are in memory, and rows that are contracted."""
    rows = Rows(kernels, "single_token")
    x, of_rows = (jnp.full((number, 32), NUMBER) for number in (rows.num_tokens, rows.num_rows))
    weights = (jnp.full((rows.num_experts, 32, 32), NUMBER),)
    (pre,), _ = kernels.up_projection(x, weights, (), rows.groups, activation=ACTIVATIONS[1])
    back = kernels.up_backward((of_rows,), weights, rows.groups, 0, 32)
    for products in (pre, back):
        assert_close(products[rows.owned], jnp.full((3, 32), 32 * ROUNDED**2), 1e-5)
    (gradient,), _ = kernels.up_weight_gradients(x, (of_rows,), rows.groups, dtypes=("float32",), bias_dtypes=())
    assert_close(gradient[rows.expert[rows.owned]], jnp.full((3, 32, 32), ROUNDED**2), 1e-5)
