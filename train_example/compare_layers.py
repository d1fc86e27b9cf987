"""The same model trained with blaze_jax's experts and with conventional ones: `python -m train_example.compare_layers`.

Same seed, parameters, batches and router. Nothing is saved but a results file, which `python -m blaze_jax.benchmark
--recorded FILE --plot FOLDER` draws.
"""

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax

from blaze_jax.benchmark.environment import describe, environment
from blaze_jax.benchmark.plan import plan_of
from blaze_jax.benchmark.results_file import command_line
from train_example.compile_step import jit_once, lower_step, xla_options
from train_example.config import AttentionKernel, DType, ExpertsLayer, Remat, Save, TrainConfig, UserError
from train_example.data import Corpus, open_text
from train_example.loop import microbatches, peak_memory_gib
from train_example.program.devices import allow_all_memory
from train_example.program.experts_layer import experts_function
from train_example.program.presets import PRESETS
from train_example.program.setup import make_model
from train_example.step import init_state

_WARM_STEPS = 5
_COUNTS = ("batch_size", "sequence_length", "accumulate")
_CHOICES = {"remat": Remat, "save": Save, "attention": AttentionKernel, "momentum_dtype": DType}


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    arguments = _parse(argv)
    allow_all_memory()
    records, values = [], {}
    for layer in arguments.experts_layer:
        # A process of its own: a device's peak memory is that of the process, and the first run must not be in it.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            record, values = pool.apply(_measured, (arguments, layer))
        if "error" in record:
            print(f"{layer}: {record['error']}", file=sys.stderr)
        else:
            print(_line(record), flush=True)
        records.append(record)
    trained = [r for r in records if "error" not in r]
    for record in trained[1:]:
        record["final_loss_difference"] = record["final_loss"] / trained[0]["final_loss"] - 1
        difference = f"{record['final_loss_difference']:+.3%}"
        print(f"{record['layer']}: final loss differs from that of {trained[0]['layer']} by {difference}")
    if arguments.json is not None:
        command = command_line("train_example.compare_layers", sys.argv[1:] if argv is None else argv)
        content = {"environment": values, "command": command, "records": trained}
        content["failed"] = [r for r in records if "error" in r]
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0 if len(trained) == len(records) else 1


def configuration(arguments: argparse.Namespace, layer: ExpertsLayer) -> TrainConfig:
    """The preset's, with what the command line changes; by default one that the device here can train."""
    preset = arguments.preset or ("tiny" if jax.default_backend() == "cpu" else "1b")
    names = ("steps", *_COUNTS, "seed", *_CHOICES, "unroll")
    changes = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    return replace(PRESETS[preset], experts_layer=layer, **changes)


def _measured(arguments: argparse.Namespace, layer: ExpertsLayer) -> tuple[dict[str, Any], dict[str, str]]:
    return measured(configuration(arguments, layer))  # here, where jax may look for devices


def measured(config: TrainConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """A run's record, or what went wrong, and what it ran on."""
    values = environment()
    print(f"{config.experts_layer}: {describe(values)}; preset {config.preset}", flush=True)
    try:
        return train_briefly(config), values
    except (UserError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return {"layer": config.experts_layer, "error": f"{type(error).__name__}: {str(error)[:300]}"}, values


def train_briefly(config: TrainConfig) -> dict[str, Any]:
    """Trains and keeps the loss of every step, the speed of the later ones, and the memory.

    Each phase is printed before it starts, and its time after: a conventional layer may take minutes in any of them.
    """
    experts_function(config.experts_layer)  # to tell early if it is missing
    corpus = Corpus(open_text(config.data), config.sequence_length)
    model = make_model(config)
    phases: dict[str, float] = {}  # seconds
    phase = partial(_phase, config.experts_layer, phases)
    with phase("initial state"):
        state = jax.block_until_ready(jit_once(lambda: init_state(config, model))())
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))

    def batch(step: int):
        return microbatches(config, corpus.batch(config.seed, step, config.batch_size))

    with phase("lowering"):
        lowered = lower_step(config, model, state, batch(0))
    with phase("compiling"):
        compiled = lowered.compile(xla_options(config))
    losses, seconds = [], []
    for step in range(config.steps):
        windows, start = batch(step), time.perf_counter()
        with nullcontext() if step else phase("first step"):
            state, metrics = compiled(state, windows)
            losses.append(float(metrics.loss) / math.log(2))
        seconds.append(time.perf_counter() - start)
    last = max(1, config.steps // 20)
    plan = plan_of(compiled.memory_analysis())
    tokens = config.batch_size * config.sequence_length
    steady = seconds[min(_WARM_STEPS, len(seconds) - 1) :]
    return {
        "kind": "training",
        "title": f"{config.preset}, {parameters / 1e6:,.0f}M parameters, {config.steps} steps of {tokens:,} tokens",
        "layer": config.experts_layer,
        "parameters": parameters,
        "tokens_per_step": tokens,
        "remat": config.remat,
        "tokens_per_second": tokens / statistics.median(steady),
        "peak_gib": peak_memory_gib(),
        "planned_gib": None if plan is None else plan.total / 2**30,
        "compile_seconds": phases["lowering"] + phases["compiling"],
        "phase_seconds": phases,
        "final_loss": statistics.mean(losses[-last:]),
        "loss": losses,
    }


@contextmanager
def _phase(layer: str, seconds: dict[str, float], name: str) -> Iterator[None]:
    print(f"{layer}: {name}", flush=True)
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start
    print(f"{layer}: {name} took {seconds[name]:.1f} s", flush=True)


def _line(record: dict[str, Any]) -> str:
    peak = "not reported by this device" if record["peak_gib"] is None else f"{record['peak_gib']:.1f} GiB"
    planned = "" if record["planned_gib"] is None else f" ({record['planned_gib']:.1f} GiB by XLA's plan of the step)"
    return (
        f"{record['layer']}: {record['tokens_per_second']:,.0f} tokens/s, peak memory {peak}{planned}, "
        f"final loss {record['final_loss']:.4f} bits/byte, compiled in {record['compile_seconds']:.0f} s"
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m train_example.compare_layers", description=__doc__)
    add_options(parser)
    add = parser.add_argument
    add("--experts-layer", choices=get_args(ExpertsLayer), nargs="+", default=["blaze_jax", "sort+tokamax"])
    add("--json", type=Path, metavar="FILE", help="write the results")
    return parser.parse_args(argv)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what `configuration` takes from a command line, the experts' layer apart."""
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="(1b, on a CPU tiny)")
    add("--steps", type=_count, default=200)
    for name in _COUNTS:
        add(f"--{name.replace('_', '-')}", type=_count, help="(the preset's)")
    add("--seed", type=int, help="(the preset's)")
    for name, choices in _CHOICES.items():
        add(f"--{name.replace('_', '-')}", choices=get_args(choices), help="(the preset's)")
    add("--unroll", action=argparse.BooleanOptionalAction, help="(the preset's)")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
