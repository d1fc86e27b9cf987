"""Compressed numbers are exactly those of their definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax.checkpoints import decode_float8, decode_mxfp4

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("jit", [False, True])
def test_every_number_of_mxfp4(jit):
    """All 16 codes in both halves of a byte, with all scales."""
    codes = np.arange(16)
    blocks = np.repeat((codes | (15 - codes) << 4)[:, None], 256, 1).astype(np.uint8)
    scales = np.arange(256, dtype=np.uint8)[None]
    decode = jax.jit(decode_mxfp4, static_argnums=2) if jit else decode_mxfp4
    found = {dtype: np.asarray(decode(blocks, scales, dtype)) for dtype in (jnp.bfloat16, jnp.float32)}
    both = np.stack([codes, 15 - codes], axis=1).reshape(-1)
    values = np.where(both > 7, -1.0, 1.0) * VALUES[both & 7]
    with np.errstate(over="ignore"):
        wanted = (values[:, None] * 2.0 ** (np.arange(256) - 127.0)).astype(np.float32)
    wanted[:, 255] = np.nan
    for array in found.values():
        np.testing.assert_array_equal(array.astype(np.float64), wanted)
        np.testing.assert_array_equal(np.signbit(array[:, :255].astype(np.float64)), (both > 7)[:, None].repeat(255, 1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_float8_of_ragged_blocks(dtype):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 127, (130, 257), np.uint8) | rng.integers(0, 2, (130, 257), np.uint8) << 7
    values = bits.view(jnp.float8_e4m3fn)
    scales = rng.random((2, 3), np.float32)
    wanted = values.astype(np.float32) * np.kron(scales, np.ones((128, 128), np.float32))[:130, :257]
    np.testing.assert_array_equal(decode_float8(values, scales, dtype), wanted.astype(dtype))
