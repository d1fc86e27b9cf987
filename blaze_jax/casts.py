"""Weights of experts in 8 bits, cast once for all passes of a step that multiply them by `precision="fp8"`.

Without casts each forward pass casts the weights, and each backward pass again, in the other orientation. A step of
several microbatches, or one that computes layers again, does so several times with equal results.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from blaze_jax.activations import Activation, get_activation
from blaze_jax.checks import shown
from blaze_jax.config import MoEConfig
from blaze_jax.implementation import choose_implementation, kernels_of
from blaze_jax.plan import Parameters, Projection
from blaze_jax.precision import LEAST_WIDTH, hidden_bound, is_fp8_everywhere, kernels_in_fp8
from blaze_jax.quantized import WEIGHTS
from pallas_kernels.codings import is_quantized
from pallas_kernels.fp8 import CastWeight, is_float8


def cast_experts(params: Any, config: MoEConfig, dtype: DTypeLike | None = None) -> Any:
    """The parameters, with a `CastWeight` in the place of each of the experts' weights.

    The layer multiplies those, and casts nothing. They are as large together as bfloat16 weights. Gradients flow to
    the weights; the casts are constants, which are those of the step's weights and have to be made anew when those
    change. Where tokens are too few for 8 bits to pay, the layer multiplies the weights that it was given.

    Args:
      params: parameters of a layer by name, or a tree of mappings, tuples and lists with those of any number of layers
        of this configuration, which may be stacked. Frozen weights may be compressed to float8: their casts are made
        without any copy in 16 bits.
      config: the layers. Without `precision="fp8"`, and where experts are too narrow for it, the result is `params`.
      dtype: bfloat16 or float16, of the tokens; None for that of the weights, or bfloat16 if they have another.

    Raises:
      ValueError: there are no weights of such experts, or they are cast already.
      NotImplementedError: no kernel here multiplies 8 bits, see `expert_ffn`.
    """

    def is_layer(tree: Any) -> bool:
        if not isinstance(tree, Mapping) or not {"w_up", "w_down"} <= tree.keys():
            return False
        return getattr(tree["w_down"], "shape", ())[-3:-1] == (config.num_experts, config.expert_width)

    if config.precision is None:
        return params
    parts, structure = jax.tree.flatten(params, is_leaf=is_layer)
    if not any(map(is_layer, parts)):
        raise ValueError(
            f"params must be or have a layer's w_up and w_down, of {config.num_experts} experts of width "
            f"{config.expert_width}: {shown(params)}"
        )
    return structure.unflatten([_cast(part, config, dtype) if is_layer(part) else part for part in parts])


def _cast(params: Mapping[str, Any], config: MoEConfig, dtype: DTypeLike | None) -> dict[str, Any]:
    weights = {name: params[name] for name in WEIGHTS if name in params}
    if cast := [name for name, weight in weights.items() if is_cast(weight)]:
        raise ValueError(f"params[{cast[0]!r}] is cast already: give the weights, or with_casts(params, casts)")
    *leading, _, inputs, outputs = weights["w_down"].shape
    if min(inputs, outputs) < LEAST_WIDTH and not is_fp8_everywhere():
        return dict(params)
    first = next(iter(weights.values()))
    if dtype is None:
        dtype = first.dtype if first.dtype in (jnp.bfloat16, jnp.float16) else jnp.bfloat16
    plain = [_constant(weight, len(leading)) for weight in weights.values()]
    x: Any = jax.ShapeDtypeStruct((1, outputs), dtype)
    shapes: tuple[Any, ...] = tuple(jax.ShapeDtypeStruct(weight.shape, weight.dtype) for weight in plain)
    implementation = choose_implementation(config.implementation, x, shapes, ())
    kernels: Any = kernels_in_fp8(kernels_of(implementation, dtype=dtype), x, shapes, expected_rows=None)
    activation, adapter = get_activation(config.activation), config.adapter
    adapted = adapter is not None and "down" in adapter.projections(activation.gated)
    bounded = hidden_bound(activation, outputs, config.save, adapted) is not None
    ups, down = kernels.cast_weights(plain[:-1], plain[-1], dtype, bounded)
    casts = [replace(cast, weight=None) for cast in (*ups, down)]
    casts = jax.tree.map(lambda array: array.reshape(*leading, -1, *array.shape[1:]), casts)
    return {**params, **{n: replace(cast, weight=params[n]) for n, cast in zip(weights, casts, strict=True)}}


def with_casts(params: Any, casts: Any) -> Any:
    """The parameters with the casts that were made of them: for functions that are differentiated.

    Args:
      params: parameters of a layer or of a model, in any tree.
      casts: what `cast_experts` returned of them, or of their like.
    """

    def beside(cast, weight):
        return replace(cast, weight=weight) if is_cast(cast) else weight

    return jax.tree.map(beside, casts, params, is_leaf=is_cast)


def is_cast(weight: Any) -> bool:
    return isinstance(weight, CastWeight)


def _constant(weight: Any, leading: int) -> Any:
    """The weight of all experts of all layers, without a derivative; what is compressed in other forms as numbers."""
    weight = lax.stop_gradient(weight)
    if is_quantized(weight) and not is_float8(weight):
        weight = weight.astype(weight.dtype)
    return jax.tree.map(lambda array: array.reshape(-1, *array.shape[leading + 1 :]), weight)


def is_made(weight: Any) -> bool:
    """Whether the weight is no array, but was made of one: `QuantizedWeight` or `CastWeight`."""
    return is_quantized(weight) or is_cast(weight)


def apart(params: Parameters) -> Parameters:
    """The parameters with casts beside the weights, and not in their place."""

    def of(projection: Projection) -> Projection:
        cast: Any = projection.weight
        if not is_cast(cast):
            return projection
        return projection._replace(weight=cast.weight, cast=replace(cast, weight=None))

    return params.map(of)


def check_casts(params: Parameters, activation: Activation, save: str) -> None:
    """Raises ValueError unless all weights are cast, for this way of computing, or none."""
    casts = [projection.cast for projection in (*params.ups, params.down)]
    given = [cast for cast in casts if cast is not None]
    if not given:
        return
    if len(given) < len(casts):
        raise ValueError("some of the experts' weights are CastWeights, all must be or none: see cast_experts")
    down: Array = params.down.weight
    bounded = hidden_bound(activation, down.shape[-1], save, params.down.a is not None) is not None
    if given[0].bounded != bounded:
        raise ValueError(
            f"the weights were cast for another layer than one with activation {activation.name!r}, {save=} and model "
            f"width {down.shape[-1]}: cast_experts has to be given the configuration of the layer that takes them"
        )
