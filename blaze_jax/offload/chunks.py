"""A layer whose experts come to the device in chunks, because all of them at a time would not fit.

A chunk is some of the experts, with their own part of every array. What else the layer has stays on the device: its
router, shared experts and projections into the experts' space. Each chunk finds the routing again, which costs little
beside its experts, and adds up what they make of the tokens in float32.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from blaze_jax.config import MoEConfig
from blaze_jax.exchange import own_experts
from blaze_jax.experts import compute_experts
from blaze_jax.linen import MoE
from pallas_kernels.contract import EMPTY_SLOT

type Tree = Any


def split_layer(variables: Tree, config: MoEConfig, chunks: int) -> tuple[Tree, list[Tree]]:
    """A layer's variables apart from those of its experts, and these for each chunk; arrays of numpy or jax.

    Raises:
      ValueError: `chunks` do not divide the experts, or the layer has adapters.
    """
    if chunks < 1 or config.num_experts % chunks:
        raise ValueError(f"{chunks=} must divide num_experts={config.num_experts}")
    if config.adapter_names:
        raise ValueError(f"{chunks=} must be 1 for a layer with adapters: merge them before")
    variables, names = nn.unbox(variables), _names(config)
    of_experts = {name: array for name, array in variables["params"].items() if name in names}
    others = {name: array for name, array in variables["params"].items() if name not in names}
    each = config.num_experts // chunks

    def chunk(number: int) -> Tree:
        return {"params": jax.tree.map(lambda array: array[number * each : (number + 1) * each], of_experts)}

    return {**variables, "params": others}, [chunk(number) for number in range(chunks)]


def plus_chunk(
    layer: MoE,
    rest: Tree,
    chunk: Tree,
    number: int | Int[Array, ""],
    x: Float[Array, "... d"],
    total: Float[Array, "T inner"] | None = None,
    mask: Bool[Array, "..."] | None = None,
) -> Float[Array, "T inner"]:
    """`total`, in float32, plus what the experts of a chunk make of the tokens; `total` is None for nothing.

    Args:
      layer: with the config of all experts.
      rest: see `split_layer`.
      chunk: the chunk's variables, decoded.
      number: of the chunk, from 0.
      x: tokens, see `moe`.
      total: the sum so far.
      mask: True for real tokens.
    """
    each, sums = chunk["params"]["w_down"].shape[0], []

    def experts(inner, w_gate, w_up, w_down, weights, ids, *, b_gate, b_up, b_down, **options):
        own = own_experts(ids, each * number, each)
        if each < own.shape[1]:  # no token has more of them
            first = jnp.argsort(own == EMPTY_SLOT, axis=1, stable=True)[:, :each]
            own, weights = (jnp.take_along_axis(array, first, 1) for array in (own, weights))
        y = compute_experts(inner, chunk["params"], weights, own, frozen=True, **options)
        sums.append(y.astype(jnp.float32))
        return y

    _apply(layer, rest, x, mask, experts)
    return sums[0] if total is None else total + sums[0]


def with_experts(
    layer: MoE, rest: Tree, x: Float[Array, "... d"], total: Float[Array, "T inner"], mask: Bool[Array, "..."] | None
) -> Float[Array, "... d"]:
    """The layer's output, where its experts make `total` of the tokens; see `plus_chunk`."""
    return _apply(layer, rest, x, mask, lambda inner, *_, **__: total.astype(inner.dtype))


def _apply(layer: MoE, rest: Tree, x, mask, experts) -> Array:
    """The layer applied with other experts: `experts` gets zeros for their weights, and does without."""
    parameters = layer.config.parameters(x.shape[-1], use_bias=layer.use_bias)
    zeros = {name: jnp.zeros(parameters[name].shape, x.dtype) for name in _names(layer.config) & parameters.keys()}
    given = {**rest, "params": {**rest["params"], **zeros}}
    return jnp.asarray(layer.clone(experts=experts).apply(given, x, train=False, mask=mask))


def _names(config: MoEConfig) -> set[str]:
    """The parameters that have a matrix, or a bias, for each expert."""
    parameters = config.parameters(1, use_bias=True)
    return {name for name, parameter in parameters.items() if parameter.axes[0] == "expert" and parameter.axes[1:]}
