"""Trains one model in the ordinary precision and in less, from several seeds: `compare_precisions`.

With `--against fp8` the experts multiply 8 bits, whatever their sizes, also where `precision="fp8"` would leave it out.
With `--against adam8` parameters and moments take 16 and 8 bits, and each block is updated by itself; the first
parameters are rounded.

With each seed both runs have the same first parameters and the same batches. Nothing is saved but a results file.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from blaze_jax.benchmark.compiling import compile_together
from blaze_jax.benchmark.results import ResultsFile, command_line, describe, environment
from blaze_jax.benchmark.tables import terminal
from blaze_jax.precision import fp8_everywhere
from train_example.compile_step import lower_step, xla_options
from train_example.config import TrainConfig, UserError
from train_example.data import Corpus, open_text
from train_example.loop import placed
from train_example.model import layers_apart
from train_example.program.arguments import checked
from train_example.program.devices import allow_all_memory
from train_example.program.layerwise import Layerwise, block_by_block
from train_example.program.measured import configuration, options_parser
from train_example.program.model import make_model, state_shapes
from train_example.step import TrainState, init_state, working_copy

_LAST = 20
"""The final loss is the mean over the last one in so many steps."""

_AHEAD = 8
"""Steps that the host may be ahead of the device, so that neither waits."""


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = options_parser("train_example.compare_precisions", __doc__)
    parser.add_argument("--against", choices=("fp8", "adam8"), default="fp8", help="the lower precision (fp8)")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="runs of each, from --seed on (5)")
    parser.add_argument("--layers", type=int, metavar="N", help="layers of the model (those of the preset)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    arguments = parser.parse_args(argv)
    if arguments.seeds < 2:
        parser.error(f"--seeds {arguments.seeds} must be at least 2: fewer have no spread")
    if arguments.layers is not None and arguments.layers < 1:
        parser.error(f"--layers {arguments.layers} must be at least 1")
    allow_all_memory()
    about = environment()
    try:
        config = configuration(arguments, "blaze_jax")
        if arguments.layers:
            config = replace(config, model=replace(config.model, num_layers=arguments.layers))
        change = {"optimizer": "adam8"} if arguments.against == "adam8" else {"precision": "fp8"}
        other = checked(replace(config, **change))
        file = ResultsFile(arguments.json, about, command_line("train_example.compare_precisions", argv))
    except (UserError, ValueError) as error:
        print(f"compare_precisions: {error}", file=sys.stderr)
        return 2
    print(f"{describe(about)}; preset {config.preset}", flush=True)
    file.add(compare(config, other, arguments.seeds))
    print(terminal(file.content["records"][0]))
    return 0


def compare(config: TrainConfig, other: TrainConfig, seeds: int) -> dict[str, Any]:
    """Trains both from each seed, and keeps the loss of every step, in bits per byte."""
    corpus = Corpus(open_text(config.data), config.sequence_length)
    start = time.perf_counter()
    programs = _block_by_block(config, other, corpus) if other.optimizer == "adam8" else _fp8(config, other, corpus)
    compile_seconds = time.perf_counter() - start
    losses: dict[str, list[list[float]]] = {name: [] for name in programs}
    step_seconds: dict[str, list[float]] = {name: [] for name in programs}
    for seed in range(config.seed, config.seed + seeds):
        for name, (first, step) in programs.items():
            state = jax.block_until_ready(first(np.uint32(seed)))
            start = time.perf_counter()
            losses[name].append(_train(config, corpus, state, step, seed))
            step_seconds[name].append((time.perf_counter() - start) / config.steps)
            print(f"seed {seed}, {name}: {_final(losses[name][-1]):.4f} bits/byte", flush=True)
    return {
        "kind": "precision_training",
        "title": f"{config.preset}, {config.model.num_layers} layers, {config.steps} steps of {config.batch_size} x "
        f"{config.sequence_length} tokens, in {config.accumulate} microbatches",
        "compile_seconds": compile_seconds,
        "precisions": {
            name: summary(losses[name], losses[next(iter(programs))], step_seconds[name]) for name in programs
        },
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


type _Programs = dict[str, tuple[Callable[..., TrainState], Callable[..., Any]]]
"""By name, what makes the state of a seed and what takes a step."""


def _fp8(config: TrainConfig, other: TrainConfig, corpus: Corpus) -> _Programs:
    config = replace(config, precision=None)
    lowered = _ordinary(config, corpus)
    with fp8_everywhere():
        lowered["fp8"] = _lowered_step(other, corpus)
    compiled = compile_together(lowered, xla_options(config))
    first = compiled["first"]
    return {config.dtype: (first, compiled["step"]), "fp8": (first, compiled["fp8"])}


def _block_by_block(config: TrainConfig, other: TrainConfig, corpus: Corpus) -> _Programs:
    model = make_model(other)
    layerwise = Layerwise(other, model)

    def first(seed: np.uint32) -> TrainState:
        state = init_state(config, model, jnp.asarray(seed))
        return layerwise.begin(working_copy(state.params, model.dtype), layers_apart(model.config, state.router_state))

    like: Any = jax.eval_shape(first, np.uint32(0))
    batch = _batch(config, corpus, config.seed, 0)
    lowered = _ordinary(config, corpus) | {"first of blocks": jax.jit(first).lower(np.uint32(0))}
    compiled = compile_together(lowered, xla_options(config))
    step = block_by_block(other, model, like, batch)[0]
    return {"adam": (compiled["first"], compiled["step"]), "adam8": (compiled["first of blocks"], step)}


def _ordinary(config: TrainConfig, corpus: Corpus) -> dict[str, jax.stages.Lowered]:
    first = jax.jit(partial(init_state, config, make_model(config))).lower(np.uint32(0))
    return {"first": first, "step": _lowered_step(config, corpus)}


def _lowered_step(config: TrainConfig, corpus: Corpus) -> jax.stages.Lowered:
    model = make_model(config)
    return lower_step(config, model, state_shapes(config, model), _batch(config, corpus, config.seed, 0))


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
