"""`--compile-only h200`: the memory that a run's step needs on an H200, by the compiler's own plan, with no GPU."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np

from blaze_jax.benchmark.memory import MemoryPlan, plan_of
from pallas_kernels.compile_only import compile_for_gpu
from train_example.config import TrainConfig, UserError
from train_example.program.setup import make_model
from train_example.step import init_state, make_train_step

H200_BYTES = 141 * 10**9


def memory_plan(config: TrainConfig) -> MemoryPlan:
    """The plan of a run's training step. No weights are needed, nor made.

    The attention is XLA's, which keeps its scores: cuDNN's can be compiled on a GPU only, and needs less.

    Raises:
      UserError: the compiler for an H200 is not installed.
    """
    model = make_model(replace(config, implementation=config.implementation or "mosaic_gpu", attention="xla"))
    state = jax.eval_shape(partial(init_state, config, model))
    microbatches = (config.accumulate, config.batch_size // config.accumulate, config.sequence_length + 1)
    batch = jax.ShapeDtypeStruct(microbatches, np.int32)
    step = make_train_step(config, model)
    try:
        plan = plan_of(compile_for_gpu(step, state, batch, donate_argnums=0).memory)
    except NotImplementedError as error:
        raise UserError(f"--compile-only h200: {error}") from error
    if plan is None:
        raise UserError("--compile-only h200: this version of jax's plugin says nothing of the memory")
    return plan


def plan_text(config: TrainConfig, plan: MemoryPlan) -> str:
    """The plan in a line, for the user."""
    fits = "fits on one" if plan.total <= H200_BYTES else f"takes {-(-plan.total // H200_BYTES)} or more"
    return (
        f"{config.batch_size} × {config.sequence_length} tokens a step, trained: {config.trained}: "
        f"{plan.total / 1e9:.0f} GB, of which state and batch {plan.arguments / 1e9:.0f} GB; {fits} H200"
    )
