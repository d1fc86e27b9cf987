"""A model's plan for so much memory of a GPU, and its generator: with experts from the host where they do not fit."""

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from blaze_jax.offload.compression import Bits, compress
from blaze_jax.offload.plan import GpuMemoryError, Plan, Sizes, make_plan, rates_of
from blaze_jax.offload.store import (
    ExpertStore,
    HostMemoryError,
    allow_host_memory,
    check_host_memory,
    tree_bytes,
)
from blaze_jax.quantized import WEIGHTS, Form, is_quantized, quantize
from train_example.config import ModelConfig, TrainConfig, UserError
from train_example.generate.streaming import MICRO_TOKENS, StreamingGenerator, in_chunks
from train_example.model import Decoder, Tree
from train_example.program.model import form_of

_UNITS = {"": 1, "MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}
_BITS_PER_WEIGHT = {3: 11.3, 4: 12.1}
"""What compressed weights take, where they are about normally distributed."""


@dataclass(frozen=True)
class Offload:
    """What the user lets generation use.

    Attributes:
      gpu_bytes: of the GPU's memory.
      bits: of the codes of the exponents of compressed experts; None for experts as they are.
    """

    gpu_bytes: int
    bits: Bits | None = None

    def allow_host_memory(self, config: TrainConfig) -> None:
        """Lets jax pin what all experts take, before it starts."""
        layer_bytes = _layer_bytes(config.model, config.dtype, self.bits, form_of(config.base))
        allow_host_memory(_layers(config.model) * layer_bytes)

    def plan(
        self, model: Decoder, variables: Tree, batch: int, slots: int, prompt_tokens: int, base: Form | None = None
    ) -> Plan:
        """The plan for a model whose other variables are these, for prompts of so many tokens in all.

        Its experts' weights are in the form `base`; None for plain numbers.

        Raises:
          UserError: the GPU's memory that may be used does not suffice, or is more than there is.
        """
        device = jax.local_devices()[0]
        there = (device.memory_stats() or {}).get("bytes_limit") if device.platform == "gpu" else None
        if there is not None and self.gpu_bytes > there:
            raise UserError(
                f"--gpu-bytes {self.gpu_bytes / 1e9:.1f}GB must be at most {there / 1e9:.1f}GB, jax's share"
            )
        try:
            sizes = _sizes(model, tree_bytes(variables), batch, slots, self.bits, base)
            plan = make_plan(sizes, rates_of(device), self.gpu_bytes, batch, prompt_tokens)
            check_host_memory(plan.host_bytes, plan.host_bytes, device.platform)
        except GpuMemoryError as error:
            raise UserError(f"--gpu-bytes: {error}") from error
        except HostMemoryError as error:
            raise UserError(str(error)) from error
        return plan

    def generator(
        self,
        plan: Plan,
        model: Decoder,
        variables: Tree,
        experts: Iterable[Tree],
        slots: int,
        **options: Any,
    ) -> StreamingGenerator:
        """The generator of that plan, which takes the experts of each layer, one after the other.

        Raises:
          UserError: the host's memory does not suffice.
        """
        rests: list[Tree] = []
        if plan.chunks > 1:
            experts = in_chunks(model, experts, plan.chunks, rests)
        try:
            store = ExpertStore(experts, bits=self.bits, resident=plan.resident)
        except HostMemoryError as error:
            raise UserError(str(error)) from error
        options |= {"rests": rests, "pass_tokens": plan.pass_tokens}
        return StreamingGenerator(model, variables, store, plan.batch, slots, **options)


def memory_size(text: str) -> int:
    """Bytes of a size such as 24GB, 22.5GiB or 800MB, for a command line."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if match is None or match[2].upper() not in _UNITS or not float(match[1]):
        raise ArgumentTypeError(f"{text} must be a size such as 24GB, 22.5GiB or 800MB")
    return round(float(match[1]) * _UNITS[match[2].upper()])


def random_experts(like: Sequence[Tree], bits: Bits | None, seed: int) -> Iterable[Tree]:
    """Drawn variables of each layer, on the host: the same for all, for they only are to take time."""
    drawn = np.random.default_rng(seed).standard_normal(2**22, np.float32) * 0.02

    def draw(leaf: Any) -> Any:
        if is_quantized(leaf):
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                of_one = quantize(jnp.asarray(np.resize(drawn, leaf.shape[1:])), leaf.form)
            return jax.tree.map(lambda one, of_all: np.resize(np.asarray(one), of_all.shape), of_one, leaf)
        values = np.resize(drawn.astype(leaf.dtype), leaf.shape)
        return compress(values, bits) if bits and leaf.ndim == 3 and leaf.dtype == jnp.bfloat16 else values

    layer = jax.tree.map(draw, like[0], is_leaf=is_quantized)
    return [layer] * len(like)


def _sizes(model: Decoder, other_bytes: int, batch: int, slots: int, bits: Bits | None, base: Form | None) -> Sizes:
    config, item = model.config, np.dtype(model.dtype).itemsize
    head_width = config.head_width or config.width // config.num_heads
    heads = config.num_heads + config.num_kv_heads
    micro = min(MICRO_TOKENS, batch * slots) * config.num_heads * slots * (4 + item)
    dense = (config.num_layers - _layers(config)) * 3 * config.width * config.dense_width
    active = 3 * config.width * (config.experts_per_token * config.expert_width + config.shared_width)
    return Sizes(
        layers=_layers(config),
        layer_bytes=_layer_bytes(config, model.dtype, bits, base),
        decoded_bytes=_layer_bytes(config, model.dtype),
        layer_flops=2.0 * active,
        other_bytes=other_bytes,
        other_flops=2.0 * (config.num_layers * 2 * config.width * heads * head_width + dense),
        cache_bytes=2 * batch * config.num_layers * config.num_kv_heads * slots * head_width * item,
        work_bytes=micro + 3 * 4 * batch * config.vocabulary,
        token_bytes=item * (8 * config.width + config.experts_per_token * (config.expert_width + config.width)),
        used=config.experts_per_token / config.num_experts,
        experts=1 if model.moe.adapter_names else config.num_experts,
    )


def _layers(config: ModelConfig) -> int:
    return sum(len(layers) for name, layers in config.stacks().items() if name.startswith("moe"))


def _layer_bytes(config: ModelConfig, dtype: Any, bits: Bits | None = None, base: Form | None = None) -> int:
    item = np.dtype(dtype).itemsize
    total = 0.0
    for name, parameter in config.moe().parameters(config.width).items():
        if base is not None and name in WEIGHTS:
            whole = jax.ShapeDtypeStruct(parameter.shape, jnp.bfloat16)
            total += tree_bytes(jax.eval_shape(partial(quantize, form=base), whole))
            continue
        stack = parameter.kind == "kernel" and len(parameter.shape) == 3
        shrunk = bits if stack and np.dtype(dtype) == jnp.bfloat16 else None
        size = 4.0 if "router" in name else float(item)
        total += math.prod(parameter.shape) * (_BITS_PER_WEIGHT[shrunk] / 8 if shrunk else size)
    return round(total)


ExpertsOf = Callable[[], Iterable[Tree]]
"""Reads the experts' variables of each layer, one after the other, when it is called."""
