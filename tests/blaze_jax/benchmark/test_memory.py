"""What is kept for the backward pass, by name."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from blaze_jax import expert_ffn
from blaze_jax.benchmark.memory import kept_by_name, saved_bytes, saved_residuals
from blaze_jax.benchmark.sizes import Sizes, abstract_inputs, forward_and_backward

SIZES = Sizes(64, 32, 16, 4, 2)
INPUTS = abstract_inputs(SIZES, jnp.bfloat16)
PAIRS = SIZES.pairs


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_the_layer_keeps_its_arguments_pre_activations_and_indices(wrap):
    residuals = saved_residuals(wrap(expert_ffn), *INPUTS)
    assert [r.name for r in residuals if r.is_argument] == ["x", "w_gate", "w_up", "w_down", "weights"]
    own = {r.name: r for r in residuals if not r.is_argument and r.name != "moe_indices"}
    assert own.keys() == {"moe_gate", "moe_up"}
    assert own["moe_gate"].bytes == own["moe_up"].bytes == 2 * PAIRS * 16
    indices = sum(r.bytes for r in residuals if r.name == "moe_indices")
    assert saved_bytes(wrap(expert_ffn), *INPUTS) == 2 * 2 * PAIRS * 16 + indices
    assert 0 < indices < 12 * PAIRS


def test_an_operation_names_what_has_no_name_and_trees_have_paths():
    def function(params, x):
        return jnp.tanh(x @ params["w"])

    shapes = {"w": jax.ShapeDtypeStruct((4, 8), jnp.float32)}, jax.ShapeDtypeStruct((3, 4), jnp.float32)
    names = {r.name: r.is_argument for r in saved_residuals(function, *shapes)}
    assert names["params['w']"]
    assert names["x"]
    assert not all(names.values())


def test_a_step_that_holds_its_backward_pass():
    both = jax.jit(forward_and_backward(expert_ffn))
    kept = kept_by_name(jax.make_jaxpr(both)(*INPUTS, INPUTS[0]).jaxpr)
    assert kept["moe_gate"] == kept["moe_up"] == 2 * PAIRS * 16
    nothing = jax.jit(forward_and_backward(partial(expert_ffn, save="inputs")))
    assert kept_by_name(jax.make_jaxpr(nothing)(*INPUTS, INPUTS[0]).jaxpr).keys() == {"moe_indices"}


def test_a_loop_over_layers_counts_each_and_a_checkpoint_none():
    def loss(x, *rest, remat):
        body = jax.checkpoint(lambda x: expert_ffn(x, *rest)) if remat else (lambda x: expert_ffn(x, *rest))
        return jax.lax.scan(lambda x, _: (body(x), None), x, None, length=5)[0].sum()

    def gradient(*args, remat):
        return jax.grad(partial(loss, remat=remat))(*args)

    kept = kept_by_name(jax.make_jaxpr(partial(gradient, remat=False))(*INPUTS).jaxpr)
    assert kept["moe_gate"] == 5 * 2 * PAIRS * 16
    recomputed = kept_by_name(jax.make_jaxpr(partial(gradient, remat=True))(*INPUTS).jaxpr)
    assert "moe_gate" not in recomputed
