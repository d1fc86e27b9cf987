"""Pairs that the router's kernels have grouped already: the layer's experts take them up, and save a launch."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax import MoEConfig, Router, expert_ffn, moe
from blaze_jax.experts import compute_experts
from blaze_jax.routing import route_and_group
from pallas_kernels import hopper, simt
from tests.layers import DOORS
from tests.numerics import assert_same_bits

T, E, K, D, N = 300, 12, 3, 256, 256
CONFIG = MoEConfig(num_experts=E, experts_per_token=K, expert_width=N, implementation="mosaic_gpu")


def routed(**options):
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((T, E)), jnp.float32)
    with simt.interpreted():
        return route_and_group(logits, K, Router(**options), implementation="mosaic_gpu")


def test_are_those_of_dispatch():
    routing, grouped = routed()
    with simt.interpreted():
        assert_same_bits(grouped.dispatch, hopper.dispatch(routing.experts, E))
    assert grouped.kernels is hopper


@pytest.mark.parametrize("options", [{"expert_capacity": 9}, {"token_rounding": "nearest", "rounding_tile": 8}])
def test_not_of_another_choice(options):
    assert routed(**options)[1] is None


def test_another_implementation_groups_its_own():
    routing, grouped = routed()
    shapes = {"w_gate": (E, D, N), "w_up": (E, D, N), "w_down": (E, N, D)}
    params = {name: jnp.ones(shape, jnp.bfloat16) for name, shape in shapes.items()}
    arguments = (jnp.ones((T, D), jnp.bfloat16), params, routing.weights, routing.experts)
    options = {"activation": "swiglu", "save": "pre_activations", "implementation": "xla"}
    compute, alone = (partial(compute_experts, grouped=pairs, **options) for pairs in (grouped, None))
    assert_same_bits(jax.jit(compute)(*arguments), jax.jit(alone)(*arguments))
    # The programs too, since other rows may give the same bits.
    ours, theirs = (re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(f)(*arguments))) for f in (compute, alone))
    assert ours == theirs


def launches(layer):
    """How often each kernel from logits to rows stands in the program of a layer's value and gradients."""

    def step(params, x):
        return layer(params, x, CONFIG, jnp.bfloat16)[0].astype(jnp.float32).sum()

    params = {name: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16) for name, p in CONFIG.parameters(D).items()}
    traced = jax.jit(jax.value_and_grad(step, argnums=(0, 1))).trace(params, jax.ShapeDtypeStruct((T, D), jnp.bfloat16))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    names = ("moe_router", "moe_dispatch_count", "moe_dispatch_place")
    return [text.count(f"{name}_mosaic_gpu") for name in names]


@pytest.mark.parametrize("door", DOORS)
def test_two_launches_from_logits_to_rows(door):
    assert launches(DOORS[door]) == [1, 0, 1]


@pytest.mark.slow
def test_experts_of_somebody_else_group_what_they_are_given():
    def experts(*arguments, b_gate, b_up, b_down, **options):
        return expert_ffn(*arguments, **options)

    assert launches(lambda params, x, config, _: moe(x, params, config, experts=experts)) == [1, 1, 2]
