"""Frozen weights of experts that stay compressed in memory, and are decoded where a layer computes with them.

A `QuantizedWeight` stands in the place of `w_gate`, `w_up` or `w_down` among the parameters of a layer with adapters.
Kernels that take it decode tiles of it on their way to the products. For others, forward and backward pass each decode
it anew, so that the numbers of one layer exist at a time, and nothing is kept.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.codings import CODINGS, Form, QuantizedWeight, is_quantized

WEIGHTS = ("w_gate", "w_up", "w_down")
"""The parameters that may be compressed."""


def quantize(weights: Float[Array, "... in out"], form: Form) -> QuantizedWeight:
    """Compresses matrices: 8 or 4 bits a number, and the scales' 0.002 ("float8") or 0.25 ("mxfp4", "nf4").

    Args:
      weights: matrices of experts, with any leading axes.
      form: "float8": e4m3 with a scale for each 128 × 128 numbers. "mxfp4": the format of the Open Compute Project.
        "nf4": the NormalFloat of QLoRA (arXiv 2305.14314) in groups of 64, whose scales are bfloat16.

    Raises:
      ValueError: there is no such form, or the inputs are no multiple of those that share a scale.
    """
    coding, multiple = CODINGS[check_form(form)], inputs_multiple(form)
    if weights.ndim < 2 or weights.shape[-2] % multiple:
        raise ValueError(f"weights of shape {weights.shape} must have inputs, the last axis but one, in {multiple}s")
    encode: Any = coding.encode
    for _ in range(weights.ndim - 2):
        encode = jax.vmap(encode)
    values, scales = encode(weights)
    return QuantizedWeight(values, scales, form)


def inputs_multiple(form: Form) -> int:
    """What the inputs of a matrix must be a multiple of: those that share a scale, except for float8."""
    return 1 if form == "float8" else CODINGS[form].steps[-1][0]


def check_form(form: Form) -> Form:
    """Returns the form; ValueError unless it is one."""
    if form not in CODINGS:
        raise ValueError(f"{form=} must be one of {', '.join(get_args(Form))}")
    return form


def quantize_experts(params: Mapping[str, Any], form: Form) -> dict[str, Any]:
    """The parameters of a layer, with the experts' weights compressed; see `quantize`."""
    return {name: quantize(p, form) if name in WEIGHTS and not is_quantized(p) else p for name, p in params.items()}


def decoded(tree: Any, dtype: DTypeLike | None = None) -> Any:
    """The tree, with numbers of that type in the place of what is compressed; None for bfloat16."""
    return jax.tree.map(lambda p: p.astype(dtype or p.dtype) if is_quantized(p) else p, tree, is_leaf=is_quantized)


def any_quantized(tree: Any) -> bool:
    return any(map(is_quantized, jax.tree.leaves(tree, is_leaf=is_quantized)))


def check_quantized(params: Mapping[str, Any], frozen: bool) -> None:
    """Raises ValueError unless what is compressed is the experts', whole, and nobody wants to train it."""
    for name, weight in params.items():
        if not is_quantized(weight):
            continue
        if name not in WEIGHTS:
            raise ValueError(
                f"params[{name!r}] is a QuantizedWeight, must be an array: {', '.join(WEIGHTS)} may be one"
            )
        if not frozen:
            raise ValueError(
                f"params[{name!r}] is a QuantizedWeight ({weight.form}), which cannot be trained: give the layer "
                "adapters by MoEConfig(adapter=LoRA(...)), or decode it by .astype(jnp.bfloat16)"
            )
        multiple = inputs_multiple(check_form(weight.form))
        *experts, inputs, outputs = weight.shape
        if inputs % multiple:
            raise ValueError(f"params[{name!r}] ({weight.form}) has {inputs} inputs, must have {multiple}s")
        blocks = (-(-size // step) for size, step in zip((inputs, outputs), weight.coding.steps[1], strict=True))
        dtypes, shapes = map(jnp.dtype, weight.coding.dtypes), (weight.values.shape, (*experts, *blocks))
        given = [f"{array.dtype}{array.shape}" for array in (weight.values, weight.scales)]
        if given != (right := [f"{dtype}{shape}" for dtype, shape in zip(dtypes, shapes, strict=True)]):
            raise ValueError(
                f"params[{name!r}] ({weight.form}) has values and scales {' and '.join(given)}, must have "
                f"{' and '.join(right)}"
            )


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def not_trained(name: str, weight: QuantizedWeight) -> QuantizedWeight:
    """The weight, whose derivative is an error that names it."""
    return weight


@not_trained.defjvp
def _refused(name: str, primals, tangents):
    (weight,) = primals
    raise ValueError(
        f"params[{name!r}] is a QuantizedWeight ({weight.form}), which is frozen and has no gradient: differentiate "
        "with respect to the adapters alone, see blaze_jax.split_adapters"
    )
