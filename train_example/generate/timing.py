"""How fast a model generates: random weights, random prompts, as many sequences as fit."""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

from train_example.config import TrainConfig
from train_example.generate.decoding import Generator
from train_example.generate.models import random_variables
from train_example.generate.offload import Offload, random_experts
from train_example.generate.sampling import Sampling
from train_example.loop import peak_memory_gib
from train_example.program.model import form_of, make_model


def time_generation(
    config: TrainConfig,
    batch: int,
    slots: int,
    most: int,
    sampling: Sampling,
    say: Callable[[str], Any] = print,
    offload: Offload | None = None,
    length: int | None = None,
) -> dict[str, Any]:
    """Times prompts of `length` tokens, and `most` behind them; None for prompts that leave just these slots free.

    Returns:
      "prefill_ms" and "prefill_tokens_per_second"; "decode_ms", of one token of all sequences, and
      "decode_tokens_per_second"; "compile_seconds" of both programs, and the device's "peak_gib".
      With `offload`, whose plan is told first, also its "planned_prefill_tokens_per_second" and
      "planned_decode_tokens_per_second", "streamed_layers", the "chunks" in which each comes, and "plan", of what it
      was made. It is a record of the kind "generation", which `blaze_jax.benchmark` has a table and a figure for.
    """
    if offload is not None:
        offload.allow_host_memory(config)
    model, length, planned = make_model(config), length or slots + 1 - most, {}
    variables, layers = random_variables(config, model, experts=offload is None)
    if offload is None:
        generator = Generator(model, variables, batch, slots, sampling)
    else:
        plan = offload.plan(model, variables, batch, slots, batch * length, form_of(config.base))
        say(str(plan))
        # Compressed ones cannot be cut: the store then compresses each chunk.
        experts = random_experts(layers, offload.bits if plan.chunks == 1 else None, config.seed)
        generator = offload.generator(plan, model, variables, experts, slots, sampling=sampling)
        names = "prefill_tokens_per_second", "decode_tokens_per_second"
        planned = {f"planned_{name}": getattr(plan, name) for name in names}
        planned |= {"streamed_layers": plan.streamed / plan.chunks, "chunks": plan.chunks}
        planned |= {"gpu_bytes": offload.gpu_bytes, "expert_bits": offload.bits}
        planned["plan"] = {"sizes": asdict(plan.sizes), "rates": plan.rates._asdict()}
    if config.base != "bf16":
        planned["base"] = config.base
    prompts = np.random.default_rng(config.seed).integers(config.model.vocabulary, size=(batch, length)).tolist()
    say(f"{batch} sequences of {length} tokens, {most} more each, {slots} slots; compiling")
    start = time.perf_counter()
    list(generator.stream([prompt[:1] for prompt in prompts], 2))  # the programs of prompts of any length
    compiling = time.perf_counter() - start
    start = time.perf_counter()
    jax.block_until_ready(generator.prefilled(prompts, 1))
    prefill = time.perf_counter() - start
    times = [time.perf_counter() for _ in generator.stream(prompts, most)]
    # The first one comes when the second is under way, behind the prompts; the last one when nothing is.
    decode = (times[-1] - times[0]) / max(len(times) - 1, 1)
    return {
        "kind": "generation",
        "title": config.preset if config.checkpoint is None else Path(config.checkpoint).name,
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
        **planned,
    }
