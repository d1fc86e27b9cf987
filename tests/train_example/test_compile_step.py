"""Options and marks of the step's program before it is compiled."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.interpreters.mlir import ir

from blaze_jax import transport_options
from train_example.compile_step import demand_equal_bits, xla_options
from train_example.program.presets import PRESETS

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


def test_the_scatters_of_conventional_experts_keep_their_speed(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    config = PRESETS["1b"]
    assert xla_options(config) == transport_options() | {"xla_gpu_exclude_nondeterministic_ops": True}
    assert xla_options(replace(config, experts_layer="sort+tokamax")) == transport_options()
