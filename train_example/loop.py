"""The training loop: batches go to the devices, steps and evaluations run, and each step's numbers come out."""

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import P
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from blaze_jax import Parallelism
from train_example.compile_step import step_and_evaluation
from train_example.config import TrainConfig, UserError
from train_example.data import Corpus
from train_example.model import Decoder
from train_example.step import Batch, StepMetrics, TrainState

type Record = dict[str, Any]

_MAX_HELD_OUT_WINDOWS = 256
_LOAD_RECORDS = 100


def train(
    config: TrainConfig,
    model: Decoder,
    corpus: Corpus,
    state: TrainState,
    elapsed: float = 0.0,
    programs: Callable[..., tuple[Callable, Callable]] = step_and_evaluation,
) -> Iterator[tuple[TrainState, Record]]:
    """Takes the steps that are left, one for each time that it is asked for the next.

    A record holds the step's "loss" and others in bits per byte, "held_out" where the held-out text was evaluated, and
    the seconds since the run began, `elapsed` of them before. A state is good until the next step, which takes its
    memory. `programs` compiles the step and the evaluation.

    Raises:
      UserError: a number is not finite any more.
    """
    first, parallel = int(state.step), model.parallel
    if first == config.steps:
        return
    place = partial(placed, config, corpus, parallel)
    batch = place(corpus.batch_starts(config.seed, first, config.batch_size))
    held_out = place(corpus.held_out_starts(_MAX_HELD_OUT_WINDOWS, config.batch_size))
    # Ahead of time: compiling cannot happen twice, and no step's time has it.
    train_step, evaluate = programs(config, model, state, batch, held_out, step_shardings(parallel, state))
    start = time.perf_counter() - elapsed
    for step in range(first + 1, config.steps + 1):
        step_start = time.perf_counter()
        state, on_device = train_step(state, batch)
        # The next one, while the device computes.
        batch = place(corpus.batch_starts(config.seed, step, config.batch_size))
        metrics = jax.device_get(on_device)
        record = _record(config, corpus, step, metrics, time.perf_counter() - step_start)
        if due(config, step, config.evaluate_every):
            record["held_out"] = _bits(evaluate(state, held_out), corpus)
        record["elapsed"] = time.perf_counter() - start
        check_finite(config, record)
        yield state, record


def due(config: TrainConfig, step: int, every: int) -> bool:
    """True after every so many steps, and after the last."""
    return step % every == 0 or step == config.steps


def peak_memory_gib() -> float | None:
    """The most memory the device has had in use so far, in GiB; None where it does not say, as on a CPU."""
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return None if peak is None else peak / 2**30


def check_finite(config: TrainConfig, record: Record) -> None:
    """Raises UserError if a metric is infinite or no number."""
    for name, value in record.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(
                f"training diverged, {name} is {value} at step {record['step']}: try less than "
                f"--learning-rate {config.learning_rate}"
            )


def placed(config: TrainConfig, corpus: Corpus, parallel: Parallelism | None, starts: Int[np.ndarray, " N"]) -> Batch:
    """The windows from there, by microbatch; over a mesh, each process reads what its devices compute with."""
    starts = starts.reshape(-1, config.batch_size // config.accumulate)
    if parallel is None:
        return corpus.windows(starts)
    by_sequence = NamedSharding(mesh_of(parallel), P(None, parallel.axes))

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        return corpus.windows(starts if index is None else starts[index[:2]])

    return jax.make_array_from_callback((*starts.shape, config.sequence_length + 1), by_sequence, read)


def step_shardings(parallel: Parallelism | None, state: TrainState) -> tuple[TrainState, NamedSharding] | None:
    """How a step leaves its two results on the mesh, the state as it is and metrics everywhere; None without one."""
    if parallel is None:
        return None
    return jax.tree.map(lambda array: array.sharding, state), NamedSharding(mesh_of(parallel), P())


def mesh_of(parallel: Parallelism) -> Mesh:
    """The mesh that a run's `Parallelism` names, which others may take from what is around them."""
    assert isinstance(parallel.mesh, Mesh)
    return parallel.mesh


def _record(config: TrainConfig, corpus: Corpus, step: int, metrics: StepMetrics, seconds: float) -> Record:
    load = metrics.tokens_per_expert
    record = {
        "step": step,
        "loss": _bits(metrics.loss, corpus),
        "auxiliary_loss": float(metrics.auxiliary_loss),
        "gradient_norm": float(metrics.gradient_norm),
        "learning_rate": float(metrics.learning_rate),
        "balance": float((load.max(1) / load.mean(1)).max()),
        "tokens_per_second": config.batch_size * config.sequence_length / seconds,
    }
    if (peak := peak_memory_gib()) is not None:
        record["peak_memory_gib"] = peak
    if step == 1 or due(config, step, max(1, config.steps // _LOAD_RECORDS)):
        record["load"] = load.tolist()
    return record


def _bits(nats: Float[Array, ""], corpus: Corpus) -> float:
    """Bits per byte."""
    return float(nats) / math.log(2) / corpus.stream.bytes_per_unit
