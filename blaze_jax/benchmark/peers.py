"""Peers: the layer as a JAX user would otherwise have it, in three conventional forms, and our other kernels.

All take `(x, w_gate, w_up, w_down, weights, experts)` as `blaze_jax.expert_ffn` does, SwiGLU, without empty slots.
"""

import importlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.experts import expert_ffn
from blaze_jax.implementation import demanded_family
from pallas_kernels.mosaic.device import on_nvidia_gpu

type Layer = Callable[..., Array]
type RaggedDot = Callable[[Array, Array, Array], Array]

TOKAMAX = "sort + tokamax"
RAGGED_DOT = "sort + lax.ragged_dot"
DENSE_DISPATCH = "dense dispatch"
PORTABLE = "blaze_jax (xla)"
AMPERE = "blaze_jax (ampere)"
SONICMOE = "SonicMoE"
"""A peer in PyTorch, which is timed only where it is named."""

PEERS = (TOKAMAX, RAGGED_DOT, DENSE_DISPATCH, AMPERE, PORTABLE)

GROUP_TOKENS = 1024
CAPACITY_FACTOR = 1.25


class UnavailableError(Exception):
    """A peer cannot run here; the message says why."""


def sorted_layer(ragged_dot: RaggedDot) -> Layer:
    """Sorts the (token, slot) pairs by expert, copies their tokens into that order, and multiplies group by group."""

    def layer(x, w_gate, w_up, w_down, weights, experts) -> Float[Array, "T d"]:
        num_tokens, slots = experts.shape
        flat = experts.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        sizes = jnp.bincount(flat, length=w_down.shape[0]).astype(jnp.int32)
        rows = jnp.take(x, order // slots, axis=0)
        hidden = jax.nn.silu(ragged_dot(rows, w_gate, sizes)) * ragged_dot(rows, w_up, sizes)
        out = jnp.take(ragged_dot(hidden, w_down, sizes), jnp.argsort(order), axis=0)
        out = out.reshape(num_tokens, slots, -1)
        return jnp.einsum("tkd,tk->td", out, weights, preferred_element_type=jnp.float32).astype(x.dtype)

    return layer


def ampere_layer(*inputs) -> Float[Array, "T d"]:
    """Our layer on the kernels for every GPU since Ampere, whatever this one gets."""
    with demanded_family("ampere"):
        return expert_ffn(*inputs, implementation="mosaic_gpu")


def dense_dispatch_layer(x, w_gate, w_up, w_down, weights, experts) -> Float[Array, "T d"]:
    """GShard's layer: one-hot masks move tokens by einsum, in groups of `GROUP_TOKENS`.

    An expert takes `CAPACITY_FACTOR` times its even share of a group, and the tokens beyond that are dropped.
    """
    num_tokens, width = x.shape
    num_experts = w_down.shape[0]
    group = math.gcd(num_tokens, GROUP_TOKENS)
    capacity = dense_dispatch_capacity(group, experts.shape[1], num_experts)
    grouped = x.reshape(-1, group, width)
    dispatch, combine = jax.vmap(partial(_masks, num_experts=num_experts, capacity=capacity))(
        experts.reshape(-1, group, experts.shape[1]), weights.reshape(-1, group, experts.shape[1])
    )
    dispatch, combine = dispatch.astype(x.dtype), combine.astype(x.dtype)
    rows = jnp.einsum("gsec,gsd->egcd", dispatch, grouped)
    gate = jnp.einsum("egcd,edn->egcn", rows, w_gate)
    hidden = jax.nn.silu(gate) * jnp.einsum("egcd,edn->egcn", rows, w_up)
    out = jnp.einsum("egcn,end->egcd", hidden, w_down)
    return jnp.einsum("gsec,egcd->gsd", combine, out).reshape(x.shape)


def dense_dispatch_capacity(group: int, slots: int, num_experts: int) -> int:
    """The most tokens of a group that an expert takes."""
    return math.ceil(CAPACITY_FACTOR * group * slots / num_experts)


def _masks(experts: Int[Array, "S K"], weights: Float[Array, "S K"], *, num_experts: int, capacity: int):
    """Marks of which token goes to which place of which expert, `(S, E, C)`, as ones and as routing weights."""
    chosen = jax.nn.one_hot(experts.reshape(-1), num_experts, dtype=jnp.int32)
    place = (jnp.cumsum(chosen, axis=0) * chosen).sum(-1).reshape(experts.shape) - 1
    spot = jax.nn.one_hot(place, capacity)  # all zeros beyond the capacity
    expert = jax.nn.one_hot(experts, num_experts)
    return jnp.einsum("ske,skc->sec", expert, spot), jnp.einsum("ske,skc,sk->sec", expert, spot, weights)


def peer_variants(name: str, *, for_gpu: bool | None = None) -> Mapping[str, Layer]:
    """The forms of a peer to choose the fastest of, by name of the backend; for this platform, or for one with a GPU.

    Raises:
      UnavailableError: it is not installed, or there is no GPU for it.
    """
    if name == RAGGED_DOT:
        return {"XLA": sorted_layer(jax.lax.ragged_dot)}
    if name == DENSE_DISPATCH:
        return {"einsum": dense_dispatch_layer}
    if name == PORTABLE:
        return {"": partial(expert_ffn, implementation="xla")}
    if name == AMPERE:
        if not (on_nvidia_gpu() if for_gpu is None else for_gpu):
            raise UnavailableError("there is no NVIDIA GPU of compute capability 8.0 or newer")
        return {"": ampere_layer}
    ragged_dot = tokamax_ragged_dot()
    on_gpu = jax.default_backend() == "gpu" if for_gpu is None else for_gpu
    backends = ("mosaic_gpu", "triton", "xla") if on_gpu else ("xla",)
    return {backend: sorted_layer(partial(ragged_dot, implementation=backend)) for backend in backends}


def tokamax_ragged_dot() -> Callable[..., Array]:
    """`tokamax.ragged_dot`, which chooses the first backend that can run unless told which.

    Raises:
      UnavailableError: tokamax is not installed, or not whole.
    """
    try:
        return importlib.import_module("tokamax").ragged_dot
    except ImportError as error:
        missing = "tokamax is not installed" if error.name == "tokamax" else f"tokamax cannot be imported: {error}"
        raise UnavailableError(f"{missing} (pip install 'blaze_jax[benchmark]')") from error


class Needs(NamedTuple):
    """The least that a pass of a peer takes, as far as it can be told before compiling.

    Attributes:
      forward_flops: floating-point operations of the forward pass.
      num_bytes: bytes on a GPU; 0 where only compiling tells.
      what: the arrays that take them.
    """

    forward_flops: float
    num_bytes: float = 0.0
    what: str = ""


def estimate(name: str, backend: str, sizes: Sizes, itemsize: int, *, backward: bool) -> Needs:
    """The needs of a peer, or of any other layer.

    XLA computes `jax.lax.ragged_dot`, which tokamax's backend "xla" is, too, on NVIDIA GPUs as one dense product over
    all experts, from a copy of the rows for each, and in the backward pass from two in float32. Compiling that takes
    minutes: it is not tried where the copies cannot fit.
    """
    flops = float(sizes.forward_flops)
    if name == RAGGED_DOT or (name, backend) == (TOKAMAX, "xla"):
        elements = float(sizes.num_experts * sizes.pairs * max(sizes.model_width, sizes.expert_width))
        flops *= sizes.num_experts if jax.default_backend() == "gpu" else 1
        if backward:
            return Needs(flops, elements * 8, "two float32 copies of all rows for each expert")
        return Needs(flops, elements * itemsize, "a copy of all rows for each expert")
    if name == DENSE_DISPATCH:
        group = math.gcd(sizes.num_tokens, GROUP_TOKENS)
        places = sizes.num_experts * dense_dispatch_capacity(group, sizes.experts_per_token, sizes.num_experts)
        moved = 4.0 * sizes.num_tokens * places * sizes.model_width
        flops = moved + 6.0 * sizes.num_tokens / group * places * sizes.model_width * sizes.expert_width
        return Needs(flops, 2.0 * sizes.num_tokens * places * itemsize, "the dispatch and combine masks")
    return Needs(flops)
