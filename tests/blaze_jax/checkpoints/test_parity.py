"""Output and gradients of a layer that was loaded are those that transformers computed, in every family."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import blaze_jax
from blaze_jax import MoE, moe
from tests.blaze_jax.checkpoints.models import FAMILIES, expected, load, model
from tests.numerics import assert_close


def check(family, apply, layer):
    """Compares `apply(params, x)` and its gradients with the fixtures."""
    wanted = expected(family)
    gradients = load(f"{family}-gradients").params

    @jax.jit
    def run(params, x, dy):
        y, vjp = jax.vjp(apply, params, x)
        return y, *vjp(dy)

    y, d_params, dx = run(layer.params, wanted["x"], wanted["dy"])
    assert_close((y, dx, d_params), (wanted["y"], wanted["dx"], gradients), 2e-5)


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("family", FAMILIES)
def test_function(family):
    described, layer = model(family), load(family)
    check(family, lambda p, x: moe(x, p, described.layer, selection_bias=layer.selection_bias)[0], layer)


@pytest.mark.parametrize("family", FAMILIES)
def test_linen(family):
    described, layer = model(family), load(family)
    module = MoE(described.layer, use_bias=described.use_bias)
    check(family, lambda p, x: module.apply(layer._replace(params=p).variables, x), layer)


@pytest.mark.parametrize("family", FAMILIES)
def test_nnx(family):
    described, layer = model(family), load(family)

    def make():
        return blaze_jax.nnx.MoE(described.width, described.layer, use_bias=described.use_bias, rngs=nnx.Rngs(0))

    graph, params, rest = nnx.split(layer.put_into(nnx.eval_shape(make)), nnx.Param, ...)
    structure = jax.tree.structure(params)
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(layer.params), strict=True)
    assert all(held is loaded for held, loaded in pairs)

    def apply(p, x):
        return nnx.merge(graph, jax.tree.unflatten(structure, jax.tree.leaves(p)), rest)(x)

    check(family, apply, layer)


def test_float8_computes_what_the_numbers_say():
    described, layer = model("deepseek_v3-float8"), load("deepseek_v3-float8", dtype=jnp.float32)
    wanted = expected("deepseek_v3-float8")
    y, _ = jax.jit(moe, static_argnums=2)(
        wanted["x"], layer.params, described.layer, selection_bias=layer.selection_bias
    )
    assert_close(y, wanted["y"], 2e-5)
