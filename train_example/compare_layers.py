"""Trains one model with blaze_jax's experts and with conventional ones: `python -m train_example.compare_layers`.

Same seed, parameters, batches and router. `--dense-twin` adds a model with dense layers of the same active arithmetic,
which takes as many steps as fit the wall time of the first one's. Nothing is saved but a results file, which
`python -m blaze_jax.benchmark draw FILE --plot FOLDER` draws.
"""

import argparse
import math
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from blaze_jax import Parallelism
from blaze_jax.benchmark.mesh import parse_mesh
from blaze_jax.benchmark.own_process import ProcessError, run_apart
from blaze_jax.benchmark.results import ResultsFile, command_line, describe, environment
from blaze_jax.benchmark.tables import terminal
from train_example.config import ExpertsLayer, TrainConfig
from train_example.program.devices import allow_all_memory, parallelism
from train_example.program.measured import Run, configuration, options_parser

_WARM_STEPS, _TIMED_STEPS = 5, 20


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit status: 1 if a layer failed."""
    argv = sys.argv[1:] if argv is None else argv
    parser = options_parser("train_example.compare_layers", __doc__)
    layers, add = get_args(ExpertsLayer), parser.add_argument
    add("--experts-layer", choices=layers, nargs="+", help="blaze_jax, and sort+tokamax unless there is a dense twin")
    add("--dense-twin", action="store_true", help="a dense model of the same arithmetic, at equal wall time")
    add("--mesh", type=parse_mesh, metavar="ROLE=N,...", help="devices by role, such as fsdp=2,expert=4 (one device)")
    add("--json", type=Path, metavar="FILE", help="write the results")
    arguments = parser.parse_args(argv)
    twin = ["dense-twin"] if arguments.dense_twin else []
    chosen = arguments.experts_layer or (["blaze_jax"] if twin else ["blaze_jax", "sort+tokamax"])
    allow_all_memory()
    try:
        file = ResultsFile(arguments.json, {}, command_line("train_example.compare_layers", argv))
    except ValueError as error:
        print(f"compare_layers: {error}", file=sys.stderr)
        return 2
    file.content["failed"] = []
    trained = file.content["records"]
    for layer in [*dict.fromkeys(layer for layer in chosen if layer not in twin), *twin]:
        try:
            # A process of its own: a device's peak memory is that of the process, and the first run must not be in it.
            record, file.content["environment"] = run_apart(_measured, arguments, layer, _seconds(trained))
        except ProcessError as error:
            print(f"{layer}: {error}", file=sys.stderr)
            file.content["failed"].append({"layer": layer, "error": str(error)})
            continue
        if trained:
            record["step_time_ratio"] = trained[0]["step_seconds"] / record["step_seconds"]
            record["final_loss_difference"] = record["final_loss"] / trained[0]["final_loss"] - 1
        file.add(record)
        print(terminal(record), flush=True)
    for record in trained[1:]:
        difference = f"{record['final_loss_difference']:+.3%}"
        print(f"{record['layer']}: final loss differs from that of {trained[0]['layer']} by {difference}")
        if record["layer"] == "dense-twin":
            print(_of_twin(record, trained[0]))
    file.write()
    return 1 if file.content["failed"] else 0


def _seconds(trained: list[dict[str, Any]]) -> float | None:
    """The wall time that the steps of the first layer take, compiled and warm."""
    return trained[0]["steps"] * trained[0]["step_seconds"] if trained else None


def _of_twin(twin: dict[str, Any], first: dict[str, Any]) -> str:
    ms = " to ".join(f"{record['step_seconds'] * 1e3:,.1f} ms" for record in (first, twin))
    reached = [f"{record['final_loss']:.4f} bits/byte in {record['steps']:,} steps" for record in (first, twin)]
    return (
        f"a step of {first['layer']} takes {twin['step_time_ratio']:.2f} times that of its dense twin, {ms}; "
        f"in the same {_seconds([first]):,.1f} s it reaches a loss of {reached[0]}, and the twin of {reached[1]}"
    )


def _measured(
    arguments: argparse.Namespace, layer: ExpertsLayer, seconds: float | None
) -> tuple[dict[str, Any], dict[str, str]]:
    config, values = configuration(arguments, layer), environment()  # here, where jax may look for devices
    parallel = parallelism(arguments.mesh)
    print(f"{layer}: {describe(values)}; preset {config.preset}", flush=True)
    if layer == "dense-twin" and seconds is not None:  # a schedule knows its end: first how many steps there will be
        timed = train_briefly(replace(config, steps=_TIMED_STEPS), parallel)
        config = replace(config, steps=max(1, round(seconds / timed["step_seconds"])))
    return train_briefly(config, parallel), values


def train_briefly(config: TrainConfig, parallel: Parallelism | None = None) -> dict[str, Any]:
    """Trains and keeps the loss of every step, the speed of the later ones, and the memory."""
    run = Run(config, parallel)
    compiled, state = run.compile(), run.state
    run.state = None  # its memory becomes the next state's
    losses, seconds = [], []
    for step in range(config.steps):
        windows, start = run.batch(step), time.perf_counter()
        with nullcontext() if step else run.phase("first step"):
            state, metrics = compiled(state, windows)
            losses.append(float(metrics.loss) / math.log(2))
        seconds.append(time.perf_counter() - start)
    last, tokens = max(1, config.steps // 20), config.batch_size * config.sequence_length
    step_seconds = statistics.median(seconds[min(_WARM_STEPS, len(seconds) - 1) :])
    title = f"{config.preset}, {run.parameters / 1e6:,.0f}M parameters, {config.steps} steps of {tokens:,} tokens"
    return run.record(compiled) | {
        "kind": "training",
        "title": title,
        "layer": config.experts_layer,
        "tokens_per_step": tokens,
        "steps": config.steps,
        "step_seconds": step_seconds,
        "tokens_per_second": tokens / step_seconds,
        "phase_seconds": run.seconds,
        "final_loss": statistics.mean(losses[-last:]),
        "loss": losses,
    }


if __name__ == "__main__":
    sys.exit(main())
