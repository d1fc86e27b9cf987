"""Compressed numbers are exactly those of their definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.codings import FLOAT8, MXFP4, NF4, decode_float8, decode_mxfp4, decode_nf4, encode_mxfp4

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


@pytest.mark.slow
@pytest.mark.ci_cases("*")
def test_encoding_finds_the_nearest_numbers_of_mxfp4():
    """And numbers that a block of MXFP4 holds already come back as they were, whatever the power of two."""
    rng = np.random.default_rng(1)
    exact = VALUES[rng.integers(0, 8, (64, 9))] * rng.choice([-1.0, 1.0], (64, 9))
    exact[[0, 32]], exact[:, 8] = 6, 0
    exact *= 2.0 ** rng.integers(-20, 20, 9)
    np.testing.assert_array_equal(decode_mxfp4(*encode_mxfp4(jnp.asarray(exact)), jnp.float32), exact)
    values = rng.standard_normal((32, 5)).astype(np.float32)
    scale = 2.0 ** (np.floor(np.log2(np.abs(values).max(0))) - 2)
    grid = np.concatenate([-VALUES, VALUES])
    nearest = grid[np.abs(values[..., None] / scale[:, None] - grid).argmin(-1)] * scale
    np.testing.assert_array_equal(decode_mxfp4(*encode_mxfp4(jnp.asarray(values)), jnp.float32), nearest)


@pytest.mark.default_cases("*")
def test_errors_of_encoding_normal_numbers():
    """NF4's is that of the nearest of its numbers times the largest magnitude of 64: some 7% of the deviation."""
    values = jnp.asarray(np.random.default_rng(2).standard_normal((1024, 257)), jnp.float32)
    means = {}
    for name, coding in {"nf4": NF4, "mxfp4": MXFP4, "float8": FLOAT8}.items():
        means[name] = float(jnp.abs(coding.decode(*coding.encode(values), jnp.float32) - values).mean())
    table = np.asarray(decode_nf4(np.arange(16, dtype=np.uint8).repeat(2)[:, None] * 17, jnp.ones((1, 1)), jnp.float32))
    groups = np.asarray(values, np.float64).reshape(-1, 64, 257)
    shares = groups / np.abs(groups).max(1, keepdims=True)
    nearest = np.abs(shares[..., None] - table[::2, 0]).min(-1) * np.abs(groups).max(1, keepdims=True)
    assert means["nf4"] == pytest.approx(nearest.mean(), rel=5e-3)  # whose scales are not rounded to bfloat16
    assert means["float8"] < 0.02 < means["nf4"] < means["mxfp4"] < 0.12
    in_order = np.sort(table[::4, 0])
    assert np.all(np.diff(in_order) > 0)
    assert (in_order[0], in_order[7], in_order[-1]) == (-1, 0, 1)
