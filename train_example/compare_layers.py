"""Trains one model with blaze_jax's experts and with conventional ones: `python -m train_example.compare_layers`.

Same seed, parameters, batches and router. Nothing is saved but a results file, which `python -m blaze_jax.benchmark
draw FILE --plot FOLDER` draws.
"""

import argparse
import math
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

from blaze_jax.benchmark.own_process import ProcessError, run_apart
from blaze_jax.benchmark.results import ResultsFile, command_line, describe, environment
from blaze_jax.benchmark.tables import terminal
from train_example.config import ExpertsLayer, TrainConfig
from train_example.program.devices import allow_all_memory
from train_example.program.measured import Run, configuration, options_parser

_WARM_STEPS = 5


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit status: 1 if a layer failed."""
    argv = sys.argv[1:] if argv is None else argv
    parser = options_parser("train_example.compare_layers", __doc__)
    layers = get_args(ExpertsLayer)
    parser.add_argument("--experts-layer", choices=layers, nargs="+", default=["blaze_jax", "sort+tokamax"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    arguments = parser.parse_args(argv)
    allow_all_memory()
    try:
        file = ResultsFile(arguments.json, {}, command_line("train_example.compare_layers", argv))
    except ValueError as error:
        print(f"compare_layers: {error}", file=sys.stderr)
        return 2
    file.content["failed"] = []
    trained = file.content["records"]
    for layer in arguments.experts_layer:
        try:
            # A process of its own: a device's peak memory is that of the process, and the first run must not be in it.
            record, file.content["environment"] = run_apart(_measured, arguments, layer)
        except ProcessError as error:
            print(f"{layer}: {error}", file=sys.stderr)
            file.content["failed"].append({"layer": layer, "error": str(error)})
            continue
        if trained:
            record["final_loss_difference"] = record["final_loss"] / trained[0]["final_loss"] - 1
        file.add(record)
        print(terminal(record), flush=True)
    for record in trained[1:]:
        difference = f"{record['final_loss_difference']:+.3%}"
        print(f"{record['layer']}: final loss differs from that of {trained[0]['layer']} by {difference}")
    file.write()
    return 1 if file.content["failed"] else 0


def _measured(arguments: argparse.Namespace, layer: ExpertsLayer) -> tuple[dict[str, Any], dict[str, str]]:
    config, values = configuration(arguments, layer), environment()  # here, where jax may look for devices
    print(f"{layer}: {describe(values)}; preset {config.preset}", flush=True)
    return train_briefly(config), values


def train_briefly(config: TrainConfig) -> dict[str, Any]:
    """Trains and keeps the loss of every step, the speed of the later ones, and the memory."""
    run = Run(config)
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
    steady = seconds[min(_WARM_STEPS, len(seconds) - 1) :]
    title = f"{config.preset}, {run.parameters / 1e6:,.0f}M parameters, {config.steps} steps of {tokens:,} tokens"
    return run.record(compiled) | {
        "kind": "training",
        "title": title,
        "layer": config.experts_layer,
        "tokens_per_step": tokens,
        "tokens_per_second": tokens / statistics.median(steady),
        "phase_seconds": run.seconds,
        "final_loss": statistics.mean(losses[-last:]),
        "loss": losses,
    }


if __name__ == "__main__":
    sys.exit(main())
