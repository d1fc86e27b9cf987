"""How fast a model generates: random weights, random prompts, as many sequences as fit."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from train_example.config import TrainConfig
from train_example.generate.decoding import Generator
from train_example.generate.models import random_variables
from train_example.generate.sampling import Sampling
from train_example.loop import peak_memory_gib
from train_example.program.model import make_model


def time_generation(
    config: TrainConfig, batch: int, slots: int, most: int, sampling: Sampling, say: Callable[[str], Any] = print
) -> dict[str, Any]:
    """Times prompts that leave `most` of the slots free, and the tokens behind them.

    Returns:
      "prefill_ms" and "prefill_tokens_per_second"; "decode_ms", of one token of all sequences, and
      "decode_tokens_per_second"; "compile_seconds" of both programs, and the device's "peak_gib".
    """
    model = make_model(config)
    generator = Generator(model, random_variables(config, model), batch, slots, sampling)
    length = slots + 1 - most
    prompts = np.random.default_rng(config.seed).integers(config.model.vocabulary, size=(batch, length)).tolist()
    say(f"{batch} sequences of {length} tokens, {most} more each, {slots} slots; compiling")
    start = time.perf_counter()
    list(generator.stream(prompts, 2))
    compiling = time.perf_counter() - start
    start = time.perf_counter()
    jax.block_until_ready(generator.prefilled(prompts, 1))
    prefill = time.perf_counter() - start
    times = [time.perf_counter() for _ in generator.stream(prompts, most)]
    # The first one comes when the second is under way, behind the prompts; the last one when nothing is.
    decode = (times[-1] - times[0]) / max(len(times) - 1, 1)
    return {
        "device": jax.devices()[0].device_kind,
        "batch": batch,
        "prompt": length,
        "slots": slots,
        "prefill_ms": 1e3 * prefill,
        "prefill_tokens_per_second": batch * length / prefill,
        "decode_ms": 1e3 * decode,
        "decode_tokens_per_second": batch / decode if decode else None,
        "compile_seconds": compiling,
        "peak_gib": peak_memory_gib(),
    }
