"""Tells the memory profiler of the layers that are traced."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from blaze_jax.activations import Activation


class TracedLayer(NamedTuple):
    """Sizes and settings of an `expert_ffn` call. T tokens, d model width, n expert width, E experts, K per token."""

    num_tokens: int
    model_width: int
    expert_width: int
    num_experts: int
    experts_per_token: int
    dtype: str
    weight_dtype: str
    activation: Activation
    save: str
    implementation: str

    @property
    def product_flops(self) -> int:
        """Floating-point operations of one matrix product over all pairs, 2·T·K·d·n."""
        return 2 * self.num_tokens * self.experts_per_token * self.model_width * self.expert_width

    def __str__(self) -> str:
        names = ("T", "d", "n", "E", "K")
        sizes = ", ".join(f"{name}={size}" for name, size in zip(names, self, strict=False))
        return f"{sizes}, {self.activation.name}, {self.dtype}, save={self.save!r}, {self.implementation}"


_observers: ContextVar[tuple[list[TracedLayer], ...]] = ContextVar("observers", default=())


@contextmanager
def observed_layers() -> Iterator[list[TracedLayer]]:
    """A list that gains every layer traced, or called outside of `jax.jit`, in the block."""
    seen: list[TracedLayer] = []
    token = _observers.set((*_observers.get(), seen))
    try:
        yield seen
    finally:
        _observers.reset(token)


def are_observers() -> bool:
    """Whether any list is open."""
    return bool(_observers.get())


def tell_observers(layer: TracedLayer) -> None:
    """Adds the layer to every open list."""
    for seen in _observers.get():
        seen.append(layer)
