"""The training step, compiled."""

from typing import Any

import jax
import numpy as np
from jaxtyping import UInt8

from train_example.config import TrainConfig
from train_example.model import Decoder
from train_example.optimizer import learning_rate_schedule, make_optimizer
from train_example.step import TrainState, make_train_step


def compile_step(
    config: TrainConfig, model: Decoder, state: TrainState, batch: UInt8[np.ndarray, "A M S+1"], **options: Any
) -> jax.stages.Compiled:
    """`(state, batch) -> (state, metrics)`, ahead of time: no step's time has compilation in it.

    The new state takes the memory of the old one, which must not be used again. `options` are XLA's.
    """
    step = make_train_step(model, make_optimizer(config), learning_rate_schedule(config))
    return jax.jit(step, donate_argnums=0).lower(state, batch).compile(compiler_options() | options)


def compiler_options() -> dict[str, Any]:
    """What gives two runs the same bits: without it cuDNN's attention adds up gradients in any order."""
    return {"xla_gpu_exclude_nondeterministic_ops": True} if jax.default_backend() == "gpu" else {}
