"""The conventional layers compute the same as ours, and what they cannot do is said."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax.benchmark import layers, peers
from blaze_jax.benchmark.layers import Candidate, Limits, compile_pass, first_run
from blaze_jax.benchmark.peers import AMPERE, DENSE_DISPATCH, RAGGED_DOT, TOKAMAX, UnavailableError, peer_variants
from blaze_jax.benchmark.sizes import BOTH, FORWARD, Sizes, expert_inputs, forward_and_backward
from blaze_jax.benchmark.tables import terminal
from blaze_jax.experts import expert_ffn

SIZES = Sizes(64, 16, 8, 4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [RAGGED_DOT, DENSE_DISPATCH, TOKAMAX])
def test_the_same_layer(name, monkeypatch):
    if name == TOKAMAX:
        pytest.importorskip("tokamax", reason="tokamax is an extra of its own")
    monkeypatch.setattr(peers, "CAPACITY_FACTOR", float(SIZES.num_experts))  # nothing dropped
    inputs = expert_inputs(SIZES, jnp.float32)
    ours = jax.jit(forward_and_backward(expert_ffn))(*inputs, inputs[0])
    for layer in peer_variants(name).values():
        theirs = jax.jit(forward_and_backward(layer))(*inputs, inputs[0])
        for a, b in zip(jax.tree.leaves(theirs), jax.tree.leaves(ours), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_not_installed_is_told_from_not_whole(monkeypatch):
    def absent(name):
        raise ImportError(f"No module named '{name}'", name="tokamax")

    def broken(name):
        raise ImportError("No module named 'qwix'", name="qwix")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(UnavailableError, match="tokamax is not installed"):
        peer_variants(TOKAMAX)
    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(UnavailableError, match="tokamax cannot be imported: No module named 'qwix'"):
        peer_variants(TOKAMAX)


def test_the_dense_dispatch_drops_what_is_beyond_its_capacity():
    inputs = list(expert_inputs(SIZES, jnp.float32))
    inputs[5] = jnp.tile(jnp.array([[0, 1]], jnp.int32), (SIZES.num_tokens, 1))
    y = jax.jit(peers.dense_dispatch_layer)(*inputs)
    capacity = peers.dense_dispatch_capacity(SIZES.num_tokens, 2, SIZES.num_experts)
    assert capacity == 40
    assert (jnp.abs(y).max(1) > 0).tolist() == [True] * capacity + [False] * (SIZES.num_tokens - capacity)


def raises(*_):
    raise NotImplementedError("Unsupported GPU architecture.")


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    ("name", "backend", "phase", "layer", "limits", "message"),
    [
        (
            "ours",
            "",
            FORWARD,
            expert_ffn,
            Limits(1e-3, 1e-9),
            r"not run: its arithmetic alone takes about \d+ s a call",
        ),
        ("ours", "", BOTH, expert_ffn, Limits(num_bytes=1000), r"out of memory: forward\+backward needs"),
        *(
            (name, backend, phase, expert_ffn, Limits(num_bytes=1000), f"{what} all rows for each expert takes")
            for name, backend in ((RAGGED_DOT, "XLA"), (TOKAMAX, "xla"))
            for phase, what in ((FORWARD, "out of memory: a copy of"), (BOTH, "two float32 copies of"))
        ),
        (
            "theirs",
            "",
            FORWARD,
            raises,
            Limits(),
            r"does not compile \(forward\): NotImplementedError: Unsupported GPU",
        ),
    ],
)
def test_what_takes_too_long_or_does_not_fit_or_compile_is_not_run(name, backend, phase, layer, limits, message):
    candidate = Candidate(name, backend, layer, expert_inputs(SIZES, jnp.float32))
    with pytest.raises(UnavailableError, match=message):
        compile_pass(candidate, phase, SIZES, limits)


def test_what_fails_or_drags_on_is_reported():
    def fail():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7 bytes")

    with pytest.raises(UnavailableError, match=r"out of memory: .*allocate 7 bytes"):
        first_run(fail, 1.0)
    with pytest.raises(UnavailableError, match="stopped: one call took"):
        first_run(lambda: jnp.zeros(()), 0.0)


@pytest.mark.slow
def test_no_peer_is_dropped(monkeypatch):
    def gone(name):
        raise ImportError(name, name="tokamax")

    monkeypatch.setattr(peers.importlib, "import_module", gone)
    monkeypatch.setattr(peers, "dense_dispatch_layer", lambda *_: 1 / 0)
    record = layers.compare(SIZES, jnp.dtype("float32"), peers=peers.PEERS, repeats=1)
    status = {layer["layer"]: layer["status"] for layer in record["layers"]}
    assert status["blaze_jax"] == status[RAGGED_DOT] == "ok"
    assert "not installed" in status[TOKAMAX]
    assert "division by zero" in status[DENSE_DISPATCH]
    assert "no NVIDIA GPU" in status[AMPERE]
    assert all(text in terminal(record) for text in status.values() if text != "ok")
