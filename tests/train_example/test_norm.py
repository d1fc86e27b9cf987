"""RMSNorm against Flax's."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train_example.norm import RMSNorm, rms_norm


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 0.02)])
def test_the_norm_and_its_gradients_are_those_of_flax(dtype, tolerance):
    x, dy = 3 * jax.random.normal(jax.random.key(0), (2, 4, 5, 32))
    params = {"params": {"scale": jax.random.normal(jax.random.key(1), (32,))}}

    def results(norm, dtype):
        y, backward = jax.vjp(norm.apply, params, x.astype(dtype))
        return y, *jax.tree.leaves(backward(dy.astype(y.dtype)))

    for found, expected in zip(results(RMSNorm(dtype), dtype), results(nn.RMSNorm(), jnp.float32), strict=True):
        difference = jnp.linalg.norm((found.astype(jnp.float32) - expected).ravel())
        assert difference < tolerance * jnp.linalg.norm(expected.ravel())


def test_a_vector_of_zeros_has_a_gradient():
    dx = jax.grad(lambda x: rms_norm(x, jnp.ones(8)).sum())(jnp.zeros((2, 8)))
    assert np.isfinite(dx).all()


def test_no_float32_copy_of_the_input_is_kept():
    x = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)
    kept = jax.eval_shape(lambda x: jax.vjp(rms_norm, x, jnp.ones(32))[1], x)
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept)) == 64 * 32 * 2 + 64 * 4 + 32 * 4
