"""Which calls of a kernel share a trace."""

import os

import jax.numpy as jnp
import pytest

from pallas_kernels.mosaic.interpreter import interpreted
from pallas_kernels.traced_once import traced_once


class Unhashable:
    __hash__ = None

    def __call__(self, x):
        return -x


@pytest.fixture
def traces():
    """A function that is traced once, and the settings it was traced with."""
    seen = []

    @traced_once("function")
    def apply(x, *, function):
        seen.append(function)
        return function(x)

    return apply, seen


def test_equal_settings_and_types(traces):
    apply, seen = traces
    for x, function in [(1.0, jnp.sin), (2.0, jnp.sin), (1.0, jnp.cos), (2.0, jnp.cos)]:
        assert apply(jnp.float32(x), function=function) == function(jnp.float32(x))
    assert seen == [jnp.sin, jnp.cos]
    apply(jnp.zeros(3), function=jnp.sin)
    assert seen == [jnp.sin, jnp.cos, jnp.sin]


def test_not_inside_interpreted(traces):
    apply, seen = traces
    apply(jnp.float32(1), function=jnp.sin)
    with interpreted():
        apply(jnp.float32(1), function=jnp.sin)
    apply(jnp.float32(1), function=jnp.sin)
    assert len(seen) == 2


def test_a_setting_without_a_hash_is_traced_each_time(traces):
    apply, seen = traces
    negate = Unhashable()
    assert [float(apply(jnp.float32(x), function=negate)) for x in (1, 2)] == [-1, -2]
    assert seen == [negate, negate]


def test_not_when_the_users_tuned_parameters_have_changed(traces, monkeypatch, tmp_path):
    apply, seen = traces
    path = tmp_path / "tuning.json"
    monkeypatch.setenv("BLAZE_JAX_TUNING", str(path))
    for number in range(1, 4):
        for _ in range(2):
            apply(jnp.float32(1), function=jnp.sin)
        assert len(seen) == number
        path.write_text("{}")
        os.utime(path, ns=(number, number))
