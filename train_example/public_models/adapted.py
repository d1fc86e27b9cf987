"""Projections of attention with adapters of low rank."""

import flax.linen as nn
from jaxtyping import Array

from blaze_jax import LoRA
from blaze_jax.adapters import A, B

ADAPTED = {"q": "query", "k": "key", "v": "value", "o": "out"}
"""The projections that can have an adapter, by the names in which `_proj` follows in public models."""

KERNEL_A, KERNEL_B = f"kernel{A}", f"kernel{B}"


class AdaptedProjection(nn.DenseGeneral):
    """`nn.DenseGeneral`, and `scale · x · A · B` beside it, A (inputs, rank) and B (rank, outputs), flat.

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
