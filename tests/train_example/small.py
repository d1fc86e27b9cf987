"""A model and batches small enough for many tests; `python -m tests.train_example.small` is the program that trains it.

That is `train_example` with a preset "tiny" which is small enough for tests.
"""

import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import train_example
from train_example.config import ModelConfig
from train_example.model import Decoder
from train_example.program.jit_once import jit_once
from train_example.program.presets import PRESETS
from train_example.step import init_state, make_train_step

ROOT = Path(train_example.__file__).parents[1]

MODEL = ModelConfig(
    width=32, num_layers=3, num_heads=4, num_kv_heads=2, num_experts=8, experts_per_token=2, expert_width=16
)
FULL_MODEL = replace(
    MODEL, shared_width=8, num_dense_layers=1, dense_width=24, z_loss_weight=1e-3, bias_update_rate=0.1
)
CONFIG = replace(PRESETS["tiny"], model=MODEL, steps=40, batch_size=8, sequence_length=16, learning_rate=1e-2)


def decoder(config=MODEL, *, save="pre_activations", remat="none", dtype=jnp.float32, unroll=False):
    return Decoder(config, config.moe(save=save), dtype, remat, unroll=unroll)


def windows(*shape, seed=0):
    return np.random.default_rng(seed).integers(97, 123, shape, dtype=np.uint8)


@lru_cache
def initial_variables(config=MODEL):
    """Parameters and router state without their axis names."""
    return nn.unbox(jit_once(decoder(config).init)(jax.random.key(0), windows(1, 1)))


@lru_cache
def train_step(config, model):
    """A jitted step and the state before the first."""
    return jax.jit(make_train_step(config, model)), jit_once(partial(init_state, config, model))()


_ONE_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
"""Otherwise XLA leaves the order of collectives in and beside a loop to each virtual device. Two may then wait for each
other for ever, in one step of some hundreds."""


def start(out, *options, devices=None, alone=True):
    """The program, with the small model as its preset, in a process of its own; on that many virtual devices.

    One that is not alone compiles all that it runs: with a program that another run has kept, Gloo aborts a process.
    """
    command = [sys.executable, "-W", "error", "-m", "tests.train_example.small", "--out", str(out), *options]
    virtual = {}
    if devices:
        flags = f"{_ONE_ORDER} {os.environ.get('XLA_FLAGS', '')}"
        virtual = {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    virtual |= {} if alone else {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | virtual, stdout=pipe, stderr=pipe, text=True)


def metrics(out):
    """The records that a run has written so far."""
    file = out / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


if __name__ == "__main__":
    PRESETS["tiny"] = CONFIG
    runpy.run_module("train_example", run_name="__main__")
