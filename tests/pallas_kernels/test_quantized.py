"""Pre-activations in 8 bits: `down_backward` reads of them what the definition says that they are rounded to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ampere
from pallas_kernels.contract import quantization_scales
from tests.numerics import assert_same_bits, scaled_error
from tests.pallas_kernels.rows import D, Rows, product, wide

BLOCK = 128


def defined(pre: np.ndarray, block: int) -> np.ndarray:
    """Every block of columns, the last one perhaps narrower, in whole multiples of its largest magnitude / 127."""
    out = np.zeros(pre.shape)
    for first in range(0, pre.shape[1], block):
        own = pre[:, first : first + block]
        scale = np.abs(own).max(1, keepdims=True) / 127
        scale[scale == 0] = 1
        out[:, first : first + block] = np.round(own / scale) * scale
    return out


@pytest.mark.parametrize(("projections", "n"), [(2, 136), (1, 328), (1, 72), (2, 256)])
@pytest.mark.default_cases("ampere-1-328")
@pytest.mark.ci_cases("xla-2-136")
def test_what_comes_back(kernels, projections, n):
    """The activation that the backward pass computes again, a sum, shows them; those of a token are zero."""
    rows = Rows(kernels, "empty_slots")
    x = rows.normal(rows.num_tokens, D, dtype="bfloat16").at[3].set(0)
    weights = tuple(rows.normal(rows.num_experts, D, n, fan_in=D) for _ in range(projections))
    w_down, ones = rows.normal(rows.num_experts, n, D), jnp.ones(rows.num_rows)
    options = {"activation": lambda *pre: sum(pre)}

    @jax.jit
    def run(x):
        pre, hidden = kernels.up_projection(x, weights, (), rows.groups, quantize=True, **options)
        return hidden, kernels.down_backward(x, w_down, None, pre, ones, rows.groups, **options)[1]

    hidden, again = run(x)
    exact = [product(rows.gather(x), rows.per_row(w.astype("bfloat16"))) for w in weights]
    expected = sum(defined(pre, 32 if kernels is ampere else BLOCK) for pre in exact)
    owned = rows.owned
    assert scaled_error(again[owned], expected[owned]) < 2.5e-3 < scaled_error(again[owned], sum(exact)[owned]) < 1e-2
    assert not wide(again)[rows.token == 3].any()
    unquantized = kernels.up_projection(x, weights, (), rows.groups, **options)[1]
    assert_same_bits(hidden[owned], unquantized[owned])


def test_scales():
    largest = jnp.array([127, 0, 1e-45, 3e38, jnp.inf, jnp.nan], jnp.float32)
    assert_same_bits(quantization_scales(largest), jnp.array([1, 1, 1, 3e38 / 127, jnp.nan, jnp.nan], jnp.float32))
