"""Activations and their derivatives, a number per thread."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax.activations import ACTIVATION_NAMES, get_activation
from pallas_kernels import simt
from pallas_kernels.simt.elementwise import value, with_gradients
from tests.numerics import assert_close

OTHERS = {
    "celu": jax.nn.celu,
    "clip": lambda x: jnp.clip(x, -1, 1),
    "cube": lambda x: x**3,
    "hard_silu": jax.nn.hard_silu,
    "log_sigmoid": jax.nn.log_sigmoid,
    "power": lambda x: jnp.abs(x) ** 1.5,
    "selu": jax.nn.selu,
    "sine": jnp.sin,
    "soft_sign": jax.nn.soft_sign,
}
"""Functions that users may bring."""


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("where", ["no mesh", "a mesh"])
@pytest.mark.parametrize("name", [*ACTIVATION_NAMES, *OTHERS])
def test_value_and_gradients(name, where):
    """Under `jax.set_mesh`, too, where jax's gradients have sums over no axes and changes of sharding."""
    function = OTHERS.get(name) or get_activation(name).function
    arguments = 1 if name in OTHERS else 1 + get_activation(name).gated
    x = np.random.default_rng(0).normal(size=(arguments + 1, 128), scale=3).astype(np.float32)

    def body(numbers, out):
        own = [numbers[simt.thread() + i * 128] for i in range(arguments + 1)]
        result, gradients = with_gradients(function, arguments)(own[1:], own[0])
        for i, number in enumerate([value(function, own[1:]), result, *gradients]):
            out[simt.thread() + i * 128] = number

    shape = jax.ShapeDtypeStruct((arguments + 2, 128), jnp.float32)
    mesh = jax.set_mesh(jax.make_mesh((1,), ("data",))) if where == "a mesh" else nullcontext()
    with simt.interpreted(), mesh:
        (out,) = simt.kernel(body, name=name, outputs=[shape], blocks=1, warpgroups=1)(x)
    expected, vjp = jax.vjp(function, *map(jnp.asarray, x[1:]))
    assert_close(list(out), [expected, expected, *vjp(jnp.asarray(x[0]))], 1e-5)
