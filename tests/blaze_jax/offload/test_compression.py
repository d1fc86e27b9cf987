"""Compressed weights: all values of bfloat16, by their bits; and the bits that a weight takes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blaze_jax.offload.compression import BLOCK, compress, decompress, decompressed

EVERY = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)  # NaN payloads, infinities, -0 and subnormals
decode = jax.jit(decompress)


def assert_round_trip(weights, bits, decode: Callable = decode):
    compressed = compress(weights, bits)
    found = np.asarray(decode(compressed))
    assert found.shape == weights.shape
    assert found.dtype == weights.dtype
    np.testing.assert_array_equal(found.view(np.uint16), weights.view(np.uint16))
    return compressed


@pytest.mark.parametrize("bits", [3, 4])
def test_every_value_comes_back(bits):
    order = np.random.default_rng(0).permutation(EVERY)
    assert_round_trip(order.reshape(64, 4, 256), bits)
    with jax.numpy_dtype_promotion("strict"):
        assert_round_trip(EVERY, bits, jax.jit(decompress))


@pytest.mark.slow
@given(st.integers(0, 3 * BLOCK), st.sampled_from([3, 4]), st.integers(0, 2**32 - 1), st.integers(1, 256))
@settings(max_examples=25, deadline=None)
def test_any_length_and_any_exponents(size, bits, seed, exponents):
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**16, size, dtype=np.uint16)
    few = rng.integers(0, exponents, size, dtype=np.uint16) << 7
    assert_round_trip((words & 0x807F | few).view(ml_dtypes.bfloat16), bits, decompress)


@pytest.mark.parametrize(("bits", "most"), [(3, 11.3), (4, 12.1)])
def test_bits_of_drawn_weights(bits, most):
    weights = (np.random.default_rng(0).standard_normal(2**20, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
    compressed = assert_round_trip(weights, bits)
    assert 8 + bits < compressed.bits_per_weight < most
    roomy = compressed.with_capacity(len(compressed.escapes) + 1000)
    np.testing.assert_array_equal(np.asarray(decode(roomy)).view(np.uint16), weights.view(np.uint16))
    with pytest.raises(ValueError, match="capacity=3 must be at least"):
        compressed.with_capacity(3)


def test_a_tree_is_decoded_where_it_is_compressed():
    tree = decompressed({"a": compress(EVERY[:10]), "b": jnp.ones(3)})
    assert [array.shape for array in tree.values()] == [(10,), (3,)]


def test_what_cannot_be_compressed():
    with pytest.raises(ValueError, match="bits=5 must be 3 or 4"):
        compress(EVERY, 5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"weights are float32\[3\]"):
        compress(np.zeros(3, np.float32))
