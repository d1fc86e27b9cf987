"""Memory of one layer and of a conventional layer of its size, without running either."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from blaze_jax.benchmark.memory import plan_of, saved_residuals
from blaze_jax.benchmark.peers import RAGGED_DOT, estimate, sorted_layer
from blaze_jax.benchmark.sizes import Sizes, abstract_inputs, forward_and_backward
from blaze_jax.experts import expert_ffn
from blaze_jax.layer_observer import TracedLayer

_WEIGHTS = ("w_gate", "w_up", "w_down")
_SHORT_NAMES = {"moe_gate": "gate", "moe_up": "up", "moe_indices": "indices", "weights": "routing weights"}
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
    """Memory of a layer's forward+backward.

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
    """A layer next to a conventional one of its size, which sorts, copies the tokens and keeps what autodiff keeps.

    Attributes:
      layer: its sizes and settings.
      traced: how often it was traced.
      ours: memory of our layer.
      conventional: memory of the other; None where there is none to compare with: that is gated.
      total_flops: operations of matrix products, forward and backward.
    """

    layer: TracedLayer
    traced: int
    ours: LayerMemory
    conventional: LayerMemory | None
    total_flops: int


def report_on(layer: TracedLayer, traced: int) -> LayerReport:
    """Traces, and where that is cheap compiles, both layers at the sizes of `layer`."""
    settings = {"activation": layer.activation, "save": layer.save, "implementation": layer.implementation}
    sizes, gated = Sizes(*layer[:5]), layer.activation.gated
    inputs = abstract_inputs(sizes, layer.dtype, layer.weight_dtype)
    if not gated:
        inputs = (inputs[0], None, *inputs[2:])
    projections = 2 if gated else 1
    recomputed = projections * layer.product_flops if layer.save == "inputs" else 0
    ours = _memory(partial(expert_ffn, **settings), inputs, _SHORT_NAMES, recomputed_flops=recomputed)
    conventional = None
    if gated:
        needs = estimate(RAGGED_DOT, "", sizes, jnp.dtype(layer.dtype).itemsize, backward=True)
        note = f"jax.lax.ragged_dot makes {needs.what} here, at least {needs.num_bytes / 2**30:.0f} GiB: not compiled"
        too_large = note if needs.num_bytes > _MAX_EXPANSION else ""
        conventional = _memory(_conventional, inputs, _CONVENTIONAL_NAMES, too_large)
    return LayerReport(layer, traced, ours, conventional, 3 * (projections + 1) * layer.product_flops)


def _conventional(x, w_gate, w_up, w_down, weights, experts):
    matrices = (w.astype(x.dtype) for w in (w_gate, w_up, w_down))
    return sorted_layer(jax.lax.ragged_dot)(x, *matrices, weights, experts)


def _memory(
    layer: Callable, inputs, names: dict[str, str], too_large: str = "", *, recomputed_flops: int = 0
) -> LayerMemory:
    """The memory of a layer, compiled unless it is `too_large` for that."""
    residuals = [r for r in saved_residuals(layer, *inputs) if r.name not in _WEIGHTS]
    kept: Counter[str] = Counter()
    for residual in residuals:
        name = names.get(residual.name, residual.name if residual.is_argument else "indices and others")
        kept[name] += residual.bytes
    transient, note = None, too_large
    if not too_large:
        plan = plan_of(jax.jit(forward_and_backward(layer)).lower(*inputs, inputs[0]).compile().memory_analysis())
        if plan is None:
            note = f"XLA gives no plan of memory on {jax.default_backend()}"
        else:  # what the first pass makes for the second is alive from one to the other
            transient = max(0, plan.temporaries - sum(r.bytes for r in residuals if not r.is_argument))
    return LayerMemory(dict(kept), transient, note, recomputed_flops)
