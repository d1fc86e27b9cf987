"""Trains one model with experts that multiply 8 bits and without, from several seeds: `compare_precisions`.

With each seed both runs have the same first parameters and the same batches. Nothing is saved but a results file. The
experts multiply 8 bits whatever their sizes, also where `precision="fp8"` would leave it out.
"""

import math
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from blaze_jax.benchmark.results import ResultsFile, command_line, describe, environment
from blaze_jax.benchmark.tables import terminal
from blaze_jax.precision import fp8_everywhere
from train_example.compile_step import lower_step, xla_options
from train_example.config import TrainConfig
from train_example.data import Corpus, open_text
from train_example.loop import placed
from train_example.program.devices import allow_all_memory
from train_example.program.measured import configuration, options_parser
from train_example.program.model import make_model
from train_example.step import TrainState, init_state

_LAST = 20
"""The final loss is the mean over the last one in so many steps."""

_AHEAD = 8
"""Steps that the host may be ahead of the device, so that neither waits."""


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = options_parser("train_example.compare_precisions", __doc__)
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="runs of each, from --seed on (5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    arguments = parser.parse_args(argv)
    if arguments.seeds < 2:
        parser.error(f"--seeds {arguments.seeds} must be at least 2: fewer have no spread")
    allow_all_memory()
    config, about = configuration(arguments, "blaze_jax"), environment()
    try:
        file = ResultsFile(arguments.json, about, command_line("train_example.compare_precisions", argv))
    except ValueError as error:
        print(f"compare_precisions: {error}", file=sys.stderr)
        return 2
    print(f"{describe(about)}; preset {config.preset}", flush=True)
    file.add(compare(config, arguments.seeds))
    print(terminal(file.content["records"][0]))
    return 0


def compare(config: TrainConfig, seeds: int) -> dict[str, Any]:
    """Trains from each seed in both precisions, and keeps the loss of every step, in bits per byte."""
    corpus = Corpus(open_text(config.data), config.sequence_length)
    first, steps, seconds = _compiled(config, corpus)
    losses: dict[str, list[list[float]]] = {name: [] for name in steps}
    step_seconds: dict[str, list[float]] = {name: [] for name in steps}
    for seed in range(config.seed, config.seed + seeds):
        for name, step in steps.items():
            start = time.perf_counter()
            losses[name].append(_train(config, corpus, first(np.uint32(seed)), step, seed))
            step_seconds[name].append((time.perf_counter() - start) / config.steps)
            print(f"seed {seed}, {name}: {_final(losses[name][-1]):.4f} bits/byte", flush=True)
    return {
        "kind": "precision_training",
        "title": f"{config.preset}, {config.steps} steps of {config.batch_size} x {config.sequence_length} tokens",
        "compile_seconds": seconds,
        "precisions": {name: summary(losses[name], losses[next(iter(steps))], step_seconds[name]) for name in steps},
    }


def summary(losses: Sequence[list[float]], others: Sequence[list[float]], seconds: list[float]) -> dict[str, Any]:
    """The final losses of runs, and their differences from those of `others` from the same seeds."""
    finals = [_final(of_run) for of_run in losses]
    differences = [final - _final(other) for final, other in zip(finals, others, strict=True)]
    return {
        "final_losses": finals,
        "mean": statistics.mean(finals),
        "standard_error": _standard_error(finals),
        "difference": statistics.mean(differences),
        "difference_standard_error": _standard_error(differences),
        "step_seconds": statistics.median(seconds),
        "losses": list(losses),
    }


def _final(losses: Sequence[float]) -> float:
    return statistics.mean(losses[-max(1, len(losses) // _LAST) :])


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def _compiled(config: TrainConfig, corpus: Corpus):
    """What makes the state of a seed, the step in each precision, and the seconds that compiling took."""
    start, models = time.perf_counter(), {}
    for name, precision in ((config.dtype, None), ("fp8", "fp8")):
        of_precision = replace(config, precision=precision)
        models[name] = of_precision, make_model(of_precision)
    model = models[config.dtype][1]
    first = jax.jit(partial(init_state, config, model)).lower(np.uint32(0))
    like: Any = jax.eval_shape(partial(init_state, config, model))
    batch = _batch(config, corpus, config.seed, 0)
    lowered = {}
    for name, (of_precision, model) in models.items():
        with fp8_everywhere() if of_precision.precision else nullcontext():
            lowered[name] = lower_step(of_precision, model, like, batch)
    with ThreadPoolExecutor(1 + len(lowered)) as threads:
        of_first = threads.submit(first.compile)
        steps = threads.map(lambda step: step.compile(xla_options(config)), lowered.values())
        compiled = dict(zip(lowered, steps, strict=True))
    return of_first.result(), compiled, time.perf_counter() - start


def _batch(config: TrainConfig, corpus: Corpus, seed: int, step: int):
    return placed(config, corpus, None, corpus.batch_starts(seed, step, config.batch_size))


def _train(config: TrainConfig, corpus: Corpus, state: TrainState, step, seed: int) -> list[float]:
    losses: list[Any] = []
    for number in range(config.steps):
        state, metrics = step(state, _batch(config, corpus, seed, number))
        losses.append(metrics.loss)
        if number >= _AHEAD:
            losses[number - _AHEAD].block_until_ready()
    return [float(loss) / math.log(2) / corpus.stream.bytes_per_unit for loss in losses]


if __name__ == "__main__":
    sys.exit(main())
