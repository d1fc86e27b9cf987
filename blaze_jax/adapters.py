"""Adapters of low rank beside frozen weights: which there are, what they become in a call, and how they are told apart.

LoRA (Hu et al., arXiv 2106.09685): a weight W of shape (inputs, outputs) stays as it is, and `alpha / rank · A · B` is
added to it, of which A (inputs, rank) and B (rank, outputs) are trained. B begins as zeros, and the layer as it was.
`low_rank` computes the experts' products with them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax
from jax.typing import DTypeLike
from jaxtyping import Array

from blaze_jax.checks import check_booleans, check_dtypes, check_integers, check_numbers
from blaze_jax.exchange import own_part
from blaze_jax.quantized import decoded, not_trained
from pallas_kernels.codings import is_quantized
from pallas_kernels.contract import accumulator_dtype
from pallas_kernels.mosaic.device import WIDTH_MULTIPLE

EXPERTS = ("gate", "up", "down")
TARGETS = (*EXPERTS, "router")
"""The projections that can have an adapter."""

A, B = "_lora_a", "_lora_b"
"""How the names of an adapter's parameters end, which begin with that of the weight: `w_gate_lora_a`."""


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Adapters of a layer, `MoEConfig(adapter=LoRA(...))`, all other parameters of which are then frozen.

    Attributes:
      rank: r, the columns of A. Kernels for GPUs compute as if it were the next multiple of 8.
      alpha: the product A · B counts `alpha / rank` times.
      targets: projections that have one, of "gate", "up", "down" and "router"; None for all that the experts have, and
        `()` for a layer that is frozen and has none, in a model that has adapters elsewhere.
      shared: whether the experts share A of each of their projections, and have only B of their own.
      dropout: probability that an input of an adapter counts as zero in a training step, and the others as
        `1 / (1 - dropout)` times as large. It is drawn for each expert and input, the same for all tokens of a call.
      dtype: of the parameters that are initialised.

    Raises:
      ValueError: a field does not fit; the message names it, its value and what is allowed.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] | None = None
    shared: bool = False
    dropout: float = 0.0
    dtype: DTypeLike = jnp.float32

    def __post_init__(self):
        check_integers(rank=self.rank)
        check_numbers(alpha=self.alpha, dropout=self.dropout)
        check_booleans(shared=self.shared)
        check_dtypes(dtype=self.dtype)
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} must be at least 1")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha={self.alpha} must be above 0 and finite")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be from 0 to below 1")
        if self.targets is not None:
            one_name = isinstance(self.targets, str) or not np.iterable(self.targets)
            names = () if one_name else tuple(self.targets)
            if one_name or len(set(names)) < len(names) or not set(names) <= set(TARGETS):
                allowed = "None, or a tuple of different ones of " + ", ".join(TARGETS)
                raise ValueError(f"targets={self.targets!r} must be {allowed}")
            object.__setattr__(self, "targets", names)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def projections(self, gated: bool) -> tuple[str, ...]:
        """The projections that have an adapter; ValueError unless an activation of this kind has them."""
        there = EXPERTS if gated else EXPERTS[1:]
        if missing := [name for name in self.targets or () if name not in (*there, "router")]:
            raise ValueError(f"targets={self.targets!r} has {missing[0]!r}, which an ungated activation does not have")
        return there if self.targets is None else self.targets


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name is part of an adapter."""
    return name.endswith((A, B))


def adapter_mask(params: Any) -> Any:
    """True in the place of every adapter's parameter, False in that of others: a mask for optax.

    Args:
      params: of a layer, or of a model with layers in any tree of mappings, boxed or not.
    """

    def of_adapter(path, _) -> bool:
        keys = (str(getattr(entry, "key", getattr(entry, "name", ""))) for entry in path)
        return any(map(is_adapter, keys))

    return jax.tree_util.tree_map_with_path(of_adapter, params, is_leaf=is_quantized)


def split_adapters(params: Any) -> tuple[Any, Any]:
    """Adapters and all other parameters, as two trees with None in the places of those of the other.

    Differentiate with respect to the first, and give an optimizer only that: there is nothing of frozen ones then.

    Raises:
      ValueError: there are no adapters.
    """
    mask = adapter_mask(params)
    if not any(jax.tree.leaves(mask)):
        raise ValueError(
            "params has no adapters, and nothing would be trained: make them by MoEConfig(adapter=LoRA(...))"
        )
    adapters = jax.tree.map(lambda p, own: p if own else None, params, mask, is_leaf=is_quantized)
    return adapters, jax.tree.map(lambda p, own: None if own else p, params, mask, is_leaf=is_quantized)


def join_adapters(adapters: Any, others: Any) -> Any:
    """The parameters that `split_adapters` has taken apart."""
    return jax.tree.map(lambda a, b: b if a is None else a, adapters, others, is_leaf=lambda leaf: leaf is None)


def frozen(params: Mapping[str, Array]) -> dict[str, Array]:
    """The parameters, of which only adapters have gradients; compressed ones raise where they are to have some."""

    def of(name: str, p):
        return p if is_adapter(name) else not_trained(name, p) if is_quantized(p) else lax.stop_gradient(p)

    return {name: of(name, p) for name, p in params.items()}


def with_dropout(params: Mapping[str, Array], adapter: LoRA, key: Array) -> dict[str, Array]:
    """The parameters in a training step: rows of each A that are left out are zeros."""
    params = dict(params)
    names = sorted(name for name in params if name.endswith(A))
    for name, own_key in zip(names, jax.random.split(key, len(names)), strict=True):
        a = params[name]
        stays = jax.random.bernoulli(own_key, 1 - adapter.dropout, (*a.shape[:-1], 1))
        params[name] = jnp.where(stays, a / (1 - adapter.dropout), 0)
    return params


def for_kernels(
    params: Mapping[str, Array], specs: Mapping[str, P], adapter: LoRA
) -> tuple[dict[str, Array], dict[str, P]]:
    """The experts' adapters with their scale, each expert's own, of a rank that kernels take; and how they are split.

    Args:
      params: a layer's, or inside `jax.shard_map` one device's part of them, but a shared A whole.
      specs: how each of them is split.
      adapter: what they are.

    Returns:
      All parameters and how they are split, but not the router's adapter.
    """
    params = {name: p for name, p in params.items() if not name.startswith("w_router_")}
    specs = dict(specs)
    padding = -adapter.rank % WIDTH_MULTIPLE
    for weight in [f"w_{name}" for name in EXPERTS if f"w_{name}{A}" in params]:
        a, b = params[weight + A], params[weight + B]
        if adapter.shared:
            specs[weight + A] = P(*specs[weight][:2])
            num_experts = b.shape[0]  # of this device: its part of the inputs is that of the weight
            a = own_part(a[None], P(None, *specs[weight][1:2]))
            a = jnp.broadcast_to(a, (num_experts, *a.shape[1:]))
        params[weight + A] = jnp.pad(a, ((0, 0), (0, 0), (0, padding)))
        params[weight + B] = jnp.pad(b * adapter.scale, ((0, 0), (0, padding), (0, 0)))
    return params, specs


def added(params: Mapping[str, Array], adapter: LoRA) -> dict[str, Array]:
    """The parameters without adapters, whose products are added to the weights, as wide as the wider of the two.

    Compressed weights are decoded, those without an adapter to bfloat16.
    """
    merged: dict[str, Any] = {name: p for name, p in params.items() if not is_adapter(name)}
    for name in [name.removesuffix(A) for name in params if name.endswith(A)]:
        a, b = params[name + A], params[name + B]
        wide = accumulator_dtype(a.dtype, b.dtype)
        product = jnp.matmul(a.astype(wide), b.astype(wide), precision=lax.Precision.HIGHEST)
        merged[name] = merged[name].astype(wide) + adapter.scale * product
    return decoded(merged)


def merge(params: Mapping[str, Array], config) -> dict[str, Array]:
    """A layer's parameters with its adapters added to the weights, which keep their dtypes, and without adapters.

    They are those of `dataclasses.replace(config, adapter=None)`. In bfloat16, which compressed weights become, a
    weight takes up of what is added to it no more than its 8 bits hold.

    Args:
      params: arrays named and shaped as `config.parameters(d)` says.
      config: a `MoEConfig` with an adapter.

    Raises:
      ValueError: the configuration has no adapter, or the parameters lack one of its.
    """
    if config.adapter is None:
        raise ValueError("config.adapter=None has nothing to merge: give the configuration that was trained")
    if missing := sorted(name for name in config.adapter_names if name not in params):
        raise ValueError(f"params lacks {missing[0]}, which {config.adapter} asks for")
    return {name: p.astype(params[name].dtype) for name, p in added(params, config.adapter).items()}
