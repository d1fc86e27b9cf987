"""The training step and what XLA is told of it, the optimizer and the evaluation."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters.mlir import ir

from blaze_jax import transport_options
from tests.numerics import assert_close
from tests.train_example.small import CONFIG, FULL_MODEL, MODEL, decoder, train_step, windows
from train_example.compile_step import demand_equal_bits, xla_options
from train_example.model import stacked
from train_example.program.presets import PRESETS
from train_example.step import init_state, learning_rate_schedule, make_evaluation, matrices, working_copy


@pytest.mark.slow
def test_accumulation_gives_what_the_whole_batch_gives():
    # The load-balancing loss is of a microbatch, not a mean over tokens, so it is left out here.
    model = decoder(replace(MODEL, load_balancing_weight=0.0))
    batch = windows(1, 8, 17)
    step, state = train_step(CONFIG, model)
    whole, whole_metrics = step(state, batch)
    parts, parts_metrics = step(state, batch.reshape(4, 2, 17))
    np.testing.assert_allclose(parts_metrics.loss, whole_metrics.loss, rtol=1e-6)
    np.testing.assert_allclose(parts_metrics.gradient_norm, whole_metrics.gradient_norm, rtol=1e-5)
    np.testing.assert_array_equal(parts_metrics.tokens_per_expert, whole_metrics.tokens_per_expert)
    change = jax.tree.map(lambda new, old: abs(new - old).max(), whole.params, state.params)
    assert min(jax.tree.leaves(change)) > 1e-4
    # Adam divides by the gradient's size: where that is near nothing, rounding shows, so moments are compared too.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), parts.params, whole.params)
    moments = (parts.optimizer_state[1][0].mu, whole.optimizer_state[1][0].mu)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-7), *moments)


@pytest.mark.slow
def test_accumulation_carries_the_router_state_along():
    step, state = train_step(CONFIG, decoder(FULL_MODEL))
    after, metrics = step(state, windows(4, 2, 17))
    (bias,) = jax.tree.leaves(after.router_state)
    assert bias.shape == (2, 8)
    assert abs(bias).max() > 1.5 * FULL_MODEL.bias_update_rate  # more than one microbatch can move it
    np.testing.assert_array_equal(metrics.tokens_per_expert.sum(1), [8 * 16 * MODEL.experts_per_token] * 2)


@pytest.mark.slow
def test_auxiliary_losses_are_trained_on_but_reported_apart():
    def gradient_of_routers(weight):
        step, state = train_step(CONFIG, decoder(replace(MODEL, load_balancing_weight=weight)))
        after, metrics = step(state, windows(1, 8, 17))
        return after.optimizer_state[1][0].mu["moe_blocks"]["moe"]["w_router"], metrics

    (without, metrics_without), (with_loss, metrics_with) = gradient_of_routers(0.0), gradient_of_routers(1.0)
    np.testing.assert_allclose(metrics_with.loss, metrics_without.loss, rtol=1e-6)
    assert metrics_without.auxiliary_loss == 0
    assert MODEL.num_layers <= metrics_with.auxiliary_loss < 2 * MODEL.num_layers
    assert abs(with_loss - without).max() > 0.1 * abs(with_loss).max()


@pytest.mark.slow
def test_weight_decay_is_for_matrices():
    _, state = train_step(CONFIG, decoder(FULL_MODEL))
    decayed = jax.tree_util.tree_leaves_with_path(matrices(state.params))
    assert {jax.tree_util.keystr(path) for path, on in decayed if not on} == {
        "['final_norm']['scale']",
        *(f"['{k}_blocks']['{n}_norm']['scale']" for k in ("dense", "moe") for n in ("attention", "feed_forward")),
    }


def test_learning_rate_warms_up_and_decays_to_a_tenth():
    schedule = learning_rate_schedule(replace(CONFIG, steps=200, learning_rate=1.0))
    rates = [float(schedule(step)) for step in range(201)]
    assert rates[0] == pytest.approx(0.1)
    assert int(np.argmax(rates)) == 10
    assert rates[10] == pytest.approx(1.0)
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert rates[200] == pytest.approx(0.1)
    for steps in (1, 2, 3):
        schedule = learning_rate_schedule(replace(CONFIG, steps=steps))
        assert all(0 < float(schedule(step)) <= CONFIG.learning_rate * 1.000001 for step in range(steps))


@pytest.mark.slow
def test_products_get_a_16_bit_copy_of_their_matrices_and_routers_and_norms_do_not():
    _, state = train_step(CONFIG, decoder(FULL_MODEL))
    copy = working_copy(state.params, jnp.bfloat16)
    kinds = {(path[-1].key, leaf.dtype.name) for path, leaf in jax.tree_util.tree_leaves_with_path(copy)}
    assert {name for name, dtype in kinds if dtype == "float32"} == {"scale", "w_router"}
    matrices_of = ("w_gate", "w_up", "w_down", "shared_w_up", "kernel", "embedding")
    assert {(name, "bfloat16") for name in matrices_of} <= kinds


def test_unrolled_blocks_are_initialised_in_a_loop():
    program = str(jax.make_jaxpr(partial(init_state, CONFIG, decoder(unroll=True)))())
    assert "unroll=1" in program
    assert f"unroll={MODEL.num_layers}" not in program


@pytest.mark.slow
def test_unrolled_blocks_learn_what_a_loop_over_blocks_learns():
    batch, found = windows(2, 4, 17), []
    for unroll in (False, True):
        step, state = train_step(replace(CONFIG, unroll=unroll), decoder(FULL_MODEL, unroll=unroll))
        state, metrics = step(state, batch)
        found.append((metrics, stacked(state.optimizer_state[1][0].mu)))
    assert_close(*found, tolerance=1e-4)


@pytest.mark.slow
def test_16_bit_arithmetic_and_momentum_learn_what_float32_learns():
    def losses(dtype, momentum_dtype):
        step, state = train_step(replace(CONFIG, momentum_dtype=momentum_dtype), decoder(FULL_MODEL, dtype=dtype))
        found = []
        for _ in range(10):
            state, metrics = step(state, windows(1, 8, 17))
            found.append(float(metrics.loss))
        return found, state

    found, state = losses(jnp.bfloat16, "bfloat16")
    np.testing.assert_allclose(found, losses(jnp.float32, "float32")[0], rtol=0.02)
    adam = state.optimizer_state[1][0]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(adam.mu)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves((adam.nu, state.params))} == {"float32"}


@pytest.mark.slow
def test_evaluation_of_unrolled_blocks_is_a_loop_over_them():
    loop, unrolled = decoder(), decoder(unroll=True)
    state = jax.eval_shape(partial(init_state, CONFIG, loop))
    program, other = (jax.make_jaxpr(make_evaluation(model))(state, windows(2, 2, 17)) for model in (loop, unrolled))
    assert str(program) == str(other)


@pytest.mark.slow
def test_evaluation_is_the_mean_cross_entropy_whatever_the_microbatches():
    model = decoder(FULL_MODEL)
    _, state = train_step(CONFIG, model)
    batches = windows(3, 4, 17)
    variables = {"params": state.params, "router_state": state.router_state}
    logits = jax.jit(model.apply)(variables, batches.reshape(12, 17)[:, :-1])
    targets = batches.reshape(12, 17)[:, 1:, None].astype(np.int32)
    expected = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets, -1).mean()
    evaluate = jax.jit(make_evaluation(model))
    np.testing.assert_allclose(evaluate(state, batches), expected, rtol=1e-6)
    np.testing.assert_allclose(evaluate(state, batches.reshape(1, 12, 17)), expected, rtol=1e-6)


_ATTENTION = """
func.func public @main(%x: tensor<f32>) -> tensor<f32> {
  %0 = stablehlo.custom_call @"__cudnn$fmhaSoftmax"(%x) {backend_config = "JSON"} : (tensor<f32>) -> tensor<f32>
  %1 = stablehlo.custom_call @"__cudnn$fmhaSoftmaxBackward"(%0) {backend_config = "JSON"} : (tensor<f32>) -> tensor<f32>
  %2 = stablehlo.custom_call @"__cudnn$fmhaSoftmaxBackward"(%1) {backend_config = "JSON"} : (tensor<f32>) -> tensor<f32>
  return %2 : tensor<f32>
}
""".replace("JSON", r"{\22cudnn_fmha_backend_config\22: {\22fmha_scale\22: 0.125}}")


def test_every_backward_pass_of_attention_is_deterministic_and_no_other_call_changes():
    with jax.jit(jnp.sin).lower(1.0).compiler_ir("stablehlo").context:
        module = ir.Module.parse(_ATTENTION)
        demand_equal_bits(module)
        calls = [line for line in str(module).splitlines() if "custom_call" in line]
    marked = [r"\22fmha_scale\22: 0.125, \22force_deterministic\22: true" in line for line in calls]
    assert marked == [False, True, True]


def test_equal_bits_are_asked_for_where_they_are_wanted_and_cost_little(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    config = PRESETS["1b"]
    assert xla_options(config) == transport_options() | {"xla_gpu_exclude_nondeterministic_ops": True}
    for others in ({"experts_layer": "sort+tokamax"}, {"equal_bits": False}):
        assert xla_options(replace(config, **others)) == transport_options()
