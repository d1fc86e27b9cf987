"""The training step, compiled so that two runs have the same bits."""

import json
from collections.abc import Callable
from typing import Any, cast

import jax
from jax.interpreters.mlir import ir

from blaze_jax import transport_options
from train_example.config import TrainConfig
from train_example.model import Decoder
from train_example.step import Batch, TrainState, make_evaluation, make_train_step


def lower_step(
    config: TrainConfig, model: Decoder, state: TrainState, batch: Batch, out_shardings: Any = None
) -> jax.stages.Lowered:
    """The step `(state, batch) -> (state, metrics)`, lowered; `.compile(xla_options(config))` makes it a program.

    The new state takes the memory of the old one, which must not be used again.
    """
    return lower(config, make_train_step(config, model), state, batch, donate_argnums=0, out_shardings=out_shardings)


def lower(config: TrainConfig, function: Callable, *arguments: Any, **options: Any) -> jax.stages.Lowered:
    """A function of arrays, lowered with `options` of `jax.jit`, for a program as `lower_step` says."""
    lowered = jax.jit(function, **options).lower(*arguments)
    if jax.default_backend() == "gpu" and config.equal_bits:
        demand_equal_bits(cast(ir.Module, lowered.compiler_ir("stablehlo")))
    return lowered


def step_and_evaluation(
    config: TrainConfig, model: Decoder, state: TrainState, batch: Batch, held_out: Batch, shardings: Any = None
) -> tuple[Callable[[TrainState, Batch], Any], Callable[[TrainState, Batch], jax.Array]]:
    """The programs of the step and of the evaluation, whose results are left as `shardings` has them for the step's."""
    step = lower_step(config, model, state, batch, shardings).compile(xla_options(config))
    evaluate = jax.jit(make_evaluation(model), out_shardings=shardings and shardings[1])
    return step, evaluate.lower(state, held_out).compile()


def xla_options(config: TrainConfig) -> dict[str, Any]:
    """Options of XLA: fast transport between devices, and two runs with the same bits.

    Otherwise cuDNN's attention adds up gradients in any order. Conventional experts go without: they add up their
    tokens' gradients by scatters, and in place of each XLA would sort all numbers of all rows, 134 million for 16,384
    tokens of `1b`, twice in every layer.
    """
    wanted = config.equal_bits and config.experts_layer in ("blaze_jax", "dense-twin")
    equal_bits = {"xla_gpu_exclude_nondeterministic_ops": True} if wanted and jax.default_backend() == "gpu" else {}
    return transport_options() | equal_bits


def demand_equal_bits(module: ir.Module) -> None:
    """Marks the backward passes of cuDNN's attention in a lowered program as deterministic.

    XLA marks them by itself where its option says so, but only the first of several equal ones, and then fails to find
    the others' kernels when the program runs (openxla/xla pull request 46500).
    """

    def mark(op: ir.Operation) -> ir.WalkResult:
        if op.name == "stablehlo.custom_call" and "fmhaSoftmaxBackward" in str(op.attributes["call_target_name"]):
            config = json.loads(ir.StringAttr(op.attributes["backend_config"]).value)
            config["cudnn_fmha_backend_config"]["force_deterministic"] = True
            with op.context:
                op.attributes["backend_config"] = ir.StringAttr.get(json.dumps(config))
        return ir.WalkResult.ADVANCE

    module.operation.walk(mark)
