"""Where the memory of a training step goes, and what a conventional layer would take."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.experimental import xla_metadata

from blaze_jax.benchmark.plan import MemoryPlan, plan_of
from blaze_jax.benchmark.residuals import kept_by_name
from blaze_jax.layer_observer import TracedLayer, observed_layers
from blaze_jax.profiler.layer_report import LayerReport, report_on
from blaze_jax.profiler.plot import draw_layers
from blaze_jax.profiler.text import render

_numbers = itertools.count()


@dataclass
class Profile:
    """What is known of a step.

    Attributes:
      device: its kind.
      ran: whether the step was run, or only traced and compiled.
      peak: bytes in use at most, None where it is not known.
      peak_note: what the peak is of, or why it is not known.
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
        text = render(self.result)
        print(text)
        return text

    def plot(self, path: str | Path) -> Path:
        """Draws what each layer keeps and needs for a moment, next to a conventional layer, as a PNG file.

        Raises:
          ValueError: no layer was seen.
        """
        return draw_layers(self.result.layers, Path(path))


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
