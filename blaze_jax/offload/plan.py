"""A plan of generation with layers in host memory: what stays on the device, what limits the speed, and how fast it is.

It is arithmetic on sizes and rates, and there before anything runs. Memory goes to what always stays and the cache of
keys and values, then to the layers on their way, to a pass over tokens, and what is left to layers of experts. Layers
of which three do not fit come in chunks, some of their experts at a time.
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
      experts: of a layer that can come in chunks, which have as many each; 1 for a layer that cannot.
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
    experts: int = 1

    @property
    def compressed(self) -> bool:
        """Whether layers are decoded on the device."""
        return self.layer_bytes != self.decoded_bytes

    def bytes_of(self, count: int, chunks: int) -> int:
        """Bytes of so many chunks, of which a layer has `chunks`, as they travel."""
        return count * -(-self.layer_bytes // chunks)


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
      resident: numbers of the layers of experts that stay, spread evenly, so that copies have all layers to hide under;
        where they come in chunks, those of chunks, of all layers one after the other.
      chunks: in which each layer comes.
    """

    sizes: Sizes
    rates: Rates
    gpu_bytes: int
    batch: int
    pass_tokens: int
    resident: tuple[int, ...]
    chunks: int = 1

    @property
    def streamed(self) -> int:
        """How many layers, or chunks of them, come from the host in a pass."""
        return self.sizes.layers * self.chunks - len(self.resident)

    @property
    def host_bytes(self) -> int:
        """Bytes that come from the host in a pass."""
        return self.sizes.bytes_of(self.streamed, self.chunks)

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
            self.host_bytes / rates.link / 1e9,
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
        what = "layers of experts" if self.chunks == 1 else f"chunks of experts, {self.chunks} to a layer,"
        units, size = sizes.layers * self.chunks, sizes.layer_bytes / self.chunks / 1e9

        def told(what: str, bounds: Bounds, speed: float) -> str:
            link, memory, arithmetic = (f"{1e3 * seconds:.1f}" for seconds in bounds)
            return (
                f"{what}: link {link} ms, memory {memory} ms, arithmetic {arithmetic} ms; "
                f"{bounds.limit} limits it, {speed:,.0f} tokens/s"
            )

        lines = [
            f"plan for {self.gpu_bytes / 1e9:.1f} GB: {sizes.other_bytes / 1e9:.2f} GB of other weights, "
            f"{sizes.cache_bytes / 1e9:.2f} GB of cache and {len(self.resident)} of {units} {what} "
            f"stay; {self.streamed} of {size:.2f} GB each come from {self.host_bytes / 1e9:.1f} GB of the host",
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
    fixed = sizes.other_bytes + sizes.cache_bytes + sizes.work_bytes
    least = min(LEAST_TOKENS, max(batch, prompt_tokens))
    hiding = Plan(sizes, rates, gpu_bytes, batch, least, ()).hiding_tokens
    tokens = max(batch, min(prompt_tokens, max(LEAST_TOKENS, batch, 2 * hiding)))
    room = gpu_bytes - fixed
    if room >= sizes.layers * sizes.layer_bytes + _decoding(sizes, 1) + tokens * sizes.token_bytes:
        return Plan(sizes, rates, gpu_bytes, batch, tokens, tuple(range(sizes.layers)))
    passes = [tokens]
    while passes[-1] // 2 >= max(least, batch):
        passes.append(passes[-1] // 2)
    counts = [count for count in range(2, sizes.experts + 1) if sizes.experts % count == 0]
    # Whole layers, if need be under fewer tokens; or chunks, with which a pass may have as many as hide the copies.
    ways = [(1, tokens) for tokens in passes] + [(count, tokens) for tokens in passes for count in counts]
    chunks, tokens = next(
        (way for way in ways if room >= _streaming(sizes, way[0]) + way[1] * sizes.token_bytes), ways[-1]
    )
    streaming, at_work = _streaming(sizes, chunks), tokens * sizes.token_bytes
    left = room - streaming - at_work
    if left < 0:
        raise GpuMemoryError(
            f"{gpu_bytes / 1e9:.1f} GB of the GPU do not suffice, {(gpu_bytes - left) / 1e9:.1f} GB are needed: "
            f"{sizes.other_bytes / 1e9:.1f} of other weights, {streaming / 1e9:.1f} of experts on their way, "
            f"{sizes.cache_bytes / 1e9:.1f} of cache and {(sizes.work_bytes + at_work) / 1e9:.1f} of {tokens:,} tokens "
            "at work; take fewer sequences or a shorter cache"
        )
    # Not the last one: with one that is streamed there is always one that comes.
    units = sizes.layers * chunks
    count = min(left // sizes.bytes_of(1, chunks), units - 1)
    resident = tuple(at * units // count for at in range(count)) if count else ()
    return Plan(sizes, rates, gpu_bytes, batch, tokens, resident, chunks)


def _streaming(sizes: Sizes, chunks: int) -> int:
    """Bytes of the chunks on their way, and at work, where each layer comes in so many."""
    return sizes.bytes_of(min(BUFFERS, sizes.layers * chunks), chunks) + _decoding(sizes, chunks)


def _decoding(sizes: Sizes, chunks: int) -> int:
    """Bytes of the experts at work, decoded, beside what decoding keeps: for an H200 XLA plans half of a matrix."""
    return sizes.decoded_bytes * 3 // 2 // chunks if sizes.compressed else 0
