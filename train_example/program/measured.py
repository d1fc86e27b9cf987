"""A run of the example that is measured, and its options: `profile_step` and `compare_layers` share them."""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from blaze_jax import Parallelism
from blaze_jax.benchmark.memory import plan_of
from train_example.compile_step import lower_step, xla_options
from train_example.config import TrainConfig, UserError
from train_example.data import Corpus, open_text
from train_example.loop import peak_memory_gib, placed, step_shardings
from train_example.program.arguments import add_options, new_config
from train_example.program.model import first_state, make_model
from train_example.step import Batch

_OPTIONS = ("data", "steps", "batch_size", "sequence_length", "accumulate", "seed")
_OPTIONS += ("remat", "save", "precision", "attention", "momentum_dtype", "equal_bits", "unroll")


def options_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that `configuration` takes, the experts' layer apart."""
    epilog = "Options left out are the preset's, 1b or on a CPU tiny, but there are 200 steps."
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description, epilog=epilog)
    add_options(parser, *_OPTIONS)
    return parser


def configuration(arguments: argparse.Namespace, layer: str) -> TrainConfig:
    """The preset's, with what the command line changes; by default one that the device here can train."""
    preset = "tiny" if jax.default_backend() == "cpu" else "1b"
    given = {name: value for name, value in vars(arguments).items() if name in ("preset", *_OPTIONS)}
    config = new_config({"preset": preset, "steps": 200} | given | {"experts_layer": layer})
    if config.optimizer == "adam8":
        raise UserError(f"the preset {config.preset} trains block by block, which only `python -m train_example` does")
    return config


class Run:
    """A run of the example whose parameters are made; its steps are compiled and run by whoever measures.

    Args:
      config: what to train.
      parallel: a mesh of devices by role; None for one device.

    Attributes:
      config: what is trained.
      state: the state, which a step takes and replaces.
      parameters: how many there are.
      seconds: how long each phase took, by name.
    """

    def __init__(self, config: TrainConfig, parallel: Parallelism | None = None):
        self.config = config
        self.seconds: dict[str, float] = {}
        self._corpus = Corpus(open_text(config.data), config.sequence_length, config.model.vocabulary)
        self._model = make_model(config, parallel)
        with self.phase("initial state"):
            self.state = jax.block_until_ready(first_state(config, self._model, None))
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(self.state.params))

    def batch(self, step: int) -> Batch:
        """The tokens of a step."""
        starts = self._corpus.batch_starts(self.config.seed, step, self.config.batch_size)
        return placed(self.config, self._corpus, self._model.parallel, starts)

    def compile(self, **options: Any) -> jax.stages.Compiled:
        """The training step, with XLA's options."""
        with self.phase("lowering"):
            shardings = step_shardings(self._model.parallel, self.state)
            lowered = lower_step(self.config, self._model, self.state, self.batch(0), shardings)
        with self.phase("compiling"):
            return lowered.compile(xla_options(self.config) | options)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block, and prints its name before and after it; equal names add up.

        A conventional layer may take minutes in any of them.
        """
        told = f"{self.config.experts_layer}: {name}"
        print(told, flush=True)
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        print(f"{told} took {seconds:.1f} s", flush=True)

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
