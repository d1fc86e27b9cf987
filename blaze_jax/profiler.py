"""Where the memory of a training step goes, by name, and what a conventional layer would take: `MemoryProfiler`."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import xla_metadata

from blaze_jax.benchmark.memory import MIB, MemoryPlan, kept_by_name, plan_of, saved_residuals
from blaze_jax.benchmark.peers import RAGGED_DOT, estimate, sorted_layer
from blaze_jax.benchmark.sizes import Sizes, abstract_inputs, forward_and_backward
from blaze_jax.experts import expert_ffn
from blaze_jax.layer_observer import TracedLayer, observed_layers

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


_numbers = itertools.count()


@dataclass
class Profile:
    """A step's memory, as far as it is known.

    Attributes:
      device: kind of the device.
      ran: whether the step was run, or only traced and compiled.
      peak: bytes in use at most, None where it is not known.
      peak_note: whose peak it is, or why it is not known.
      plan: XLA's plan of the compiled step, None where there is none.
      kept: bytes that live from the forward to the backward pass, by `checkpoint_name`, over all layers; None where
        the program was not seen.
      traced: the layers that were seen.
    """

    device: str
    ran: bool
    peak: int | None
    peak_note: str
    plan: MemoryPlan | None
    kept: dict[str, int] | None
    traced: Sequence[TracedLayer]

    @cached_property
    def layers(self) -> list[LayerReport]:
        """A report on each kind of layer, made when it is asked for: it traces and compiles."""
        return [report_on(layer, times) for layer, times in Counter(self.traced).items()]

    def __str__(self) -> str:
        """All of it in words, a line for each figure."""
        lines = [f"memory of a step on {self.device}, {'run' if self.ran else 'compiled, not run'}"]
        lines.append(f"  peak: {'not known' if self.peak is None else _mib(self.peak)}: {self.peak_note}")
        if self.plan is not None:
            arguments, results, temporaries = map(_mib, self.plan)
            lines.append(f"  plan: arguments {arguments}, results {results}, temporaries {temporaries}")
        if self.kept is None:
            lines.append("  kept over all layers: not known of a step that runs; `examine` counts it")
        elif self.kept:
            lines.append(f"  kept from forward to backward, by name, over all layers: {_listed(self.kept)}")
        else:
            lines.append("  kept from forward to backward: nothing with a name; is the backward pass in this function?")
        if not self.traced:
            lines.append("  no blaze_jax layer was traced: a program compiled ahead of time does not show its layers")
        return "\n".join([*lines, *(line for report in self.layers for line in _layer_lines(report))])


def _layer_lines(report: LayerReport) -> Iterator[str]:
    times = "" if report.traced == 1 else f", traced {report.traced} times"
    yield f"layer {report.layer}{times} (a loop over layers is traced once, however long it is)"
    both = {"blaze_jax": report.ours, "conventional (sort + lax.ragged_dot)": report.conventional}
    for name, memory in both.items():
        if memory is None:
            yield "  conventional: not compared, the conventional layer here is gated"
            return
        transient = f"not known: {memory.note}" if memory.transient is None else _mib(memory.transient)
        gflop, share = memory.recomputed_flops / 1e9, memory.recomputed_flops / max(1, report.total_flops)
        yield f"  {name} keeps {_mib(memory.kept_bytes)}: {_listed(memory.kept)}"
        yield f"  {name} transient buffers: {transient}"
        yield f"  {name} recomputes {gflop:,.2f} GFLOP of products, {share:.0%} more arithmetic"
    ratio = both.popitem()[1].kept_bytes / max(1, report.ours.kept_bytes)  # pyright: ignore[reportOptionalMemberAccess]
    yield f"  the conventional layer keeps {ratio:.2f} times as much"


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {_mib(size)}" for name, size in sorted(sizes.items(), key=lambda item: -item[1]))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.2f} MiB"


class MemoryProfiler:
    """Measures a step that runs, or examines one that does not, and tells by name where its memory goes.

    ```python
    profiler = MemoryProfiler()
    with profiler.profile():
        train_step(state, batch)
    profiler.summary()

    profiler.examine(train_step, state, batch)  # traced and compiled, not run; shapes are enough
    profiler.plot("memory.png")
    ```
    """

    def __init__(self):
        self._profile: Profile | None = None

    @contextmanager
    def profile(self) -> Iterator[None]:
        """Watches what is run in the block.

        Jitted functions are traced and compiled again in it, so that their layers are seen; programs compiled ahead of
        time are not, and their layers stay unknown. The block ends when what it started is done.
        """
        device = jax.devices()[0]
        before = device.memory_stats() or {}
        with observed_layers() as traced, _traced_anew():
            yield
        _wait(device)
        peak, note = _measured_peak(device, before, device.memory_stats() or {})
        self._profile = Profile(device.device_kind, True, peak, note, None, None, tuple(traced))

    def examine(self, function: Callable, *arguments: Any) -> Profile:
        """Traces and compiles a step for this platform without running it.

        Args:
          function: the step, jitted or plain, with its backward pass in it.
          *arguments: its arguments; `jax.ShapeDtypeStruct`s will do.
        """
        device = jax.devices()[0]
        with observed_layers() as traced, _traced_anew():
            jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
        jitted = function if isinstance(function, jax.stages.Wrapped) else jax.jit(function)
        plan = plan_of(jitted.lower(*arguments).compile().memory_analysis())
        peak, note = None, f"XLA gives no plan of memory on {device.platform}"
        if plan is not None:
            peak, note = plan.total, "by XLA's plan, arguments and results included"
        self._profile = Profile(device.device_kind, False, peak, note, plan, kept_by_name(jaxpr), tuple(traced))
        return self._profile

    @property
    def result(self) -> Profile:
        """The last profile.

        Raises:
          ValueError: there is none yet.
        """
        if self._profile is None:
            raise ValueError("nothing was profiled yet: use `with profiler.profile():` or `profiler.examine(...)`")
        return self._profile

    def summary(self) -> str:
        """Prints the last profile, and returns what it printed."""
        text = str(self.result)
        print(text)
        return text

    def plot(self, path: str | Path) -> Path:
        """Draws what each layer keeps and needs for a moment, next to a conventional layer, as a PNG file.

        Raises:
          ValueError: no layer was seen.
        """
        from blaze_jax.benchmark.plots import Bar, draw_bars, new_figure, save  # needs matplotlib

        reports = self.result.layers
        if not reports:
            raise ValueError("no layer was seen, there is nothing to draw")
        figure = new_figure(10, 1.0 + 1.7 * len(reports), "Kept for the backward pass, and alive for a moment: MiB")
        colors: dict[str, str] = {}
        for report, axes in zip(reports, figure.subplots(len(reports), 1, squeeze=False).flat, strict=True):
            bars = []
            for name, memory in (("blaze_jax", report.ours), ("conventional", report.conventional)):
                if memory is not None:
                    parts = memory.kept | ({} if memory.transient is None else {"transient": memory.transient})
                    for part in memory.kept:
                        colors.setdefault(part, _COLORS[len(colors) % len(_COLORS)])
                    pieces = [(size / MIB, colors.get(part, _TRANSIENT)) for part, size in parts.items()]
                    bars.append(Bar(name, pieces, _kept_and_transient(memory)))
            draw_bars(axes, str(report.layer), bars)
        handles: list[Any] = [figure.axes[0].bar([0], [0], color=color) for color in (*colors.values(), _TRANSIENT)]
        names = [*colors, "transient"]
        figure.legend(handles, names, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
        save(figure, Path(path))
        return Path(path)


_COLORS = (
    *("#2563a8", "#7fb3e0", "#d1495b", "#e8a33d", "#6aa56f", "#8f7bb5"),
    *("#4b5563", "#14b8a6", "#f0abc0", "#a16207", "#84cc16", "#c4b5fd"),
)
_TRANSIENT = "#e5e7eb"


def _kept_and_transient(memory: LayerMemory) -> str:
    transient = "transient, not known" if memory.transient is None else f"{memory.transient / MIB:,.1f}"
    return f"{memory.kept_bytes / MIB:,.1f} + {transient}"


def _traced_anew():
    """A context in which jax knows no trace from before: its programs carry a number that no other has."""
    return xla_metadata.set_xla_metadata(blaze_jax_profile=str(next(_numbers)))


def _wait(device) -> None:
    """Waits until the device is done: its programs run in order, so one more program has to end."""
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jax.device_put(0, device)))


def _measured_peak(device, before: dict, after: dict) -> tuple[int | None, str]:
    peak, earlier = after.get("peak_bytes_in_use"), before.get("peak_bytes_in_use")
    if peak is None:
        return None, f"{device.platform} devices do not report it; `examine` has XLA's plan"
    if earlier is not None and peak <= earlier:
        return None, f"the block stayed below the {earlier / 2**20:,.1f} MiB that this process had in use before"
    return peak, f"of the process, {before.get('bytes_in_use', 0) / 2**20:,.1f} MiB of it in use before the block"
