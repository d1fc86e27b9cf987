"""Memory of one layer and of a conventional layer of its size, without running either."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from blaze_jax.benchmark.inputs import abstract_inputs, forward_and_backward
from blaze_jax.benchmark.peers import RAGGED_DOT, estimated_bytes, sorted_layer
from blaze_jax.benchmark.plan import plan_of
from blaze_jax.benchmark.residuals import saved_residuals
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
      total_flops: operations of matrix products, forward and backward.
    """

    layer: TracedLayer
    traced: int
    ours: LayerMemory
    conventional: LayerMemory | None
    note: str = ""
    total_flops: int = 0


def report_on(layer: TracedLayer, traced: int) -> LayerReport:
    """Traces, and where that is cheap compiles, both layers at the sizes of `layer`."""
    settings = {"activation": layer.activation, "save": layer.save, "implementation": layer.implementation}
    inputs = abstract_inputs(Sizes(*layer[:5]), layer.dtype, layer.weight_dtype)
    recomputed = layer.product_flops if layer.save == "inputs" else 0  # for each of the projections
    if layer.activation.gated:
        ours = _memory(partial(expert_ffn, **settings), inputs, _SHORT_NAMES, recomputed_flops=2 * recomputed)
        return LayerReport(layer, traced, ours, _conventional(layer, inputs), "", 9 * layer.product_flops)
    x, _, *rest = inputs
    ours = _memory(partial(_without_gate, **settings), (x, *rest), _SHORT_NAMES, recomputed_flops=recomputed)
    return LayerReport(layer, traced, ours, None, "the conventional layer here is gated", 6 * layer.product_flops)


def _conventional(layer: TracedLayer, inputs) -> LayerMemory:
    conventional = sorted_layer(jax.lax.ragged_dot)

    def same_dtype(x, w_gate, w_up, w_down, weights, experts):
        return conventional(x, *(w.astype(x.dtype) for w in (w_gate, w_up, w_down)), weights, experts)

    expansion, what = estimated_bytes(RAGGED_DOT, Sizes(*layer[:5]), jnp.dtype(layer.dtype).itemsize, backward=True)
    note = f"jax.lax.ragged_dot makes {what} here, at least {expansion / 2**30:.0f} GiB: not compiled"
    return _memory(same_dtype, inputs, _CONVENTIONAL_NAMES, note if expansion > _MAX_EXPANSION else "")


def _without_gate(x, w_up, w_down, weights, experts, **settings):
    return expert_ffn(x, None, w_up, w_down, weights, experts, **settings)


def _memory(
    layer: Callable, inputs, names: dict[str, str], too_large: str = "", *, recomputed_flops: int = 0
) -> LayerMemory:
    """Of a layer, compiled unless it is `too_large` for that."""
    kept: dict[str, int] = {}
    residuals = [r for r in saved_residuals(layer, *inputs) if r.name not in _WEIGHTS]
    for residual in residuals:
        name = names.get(residual.name, residual.name if residual.is_argument else "indices and others")
        kept[name] = kept.get(name, 0) + residual.bytes
    if too_large:
        return LayerMemory(kept, None, too_large, recomputed_flops)
    plan = plan_of(jax.jit(forward_and_backward(layer)).lower(*inputs, inputs[0]).compile().memory_analysis())
    if plan is None:
        return LayerMemory(kept, None, f"XLA gives no plan of memory on {jax.default_backend()}", recomputed_flops)
    made = sum(r.bytes for r in residuals if not r.is_argument)  # and alive from one pass to the other
    return LayerMemory(kept, max(0, plan.temporaries - made), "", recomputed_flops)
