"""Sums whose order is written down, in the programs of kernels that leave parts of them to XLA."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax.activations import get_activation
from pallas_kernels import ampere, hopper
from pallas_kernels.compile_only import absent, on_gpu
from pallas_kernels.mosaic.row_groups import sum_in_order
from tests.numerics import assert_same_bits

T, D, N, E, K = 128, 256, 1000, 4, 2


def test_from_the_first_to_the_last():
    parts = np.random.default_rng(0).standard_normal((33, 50)).astype(np.float32)
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    assert_same_bits(jax.jit(sum_in_order)(parts), expected)


@pytest.mark.compile_only
@pytest.mark.parametrize("kernels", [hopper, ampere], ids=["hopper", "ampere"])
def test_xla_adds_up_no_gradients_of_row_weights(kernels):
    """Along an axis it would in an order that it chooses by timing."""

    def gradients(dy, w_down, pre, row_weights, experts):
        groups = kernels.dispatch(experts, E)
        options = {"activation": get_activation("swiglu").function}
        return kernels.down_backward(dy, w_down, None, pre, row_weights, groups, **options)

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    ids = array(T, K, dtype=jnp.int32)
    rows = jax.eval_shape(lambda e: kernels.dispatch(e, E), ids).num_rows
    arrays = array(T, D), array(E, N, D), (array(rows, N),) * 2, array(rows, dtype=jnp.float32), ids
    with jax.default_device(absent()):
        compiled = jax.jit(gradients).lower(*on_gpu(arrays)).compile()
    text = compiled.as_text()
    assert "moe_down_backward" in text
    assert re.findall(r"= (?:f32|bf16)\S* reduce\(", text) == []
