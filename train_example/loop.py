"""The training loop: steps, evaluations, checkpoints."""

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped, UInt8

from train_example.compile_step import compile_step
from train_example.config import TrainConfig
from train_example.data import Corpus
from train_example.errors import UserError
from train_example.interrupt import Interrupt
from train_example.memory import peak_memory_gib
from train_example.metrics import MetricsLog, Record
from train_example.optimizer import make_optimizer
from train_example.progress import Progress
from train_example.public_model import load_params
from train_example.run_once import jit_once
from train_example.setup import Setup
from train_example.step import StepMetrics, TrainState, init_state, make_evaluation

_MAX_HELD_OUT_WINDOWS = 256
_LOAD_RECORDS = 100


def train(setup: Setup, log: MetricsLog, progress: Progress, interrupt: Interrupt) -> TrainState:
    """Takes the steps that are left, or those until the interrupt, and saves the state after the last.

    Raises:
      UserError: the loss is not finite any more.
    """
    config = setup.config
    state = first_state(setup)
    if setup.first_step == config.steps:
        return state

    batch = _batch(setup, setup.first_step)
    held_out = _split(setup, setup.corpus.held_out_starts(_MAX_HELD_OUT_WINDOWS, config.batch_size))
    train_step, evaluate = _compile(setup, state, batch, held_out)
    progress.start()
    start = time.perf_counter() - (log.records[-1]["elapsed"] if log.records else 0)
    for step in range(setup.first_step + 1, config.steps + 1):
        step_start = time.perf_counter()
        state, on_device = train_step(state, batch)
        batch = _batch(setup, step)  # the next one, while the device computes
        metrics = jax.device_get(on_device)
        record = _record(setup, step, metrics, time.perf_counter() - step_start)
        if _due(config, step, config.evaluate_every):
            record["held_out"] = _bits(evaluate(state, held_out), setup.corpus)
        record["elapsed"] = time.perf_counter() - start
        check_finite(config, record)
        log.write(record)
        progress.update(record)
        stop = setup.devices.any_process(interrupt.requested)
        if stop or _due(config, step, config.checkpoint_every):
            setup.checkpoints.save(step, state, setup.description)
        if stop:
            break
    return state


def _compile(setup: Setup, state: TrainState, batch: Any, held_out: Any) -> tuple[Callable, Callable]:
    """The step and the evaluation, ahead of time: it cannot happen twice."""
    everywhere = setup.devices.everywhere
    placed = None if everywhere is None else (jax.tree.map(lambda array: array.sharding, state), everywhere)
    train_step = compile_step(setup.config, setup.model, state, batch, placed)
    evaluate = jax.jit(make_evaluation(setup.model), out_shardings=everywhere)
    return train_step, evaluate.lower(state, held_out).compile()


def first_state(setup: Setup) -> TrainState:
    """The state to go on from: the checkpoint's, or a fresh one."""

    def init() -> TrainState:
        return init_state(setup.config, setup.model)

    like = jax.eval_shape(init)
    shardings = setup.devices.shardings(like, setup.model.moe, setup.config.model.width)
    if setup.first_step:
        if shardings is not None:
            like = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), like, shardings)
        return setup.checkpoints.restore(setup.first_step, like)
    if setup.config.checkpoint:
        params = load_params(setup.config.checkpoint, setup.model, shardings and shardings.params)
        make_moments = jit_once(make_optimizer(setup.config).init, shardings and shardings.optimizer_state)
        step = jax.device_put(jnp.int32(0), shardings and shardings.step)
        return TrainState(step, params, {}, make_moments(params))
    return jit_once(init, shardings)()


def _batch(setup: Setup, step: int) -> UInt8[Array, "A M S+1"]:
    return _split(setup, setup.corpus.batch_starts(setup.config.seed, step, setup.config.batch_size))


def _split(setup: Setup, starts: Int[np.ndarray, " N"]) -> UInt8[Array, "A M S+1"]:
    """The windows from there, by microbatch, on the devices that compute with them."""
    by_microbatch = microbatches(setup.config, starts)
    return setup.devices.split(by_microbatch, setup.corpus.windows, setup.config.sequence_length + 1)


def microbatches(config: TrainConfig, windows: Shaped[np.ndarray, "N *_"]) -> Shaped[np.ndarray, "A M *_"]:
    """Windows, or where they start, by the microbatch that they are computed in."""
    return windows.reshape(-1, config.batch_size // config.accumulate, *windows.shape[1:])


def _due(config: TrainConfig, step: int, every: int) -> bool:
    return step % every == 0 or step == config.steps


def _record(setup: Setup, step: int, metrics: StepMetrics, seconds: float) -> Record:
    config, load = setup.config, metrics.tokens_per_expert
    record = {
        "step": step,
        "loss": _bits(metrics.loss, setup.corpus),
        "auxiliary_loss": float(metrics.auxiliary_loss),
        "gradient_norm": float(metrics.gradient_norm),
        "learning_rate": float(metrics.learning_rate),
        "balance": float((load.max(1) / load.mean(1)).max()),
        "tokens_per_second": config.batch_size * config.sequence_length / seconds,
    }
    if (peak := peak_memory_gib()) is not None:
        record["peak_memory_gib"] = peak
    if step == 1 or _due(config, step, max(1, config.steps // _LOAD_RECORDS)):
        record["load"] = load.tolist()
    return record


def _bits(nats: Float[Array, ""], corpus: Corpus) -> float:
    """Bits per byte."""
    return float(nats) / math.log(2) / corpus.stream.bytes_per_unit


def check_finite(config: TrainConfig, record: Record) -> None:
    """Raises UserError if a metric is infinite or no number."""
    for name, value in record.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(
                f"training diverged, {name} is {value} at step {record['step']}: try less than "
                f"--learning-rate {config.learning_rate}"
            )
