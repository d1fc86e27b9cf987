"""A run of the example that is measured, and its options: `profile_step` and `compare_layers` share them."""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_args

import jax

from blaze_jax.benchmark.memory import plan_of
from train_example.compile_step import jit_once, lower_step, xla_options
from train_example.config import AttentionKernel, DType, ExpertsLayer, Remat, Save, TrainConfig
from train_example.data import Corpus, open_text
from train_example.loop import microbatches, peak_memory_gib
from train_example.program.presets import PRESETS
from train_example.program.setup import make_model
from train_example.step import init_state

_COUNTS = ("batch_size", "sequence_length", "accumulate")
_CHOICES = {"remat": Remat, "save": Save, "attention": AttentionKernel, "momentum_dtype": DType}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what `configuration` takes from a command line, the experts' layer apart."""
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="(1b, on a CPU tiny)")
    add("--steps", type=count, default=200)
    for name in _COUNTS:
        add(f"--{name.replace('_', '-')}", type=count, help="(the preset's)")
    add("--seed", type=int, help="(the preset's)")
    for name, choices in _CHOICES.items():
        add(f"--{name.replace('_', '-')}", choices=get_args(choices), help="(the preset's)")
    add("--unroll", action=argparse.BooleanOptionalAction, help="(the preset's)")


def count(text: str) -> int:
    """A whole number of at least 1, from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return int(text)


def configuration(arguments: argparse.Namespace, layer: ExpertsLayer) -> TrainConfig:
    """The preset's, with what the command line changes; by default one that the device here can train."""
    preset = arguments.preset or ("tiny" if jax.default_backend() == "cpu" else "1b")
    names = ("steps", *_COUNTS, "seed", *_CHOICES, "unroll")
    changes = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    return replace(PRESETS[preset], experts_layer=layer, **changes)


class Run:
    """A run of the example whose parameters are made; its steps are compiled and run by whoever measures.

    Args:
      config: what to train.
      told: the name under which each phase is printed before and after it; None for silence. A conventional layer may
        take minutes in any of them.
    """

    def __init__(self, config: TrainConfig, told: str | None = None):
        self.config, self.told = config, told
        self.seconds: dict[str, float] = {}
        self.corpus = Corpus(open_text(config.data), config.sequence_length)
        self.model = make_model(config)
        with self.phase("initial state"):
            self.state = jax.block_until_ready(jit_once(lambda: init_state(config, self.model))())
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(self.state.params))

    def batch(self, step: int):
        """The tokens of a step."""
        windows = self.corpus.batch(self.config.seed, step, self.config.batch_size)
        return microbatches(self.config, windows)

    def compile(self, **options: Any) -> jax.stages.Compiled:
        """The training step, with XLA's options."""
        with self.phase("lowering"):
            lowered = lower_step(self.config, self.model, self.state, self.batch(0))
        with self.phase("compiling"):
            return lowered.compile(xla_options(self.config) | options)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block; equal names add up."""
        if self.told:
            print(f"{self.told}: {name}", flush=True)
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if self.told:
            print(f"{self.told}: {name} took {seconds:.1f} s", flush=True)

    def record(self, compiled: jax.stages.Compiled) -> dict[str, Any]:
        """The fields that every record of a run has; the peak is the process's so far."""
        plan = plan_of(compiled.memory_analysis())
        return {
            "remat": self.config.remat,
            "parameters": self.parameters,
            "compile_seconds": self.seconds["lowering"] + self.seconds["compiling"],
            "peak_gib": peak_memory_gib(),
            "planned_gib": None if plan is None else plan.total / 2**30,
        }
