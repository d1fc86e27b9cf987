"""Memory of one layer and of a conventional layer of its size, without running either."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from blaze_jax.benchmark.inputs import forward_and_backward
from blaze_jax.benchmark.peers import RAGGED_DOT, estimated_bytes, sorted_layer
from blaze_jax.benchmark.plan import plan_of
from blaze_jax.benchmark.residuals import Residual, saved_residuals
from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.experts import expert_ffn
from blaze_jax.layer_observer import TracedLayer

_SHORT_NAMES = {"moe_gate": "gate", "moe_up": "up", "moe_indices": "indices", "weights": "routing weights"}
_WEIGHTS = ("w_gate", "w_up", "w_down")
_CONVENTIONAL_NAMES = {
    "weights": "routing weights",
    "gather": "tokens by expert",
    "ragged_dot_general": "gate and up",
    "logistic": "activation",
    "mul": "activation",
    "reshape": "expert outputs",
}
_MAX_EXPANSION = 4 * 2**30


@dataclass(frozen=True)
class LayerMemory:
    """What a layer's forward+backward takes.

    Attributes:
      kept: bytes that the backward pass keeps, by name; the experts' weights, which are there anyway, left out.
      transient: bytes alive for a moment in addition to those and the results, None where it is not known.
      note: why not, or empty.
      recomputed_flops: operations of matrix products that the backward pass does a second time.
    """

    kept: dict[str, int]
    transient: int | None = None
    note: str = ""
    recomputed_flops: int = 0

    @property
    def kept_bytes(self) -> int:
        return sum(self.kept.values())


@dataclass(frozen=True)
class LayerReport:
    """A layer and a conventional one of that size, which sorts, copies the tokens and keeps what autodiff keeps.

    Attributes:
      layer: its sizes and settings.
      traced: how often it was traced.
      ours: memory of our layer.
      conventional: of the other; None where there is none to compare with.
      note: why there is none, or empty.
    """

    layer: TracedLayer
    traced: int
    ours: LayerMemory
    conventional: LayerMemory | None
    note: str = ""
    total_flops: int = field(default=0)


def report_on(layer: TracedLayer, traced: int) -> LayerReport:
    """Traces, and where that is cheap compiles, both layers at the sizes of `layer`."""
    gated = layer.activation.gated
    inputs = _inputs(layer)
    ours = partial(
        _with_gate if gated else _without_gate,
        activation=layer.activation,
        save=layer.save,
        implementation=layer.implementation,
    )
    inputs = inputs if gated else (inputs[0], *inputs[2:])
    kept = _by_name(saved_residuals(ours, *inputs), _SHORT_NAMES)
    recomputed = layer.product_flops * (2 if gated else 1) if layer.save == "inputs" else 0
    transient, note = _transient(ours, inputs, sum(kept.values()))
    memory = LayerMemory(kept, transient, note, recomputed)
    total = layer.product_flops * (9 if gated else 6)
    if not gated:
        return LayerReport(layer, traced, memory, None, "the conventional layer here is gated", total)
    return LayerReport(layer, traced, memory, _conventional(layer, inputs), "", total)


def _conventional(layer: TracedLayer, inputs) -> LayerMemory:
    conventional = sorted_layer(jax.lax.ragged_dot)

    def same_dtype(x, w_gate, w_up, w_down, weights, experts):
        return conventional(x, *(w.astype(x.dtype) for w in (w_gate, w_up, w_down)), weights, experts)

    kept = _by_name(saved_residuals(same_dtype, *inputs), _CONVENTIONAL_NAMES)
    expansion, what = estimated_bytes(RAGGED_DOT, Sizes(*layer[:5]), jnp.dtype(layer.dtype).itemsize, backward=True)
    if expansion > _MAX_EXPANSION:
        note = f"jax.lax.ragged_dot makes {what} here, at least {expansion / 2**30:.0f} GiB: not compiled"
        return LayerMemory(kept, None, note)
    transient, note = _transient(same_dtype, inputs, sum(kept.values()))
    return LayerMemory(kept, transient, note)


def _by_name(residuals: list[Residual], names: dict[str, str]) -> dict[str, int]:
    total: dict[str, int] = {}
    for residual in residuals:
        if residual.is_argument and residual.name in _WEIGHTS:
            continue
        known = names.get(residual.name, residual.name if residual.is_argument else "indices and others")
        total[known] = total.get(known, 0) + residual.bytes
    return total


def _transient(layer: Callable, inputs, kept: int) -> tuple[int | None, str]:
    """Temporaries of forward+backward in one program, less what is kept in addition to the arguments."""
    compiled = jax.jit(forward_and_backward(layer)).lower(*inputs, inputs[0]).compile()
    plan = plan_of(compiled.memory_analysis())
    if plan is None:
        return None, f"XLA gives no plan of memory on {jax.default_backend()}"
    of_arguments = sum(r.bytes for r in saved_residuals(layer, *inputs) if r.is_argument and r.name not in _WEIGHTS)
    return max(0, plan.temporaries - (kept - of_arguments)), ""


def _with_gate(x, w_gate, w_up, w_down, weights, experts, **settings):
    return expert_ffn(x, w_gate, w_up, w_down, weights, experts, **settings)


def _without_gate(x, w_up, w_down, weights, experts, **settings):
    return expert_ffn(x, None, w_up, w_down, weights, experts, **settings)


def _inputs(layer: TracedLayer) -> tuple:
    tokens, d, n, experts, slots = layer[:5]
    up, down = ((experts, d, n), (experts, n, d))
    weights = (jax.ShapeDtypeStruct(shape, jnp.dtype(layer.weight_dtype)) for shape in (up, up, down))
    routed = (jax.ShapeDtypeStruct((tokens, slots), t) for t in (jnp.float32, jnp.int32))
    return jax.ShapeDtypeStruct((tokens, d), jnp.dtype(layer.dtype)), *weights, *routed
