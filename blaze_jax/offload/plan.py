"""A plan of generation with layers in host memory: what stays on the device, what limits the speed, and how fast it is.

It is arithmetic on sizes and rates, and there before anything runs. Memory goes to what always stays and the cache of
keys and values, then to the layers on their way, to a pass over tokens, and what is left to layers of experts.
"""

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from blaze_jax.offload.store import BUFFERS

LEAST_TOKENS = 8192
"""Tokens of a pass over prompts, where so many are there: fewer would leave a GPU's products idle."""


class GpuMemoryError(MemoryError):
    """The GPU's memory that may be used does not suffice. The message is one line that says what would."""


class Rates(NamedTuple):
    """What a device reaches: the link from the host in GB/s, a copy in its memory in TB/s, a product in TFLOP/s."""

    link: float
    memory: float
    arithmetic: float


RATES = {"H200": Rates(54.4, 4.2, 680.0), "H100": Rates(54.4, 3.0, 600.0)}
"""By a part of the device's kind. Memory and H200's link are measured, arithmetic is that of long products in bfloat16
at the power limit, and H100's link is taken to be H200's."""


def rates_of(device: Any) -> Rates:
    """The table's rates for the device, or for another kind what `measure_rates` finds."""
    return next((rates for kind, rates in RATES.items() if kind in device.device_kind), None) or measure_rates(device)


def measure_rates(device: Any, num_bytes: int | None = None) -> Rates:
    """Times a copy from pinned host memory, a copy in the device's memory and a product in bfloat16, the best of three.

    `num_bytes` are those of the copies; None for 1 GiB on a GPU, and 16 MiB elsewhere.
    """
    on_gpu = device.platform == "gpu"
    num_bytes, width = num_bytes or (2**30 if on_gpu else 2**24), 8192 if on_gpu else 256
    kinds = "pinned_host", device.default_memory().kind
    host, there = (SingleDeviceSharding(device, memory_kind=kind) for kind in kinds)
    source = jax.device_put(jnp.ones(num_bytes // 4, jnp.float32), there)
    pinned = jax.device_put(source, host)
    factor = jax.device_put(jnp.ones((width, width), jnp.bfloat16), there)
    copy, product = jax.jit(jnp.copy), jax.jit(jnp.dot)

    def best(call) -> float:
        times = []
        for _ in range(4):
            start = time.perf_counter()
            jax.block_until_ready(call())
            times.append(time.perf_counter() - start)
        return min(times[1:])  # the first one compiles

    link = num_bytes / best(lambda: jax.device_put(pinned, there))
    memory = 2 * num_bytes / best(lambda: copy(source))
    return Rates(link / 1e9, memory / 1e12, 2 * width**3 / best(lambda: product(factor, factor)) / 1e12)


@dataclass(frozen=True)
class Sizes:
    """What a plan is about; bytes and floating-point operations.

    Attributes:
      layers: layers of experts.
      layer_bytes: of one of them, as it travels.
      decoded_bytes: of one of them, as it is computed with.
      layer_flops: of one of them, per token.
      other_bytes: of all other weights, which stay on the device.
      other_flops: of all other products, per token.
      cache_bytes: of keys and values, of all sequences.
      work_bytes: that any pass takes, whatever its tokens.
      token_bytes: that a token of a pass takes while it is under way.
      used: the share of a layer's experts that a single token uses, K/E.
    """

    layers: int
    layer_bytes: int
    decoded_bytes: int
    layer_flops: float
    other_bytes: int
    other_flops: float
    cache_bytes: int
    work_bytes: int
    token_bytes: int
    used: float

    @property
    def compressed(self) -> bool:
        """Whether layers are decoded on the device."""
        return self.layer_bytes != self.decoded_bytes


class Bounds(NamedTuple):
    """The seconds that a pass takes on the link, in the device's memory and by its arithmetic."""

    link: float
    memory: float
    arithmetic: float

    @property
    def seconds(self) -> float:
        """The time of the pass: all of it goes on at once."""
        return max(self)

    @property
    def limit(self) -> str:
        """What takes longest."""
        return self._fields[self.index(max(self))]


@dataclass(frozen=True)
class Plan:
    """What stays where, and how fast that is; `str` of it is for people.

    Attributes:
      sizes, rates: what it was made from.
      gpu_bytes: what may be used.
      batch: sequences.
      pass_tokens: tokens of a pass over prompts, at most.
      resident: numbers of the layers of experts that stay, spread evenly, so that copies have all layers to hide under.
    """

    sizes: Sizes
    rates: Rates
    gpu_bytes: int
    batch: int
    pass_tokens: int
    resident: tuple[int, ...]

    @property
    def streamed(self) -> int:
        """How many layers come from the host in a pass."""
        return self.sizes.layers - len(self.resident)

    @property
    def hiding_tokens(self) -> int:
        """Tokens of a pass whose arithmetic in a layer takes as long as the layer's way to the device."""
        on_the_way = self.sizes.layer_bytes / self.rates.link / 1e9
        return max(1, round(on_the_way * self.rates.arithmetic * 1e12 / self.sizes.layer_flops))

    def bounds(self, tokens: int, *, decode: bool = False) -> Bounds:
        """The bounds of a pass over so many tokens; with `decode` each one looks at a whole sequence of the cache."""
        sizes, rates = self.sizes, self.rates
        read = sizes.layers * sizes.decoded_bytes * (1 - (1 - sizes.used) ** tokens) + sizes.other_bytes
        if sizes.compressed:
            read += sizes.layers * (sizes.layer_bytes + sizes.decoded_bytes)
        if decode:
            read += sizes.cache_bytes
        flops = tokens * (sizes.layers * sizes.layer_flops + sizes.other_flops)
        return Bounds(
            self.streamed * sizes.layer_bytes / rates.link / 1e9,
            read / rates.memory / 1e12,
            flops / rates.arithmetic / 1e12,
        )

    @property
    def prefill_tokens_per_second(self) -> float:
        """Tokens of prompts."""
        return self.pass_tokens / self.bounds(self.pass_tokens).seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens behind the prompts, of all sequences together."""
        return self.batch / self.bounds(self.batch, decode=True).seconds

    def __str__(self) -> str:
        sizes, rates = self.sizes, self.rates
        host = self.streamed * sizes.layer_bytes

        def told(what: str, bounds: Bounds, speed: float) -> str:
            link, memory, arithmetic = (f"{1e3 * seconds:.1f}" for seconds in bounds)
            return (
                f"{what}: link {link} ms, memory {memory} ms, arithmetic {arithmetic} ms; "
                f"{bounds.limit} limits it, {speed:,.0f} tokens/s"
            )

        lines = [
            f"plan for {self.gpu_bytes / 1e9:.1f} GB: {sizes.other_bytes / 1e9:.2f} GB of other weights, "
            f"{sizes.cache_bytes / 1e9:.2f} GB of cache and {len(self.resident)} of {sizes.layers} layers of experts "
            f"stay; {self.streamed} of {sizes.layer_bytes / 1e9:.2f} GB each come from {host / 1e9:.1f} GB of the host",
            f"rates: link {rates.link:.1f} GB/s, memory {rates.memory:.2f} TB/s, arithmetic {rates.arithmetic:.0f} "
            f"TFLOP/s; a copy hides under {self.hiding_tokens:,} tokens",
            told(
                f"prefill, {self.pass_tokens:,} tokens a pass",
                self.bounds(self.pass_tokens),
                self.prefill_tokens_per_second,
            ),
            told(
                f"decode, {self.batch:,} sequences",
                self.bounds(self.batch, decode=True),
                self.decode_tokens_per_second,
            ),
        ]
        return "\n".join(lines)


def make_plan(sizes: Sizes, rates: Rates, gpu_bytes: int, batch: int, prompt_tokens: int) -> Plan:
    """Plans passes over prompts of so many tokens in all, and over one token of each of `batch` sequences.

    Raises:
      GpuMemoryError: `gpu_bytes` do not suffice; the message says how many would.
    """
    # The layer at work, decoded, beside what its decoding keeps: XLA's plan for an H200 says half of a matrix for each.
    decoded = sizes.decoded_bytes * 3 // 2 if sizes.compressed else 0
    streaming = min(BUFFERS, sizes.layers) * sizes.layer_bytes + decoded
    fixed = sizes.other_bytes + sizes.cache_bytes + sizes.work_bytes
    least = min(LEAST_TOKENS, max(batch, prompt_tokens))
    plan = Plan(sizes, rates, gpu_bytes, batch, least, ())
    tokens = min(prompt_tokens, max(LEAST_TOKENS, batch, 2 * plan.hiding_tokens))
    tokens = max(tokens, batch)
    room = gpu_bytes - fixed
    whole = sizes.layers * sizes.layer_bytes + decoded + tokens * sizes.token_bytes
    if room >= whole:
        return Plan(sizes, rates, gpu_bytes, batch, tokens, tuple(range(sizes.layers)))
    while tokens // 2 >= max(least, batch) and room < streaming + tokens * sizes.token_bytes:
        tokens //= 2
    left = room - streaming - tokens * sizes.token_bytes
    if left < 0:
        needed = gpu_bytes - left
        raise GpuMemoryError(
            f"{gpu_bytes / 1e9:.1f} GB of the GPU do not suffice, {needed / 1e9:.1f} GB are needed: "
            f"{sizes.other_bytes / 1e9:.1f} of other weights, {streaming / 1e9:.1f} of layers on their way, "
            f"{sizes.cache_bytes / 1e9:.1f} of cache and "
            f"{(sizes.work_bytes + tokens * sizes.token_bytes) / 1e9:.1f} of {tokens:,} tokens at "
            "work; take fewer sequences or a shorter cache"
        )
    # Not the last one: with one streamed layer there is always one that comes.
    count = min(left // sizes.layer_bytes, sizes.layers - 1)
    resident = tuple(at * sizes.layers // count for at in range(count)) if count else ()
    return Plan(sizes, rates, gpu_bytes, batch, tokens, resident)
