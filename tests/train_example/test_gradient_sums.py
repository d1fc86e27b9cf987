"""Microbatches whose experts' gradients are added to running sums in the backward pass."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax import MoE, MoEConfig
from blaze_jax.plan import TokenRanges
from blaze_jax.precision import fp8_everywhere
from tests.numerics import assert_close, assert_same_bits, scaled_error
from tests.train_example.small import CONFIG, FULL_MODEL, decoder, windows
from train_example import step
from train_example.model import stacked
from train_example.step import init_state

PARTS = 3


def mean_gradients(model, state, batch):
    return stacked(jax.jit(lambda state, batch: step._gradients(model, state, batch)[0])(state, batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unroll", "remat"), [(False, "none"), (True, "none"), (False, "full"), (True, "except-experts")]
)
@pytest.mark.ci_cases("False-none")
def test_the_same_gradients_as_added_up_outside(unroll, remat, monkeypatch):
    model = decoder(FULL_MODEL, unroll=unroll, remat=remat)
    state = init_state(replace(CONFIG, model=FULL_MODEL), model)
    batch = windows(PARTS, 4, 17)
    ours = mean_gradients(model, state, batch)
    monkeypatch.setattr(step, "_no_sums", lambda *_: {})
    assert_close(ours, mean_gradients(model, state, batch), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("unroll", "parts"), [(False, PARTS), (True, PARTS), (True, 1)])
@pytest.mark.ci_cases("True-3")
def test_the_same_bits_as_with_weights_cast_in_every_pass(unroll, parts, monkeypatch):
    model = decoder(FULL_MODEL, unroll=unroll)
    model = model.clone(moe=replace(model.moe, precision="fp8"))
    state = init_state(replace(CONFIG, model=FULL_MODEL), model)
    batch = windows(parts, 4, 17)
    with fp8_everywhere():
        ours = mean_gradients(model, state, batch)
        monkeypatch.setattr(step, "cast_experts", lambda params, *_: params)
        assert_same_bits(ours, mean_gradients(model, state, batch))
    plain = mean_gradients(model.clone(moe=replace(model.moe, precision=None)), state, batch)
    assert scaled_error(*(tree["moe_blocks"]["moe"]["w_up"] for tree in (ours, plain))) > 0.01


CONFIG_OF_LAYER = MoEConfig(num_experts=4, experts_per_token=2, expert_width=24)


def parameters_of(layer, dtype):
    """Random ones: to make them as the layer does would compile for seconds."""
    shapes = step.nn.unbox(jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros((1, 16))))["params"]
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape) / 4, dtype), shapes)


def layer_and_sums(dtype, number, layers, **options):
    """A layer's loss and what flows on of the sums, as functions of them and the tokens; and zeros for them."""
    layer = MoE(CONFIG_OF_LAYER, dtype=dtype, train=False, **options)
    params = parameters_of(layer, jnp.bfloat16)
    zeros = {n: jnp.zeros((layers, *params[n].shape), jnp.float32) for n in ("w_gate", "w_up", "w_down")}

    def loss(params, sums, x):
        sums = sums | {"layer": jnp.int32(number)}
        variables = {"params": params, "gradient_sums": sums}
        y, sown = layer.apply(variables, x, mutable=["gradient_sums", "losses", "intermediates"])
        flown = dict(sown["gradient_sums"])
        assert flown.pop("layer") is not None
        return (jnp.sum(jnp.square(y.astype(jnp.float32))), flown)

    return loss, params, zeros


@pytest.mark.slow
def test_float32_sums_are_nearer_to_float64_than_sums_of_rounded_gradients():
    """And those of other layers stay as they are."""
    loss, params, sums = layer_and_sums(jnp.bfloat16, 1, 2)
    microbatches = jnp.asarray(np.random.default_rng(0).standard_normal((8, 32, 16)), jnp.bfloat16)

    @jax.jit
    def add(sums, x):
        (value, _), gradients = jax.vjp(lambda sums: loss(params, sums, x), sums)
        return gradients((jnp.ones_like(value), sums))[0]

    @jax.jit
    def exact(x):  # the float32 gradients of one microbatch, which are rounded to bfloat16 outside
        (value, _), gradients = jax.vjp(lambda s: loss(params, s, x), sums)
        return gradients((jnp.ones_like(value), jax.tree.map(jnp.zeros_like, sums)))[0]

    wide = rounded = jax.tree.map(lambda a: np.zeros(a.shape[1:]), sums)
    total = sums
    for x in microbatches:
        total = add(total, x)
        one = {name: np.asarray(array[1]) for name, array in exact(x).items()}
        wide = {name: wide[name] + one[name].astype(np.float64) for name in one}
        rounded = {n: rounded[n] + np.asarray(jnp.asarray(one[n]).astype(jnp.bfloat16), np.float64) for n in one}
    for name, array in total.items():
        assert_same_bits(array[0], jnp.zeros_like(array[0]))
        assert scaled_error(array[1], wide[name]) < 1e-6
        assert scaled_error(rounded[name], wide[name]) > 1e-4


def test_examples_of_vmap_are_refused():
    loss, params, sums = layer_and_sums(jnp.float32, 0, 1)

    def of_example(x):
        (value, _), gradients = jax.vjp(lambda sums: loss(params, sums, x), sums)
        return gradients((jnp.ones_like(value), sums))[0]

    with pytest.raises(NotImplementedError, match=r"not for jax\.vmap"):
        jax.eval_shape(jax.vmap(of_example), jnp.ones((2, 8, 16)))


def test_experts_that_know_no_sums_are_refused():
    def zeros(x, *_, **__):
        return jnp.zeros_like(x)

    layer = MoE(CONFIG_OF_LAYER, experts=zeros, train=False)
    params = parameters_of(layer, jnp.float32)
    sums = {n: params[n][None] for n in ("w_gate", "w_up", "w_down")} | {"layer": jnp.int32(0)}
    variables = {"params": params, "gradient_sums": sums}
    with pytest.raises(NotImplementedError, match="on one device: add the gradients of others up outside"):
        jax.eval_shape(partial(layer.apply, mutable=["gradient_sums"]), variables, jnp.zeros((1, 16)))


@pytest.mark.slow
def test_ranges_of_tokens_add_to_the_sums(monkeypatch):
    monkeypatch.setattr("blaze_jax.transformations.are_observers", lambda: True)  # calls of the layer are traced anew
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 37, 16)), jnp.bfloat16)

    def gradients():
        loss, params, sums = layer_and_sums(jnp.bfloat16, 1, 2, use_bias=True)
        (value, _), vjp = jax.vjp(loss, params, sums, x)
        return vjp((jnp.ones_like(value), jax.tree.map(lambda array: array + 1, sums)))

    at_once = gradients()
    monkeypatch.setattr(
        "blaze_jax.experts.token_ranges", lambda num_tokens, *_: TokenRanges(num_tokens, -(-num_tokens // 2))
    )
    of_params, of_sums, of_tokens = gradients()
    assert_same_bits(of_tokens, at_once[2])
    assert_close(of_sums, at_once[1], 1e-6)
    assert_close(of_params, at_once[0], 1e-2)
