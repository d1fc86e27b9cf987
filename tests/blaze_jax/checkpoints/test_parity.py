"""Output and gradients of a layer that was loaded are those that transformers computed, in every family."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import blaze_jax
from blaze_jax import MoE, moe
from tests.blaze_jax.checkpoints.models import FAMILIES, LATER, expected, load, model
from tests.numerics import assert_close


def function(described, layer):
    return lambda p, x: moe(x, p, described.layer, selection_bias=layer.selection_bias)[0]


def linen(described, layer):
    module = MoE(described.layer, use_bias=described.use_bias)
    return lambda p, x: module.apply(layer._replace(params=p).variables, x)


def nnx_module(described, layer):
    def make():
        return blaze_jax.nnx.MoE(described.width, described.layer, use_bias=described.use_bias, rngs=nnx.Rngs(0))

    graph, params, rest = nnx.split(layer.put_into(nnx.eval_shape(make)), nnx.Param, ...)
    structure = jax.tree.structure(params)
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(layer.params), strict=True)
    assert all(held is loaded for held, loaded in pairs)
    return lambda p, x: nnx.merge(graph, jax.tree.unflatten(structure, jax.tree.leaves(p)), rest)(x)


@pytest.mark.default_cases("*-mixtral", "function-gpt_oss", "function-minicpm")
@pytest.mark.ci_cases("function-*")
@pytest.mark.parametrize("family", FAMILIES + LATER)
@pytest.mark.parametrize("form", [function, linen, nnx_module], ids=lambda form: form.__name__)
def test_output_and_gradients(form, family):
    layer, wanted = load(family), expected(family)
    apply = form(model(family), layer)

    @jax.jit
    def run(params, x, dy):
        y, vjp = jax.vjp(apply, params, x)
        return y, *vjp(dy)

    y, d_params, dx = run(layer.params, wanted["x"], wanted["dy"])
    gradients = load(f"{family}-gradients").params
    assert_close((y, dx, d_params), (wanted["y"], wanted["dx"], gradients), 2e-5)


def test_float8_computes_what_the_numbers_say():
    described, layer = model("deepseek_v3-float8"), load("deepseek_v3-float8", dtype=jnp.float32)
    wanted = expected("deepseek_v3-float8")
    y = jax.jit(function(described, layer))(layer.params, wanted["x"])
    assert_close(y, wanted["y"], 2e-5)
