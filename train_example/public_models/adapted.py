"""Projections of attention with adapters of low rank, and with a frozen kernel that may be compressed."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array

from blaze_jax import LoRA
from blaze_jax.adapters import A, B
from blaze_jax.quantized import Form, is_quantized, quantize

ADAPTED = {"q": "query", "k": "key", "v": "value", "o": "out"}
"""The projections that can have an adapter, by the names in which `_proj` follows in public models."""

KERNEL_A, KERNEL_B = f"kernel{A}", f"kernel{B}"


def compressed_kernel(name: str, kernel: Array, form: Form) -> Any:
    """A projection's kernel, or a stack of them, as one matrix `(1, inputs, outputs)` that is compressed.

    The three axes of a kernel are inputs, heads and their numbers; those of "out" are heads, their numbers and outputs.
    """
    *layers, first, second, third = kernel.shape
    inputs, outputs = (first * second, third) if name == "out" else (first, second * third)
    return quantize(kernel.reshape(*layers, 1, inputs, outputs), form)


class AdaptedProjection(nn.DenseGeneral):
    """`nn.DenseGeneral`, and `scale · x · A · B` beside it, A (inputs, rank) and B (rank, outputs), flat.

    Its kernel may be what `compressed_kernel` returns, and is then decoded in each pass.

    Attributes:
      adapter: rank, scale and type, see `blaze_jax.LoRA`; None for none.
      adapted: names of the modules that have one.
    """

    adapter: LoRA | None = None
    adapted: tuple[str, ...] = ()

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        y = super().__call__(inputs)
        if self.adapter is None or self.name not in self.adapted:
            return y
        x = inputs.reshape(*inputs.shape[:2], -1).astype(y.dtype)
        start = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")  # as torch begins a linear layer
        a = self.param(KERNEL_A, start, (x.shape[-1], self.adapter.rank), self.adapter.dtype)
        outputs = y[0, 0].size
        b = self.param(KERNEL_B, nn.initializers.zeros, (self.adapter.rank, outputs), self.adapter.dtype)
        return y + (self.adapter.scale * (x @ a.astype(y.dtype) @ b.astype(y.dtype))).reshape(y.shape)

    @nn.nowrap
    def param(self, name: str, init_fn: Callable[..., Any], *init_args: Any, **options: Any) -> Any:
        """See `nn.Module`; a compressed parameter is decoded to the shape that is wanted, in bfloat16."""
        kept = self.get_variable("params", name)
        if is_quantized(kept):
            return kept.astype(jnp.bfloat16).reshape(init_args[0])
        return super().param(name, init_fn, *init_args, **options)
