"""The norm against Flax's, rotary attention against a definition in NumPy, and cuDNN's attention against XLA's."""

from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train_example import layers
from train_example.layers import Attention, RMSNorm, best_kernel, frequencies, rms_norm, rotate, rotation


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


def test_rotation_makes_attention_see_distances_only():
    query, key = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    queries, keys = (rotate(jnp.tile(x, (1, 10, 1, 1)), rotation(10, frequencies(8)))[0, :, 0] for x in (query, key))
    scores = queries @ keys.T
    np.testing.assert_allclose(scores[1:, 1:], scores[:-1, :-1], atol=1e-5)
    assert abs(scores[0, 0] - scores[5, 0]) > 1e-3


def test_attention_is_its_definition():
    layer, x = Attention(4, 2, jnp.float32), np.random.default_rng(0).normal(size=(2, 9, 32)).astype(np.float32)
    angles = rotation(9, frequencies(8))
    params = layer.init(jax.random.key(0), x, angles)["params"]
    y = layer.apply({"params": params}, x, angles)
    query, key, value = (np.einsum("bsd,dnh->bsnh", x, params[name]["kernel"]) for name in ("query", "key", "value"))
    query, key = (np.asarray(rotate(jnp.asarray(a), angles)) for a in (query, key))
    key, value = (a.repeat(2, axis=2) for a in (key, value))
    scores = np.einsum("bsnh,btnh->bnst", query, key) / np.sqrt(8)
    scores = np.where(np.tril(np.ones((9, 9), bool)), scores, -np.inf)
    share = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("bnst,btnh->bsnh", share / share.sum(-1, keepdims=True), value)
    np.testing.assert_allclose(y, np.einsum("bsnh,nhd->bsd", mixed, params["out"]["kernel"]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("capability", "version", "dtype", "width", "length", "expected"),
    [
        ("9.0", "cuda 13000", jnp.bfloat16, 64, 8, "cudnn"),
        ("8.0", "cuda 12090", jnp.float16, 128, 8, "cudnn"),
        ("10.0", "cuda 13000", jnp.bfloat16, 64, 8, "cudnn"),
        ("7.5", "cuda 12090", jnp.float16, 64, 8, "xla"),
        ("9.0", "cuda 13000", jnp.float32, 64, 8, "xla"),
        ("9.0", "cuda 13000", jnp.bfloat16, 20, 8, "xla"),
        ("9.0", "cuda 13000", jnp.bfloat16, 136, 8, "xla"),
        ("9.0", "cuda 13000", jnp.bfloat16, 64, 38, "cudnn"),
        ("9.0", "cuda 13000", jnp.bfloat16, 64, 37, "xla"),
        ("9.0", "cuda 13000", jnp.bfloat16, 64, 1, "xla"),
        ("gfx942", "rocm 60200", jnp.bfloat16, 64, 8, "xla"),
    ],
)
def test_the_kernel_is_cudnns_where_that_can_run(monkeypatch, capability, version, dtype, width, length, expected):
    client = SimpleNamespace(platform_version=version)
    device = SimpleNamespace(platform="gpu", compute_capability=capability, client=client)
    monkeypatch.setattr(layers.jax, "devices", lambda: [device])
    query = jax.ShapeDtypeStruct((2, length, 4, width), dtype)
    assert best_kernel(query) == expected
    device.platform = "cpu"
    assert best_kernel(query) == "xla"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "length"), [(16, 16, 64, 1024), (16, 4, 128, 512), (4, 4, 64, 38)]
)
def test_cudnn_computes_what_xla_computes(heads, kv_heads, width, length):
    keys = jax.random.split(jax.random.key(0), 4)
    counts = (heads, kv_heads, kv_heads, heads)
    *inputs, dy = (jax.random.normal(k, (2, length, n, width), jnp.bfloat16) for k, n in zip(keys, counts, strict=True))

    def run(kernel):
        def attend(query, key, value):
            return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=kernel)

        y, backward = jax.vjp(attend, *inputs)
        return y, *backward(dy)

    assert best_kernel(inputs[0]) == "cudnn"
    # Without this option cuDNN adds up the gradients of queries in any order; `compile_step` asks for it, too.
    equal_bits = {"xla_gpu_exclude_nondeterministic_ops": True}
    cudnn = jax.jit(run, static_argnums=0, compiler_options=equal_bits)
    found, again, expected = cudnn("cudnn"), cudnn("cudnn"), run("xla")
    for ours, twice, theirs in zip(found, again, expected, strict=True):
        np.testing.assert_array_equal(ours, twice)
        error = jnp.linalg.norm((ours - theirs).astype(jnp.float32)) / jnp.linalg.norm(theirs.astype(jnp.float32))
        assert error < 0.01
