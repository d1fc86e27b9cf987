"""The training step, compiled."""

import json
from typing import Any, cast

import jax
import numpy as np
from jax.interpreters.mlir import ir
from jaxtyping import UInt8

from blaze_jax.parallelism import transport_options
from train_example.config import TrainConfig
from train_example.model import Decoder
from train_example.step import TrainState, make_train_step


def compile_step(
    config: TrainConfig,
    model: Decoder,
    state: TrainState,
    batch: UInt8[np.ndarray, "A M S+1"],
    out_shardings: Any = None,
    **options: Any,
) -> jax.stages.Compiled:
    """`(state, batch) -> (state, metrics)`, ahead of time: no step's time has compilation in it.

    The new state takes the memory of the old one, which must not be used again. `options` are XLA's. Two runs have the
    same bits, unless conventional experts compute them on a GPU.
    """
    lowered = lower_step(config, model, state, batch, out_shardings)
    return lowered.compile(transport_options() | equal_bits_options(config) | options)


def lower_step(
    config: TrainConfig,
    model: Decoder,
    state: TrainState,
    batch: UInt8[np.ndarray, "A M S+1"],
    out_shardings: Any = None,
) -> jax.stages.Lowered:
    """What `compile_step` compiles, with `equal_bits_options` among XLA's."""
    step = make_train_step(config, model)
    lowered = jax.jit(step, donate_argnums=0, out_shardings=out_shardings).lower(state, batch)
    if jax.default_backend() == "gpu":
        demand_equal_bits(cast(ir.Module, lowered.compiler_ir("stablehlo")))
    return lowered


def equal_bits_options(config: TrainConfig) -> dict[str, bool]:
    """XLA's options for two runs to have the same bits: otherwise cuDNN's attention adds up gradients in any order.

    Not for conventional experts. They add up their tokens' gradients by scatters, and in place of each XLA would sort
    all numbers of all rows, 134 million for 16,384 tokens of `1b`, twice in every layer.
    """
    wanted = jax.default_backend() == "gpu" and config.experts_layer == "blaze_jax"
    return {"xla_gpu_exclude_nondeterministic_ops": True} if wanted else {}


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
