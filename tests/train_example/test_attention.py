"""Rotary attention: against a definition in NumPy, and cuDNN's against XLA's."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train_example import attention
from train_example.attention import Attention, best_kernel, rotate, rotation


def test_rotation_makes_attention_see_distances_only():
    query, key = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    queries, keys = (rotate(jnp.tile(x, (1, 10, 1, 1)), rotation(10, 8))[0, :, 0] for x in (query, key))
    scores = queries @ keys.T
    np.testing.assert_allclose(scores[1:, 1:], scores[:-1, :-1], atol=1e-5)
    assert abs(scores[0, 0] - scores[5, 0]) > 1e-3


def test_attention_is_its_definition():
    layer, x = Attention(4, 2, jnp.float32), np.random.default_rng(0).normal(size=(2, 9, 32)).astype(np.float32)
    angles = rotation(9, 8)
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
    ("capability", "version", "dtype", "width", "expected"),
    [
        ("9.0", "cuda 13000", jnp.bfloat16, 64, "cudnn"),
        ("8.0", "cuda 12090", jnp.float16, 128, "cudnn"),
        ("10.0", "cuda 13000", jnp.bfloat16, 64, "cudnn"),
        ("7.5", "cuda 12090", jnp.float16, 64, "xla"),
        ("9.0", "cuda 13000", jnp.float32, 64, "xla"),
        ("9.0", "cuda 13000", jnp.bfloat16, 20, "xla"),
        ("9.0", "cuda 13000", jnp.bfloat16, 136, "xla"),
        ("gfx942", "rocm 60200", jnp.bfloat16, 64, "xla"),
    ],
)
def test_the_kernel_is_cudnns_where_that_can_run(monkeypatch, capability, version, dtype, width, expected):
    client = SimpleNamespace(platform_version=version)
    device = SimpleNamespace(platform="gpu", compute_capability=capability, client=client)
    monkeypatch.setattr(attention.jax, "devices", lambda: [device])
    assert best_kernel(jax.ShapeDtypeStruct((2, 8, 4, width), dtype)) == expected


def test_cudnn_takes_even_lengths_alone(monkeypatch):
    client = SimpleNamespace(platform_version="cuda 13000")
    device = SimpleNamespace(platform="gpu", compute_capability="9.0", client=client)
    monkeypatch.setattr(attention.jax, "devices", lambda: [device])
    kernels = [best_kernel(jax.ShapeDtypeStruct((2, length, 4, 64), jnp.bfloat16)) for length in (1, 37, 38)]
    assert kernels == ["xla", "xla", "cudnn"]


def test_the_kernel_on_a_cpu_is_xlas():
    if jax.default_backend() == "cpu":
        assert best_kernel(jnp.zeros((2, 8, 4, 64), jnp.bfloat16)) == "xla"


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
