"""Rows that the router's kernels have grouped already: the same rows, and one launch less."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax import expert_ffn, route
from blaze_jax.layer import moe
from pallas_kernels import hopper
from pallas_kernels.simt import language as simt
from tests.layers import CONFIGS, random_parameters, random_tokens
from tests.numerics import assert_same_bits

T, E, K, D, N = 300, 12, 3, 256, 256


def routed(**options):
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((T, E)), jnp.float32)
    with simt.interpreted():
        return route(logits, K, implementation="mosaic_gpu", **options)


def call(routing, implementation=None, num_experts=E, **options):
    x = jnp.ones((T, D), jnp.bfloat16)
    weights = [jnp.ones((num_experts, *shape), jnp.bfloat16) for shape in ((D, N), (D, N), (N, D))]
    return expert_ffn(x, *weights, routing.weights, routing.experts, implementation=implementation, **options)


def test_are_those_of_dispatch():
    routing = routed()
    with simt.interpreted():
        assert_same_bits(routing.dispatched, hopper.dispatch(routing.experts, E))


@pytest.mark.parametrize("options", [{"expert_capacity": 9}, {"token_rounding": "nearest", "rounding_tile": 8}])
def test_not_of_another_choice(options):
    assert routed(**options).dispatched is None


def test_another_implementation_makes_its_own():
    routing = routed()
    assert_same_bits(call(routing, "xla", dispatched=routing.dispatched), call(routing, "xla"))


def test_must_be_of_the_experts_given():
    routing = routed()
    with pytest.raises(ValueError, match=r"dispatched is of \(T, K\) = \(300, 3\) and E=12, must be of the experts"):
        call(routing, "mosaic_gpu", num_experts=13, dispatched=routing.dispatched)


def kernels_of(function, *args):
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return {name for name in ("moe_router", "moe_dispatch_count", "moe_dispatch_place") if name in text}, text


def test_two_launches_from_logits_to_rows():
    def step(x, logits, *weights):
        routing = route(logits, K, implementation="mosaic_gpu")
        y = expert_ffn(
            x, *weights, routing.weights, routing.experts, implementation="mosaic_gpu", dispatched=routing.dispatched
        )
        return y.astype(jnp.float32).sum() + routing.load_balancing_loss

    shapes = [((T, D), "bfloat16"), ((T, E), "float32"), *(((E, *s), "bfloat16") for s in ((D, N), (D, N), (N, D)))]
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    names, text = kernels_of(jax.value_and_grad(step, argnums=(0, 1, 2)), *args)
    assert names == {"moe_router", "moe_dispatch_place"}
    assert text.count("moe_dispatch_place_mosaic_gpu") == 1


def test_the_layer_hands_them_on_and_keeps_them_to_itself():
    config, x = CONFIGS["everything"], random_tokens(30)
    _, routing = moe(x, random_parameters(config), config)
    assert routing.dispatched is None
