"""The figure of a run that is done: its losses, and the load of the experts."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, MaxNLocator

from train_example.loop import Record

_TRAIN, _HELD_OUT, _GREY = "#3b6fb6", "#d1495b", "#6b7280"
_LOADS = (0.25, 0.5, 1, 2, 4)
_NORM, _COLORS = LogNorm(_LOADS[0], _LOADS[-1]), "RdBu_r"
_MAX_COLUMNS = 6
_FONT_SIZE = 9


def plot(records: list[Record], unigram_bits: float, title: str, path: Path) -> None:
    """Draws `records` as a PNG.

    Args:
      records: the metrics of every step, with "held_out" and "load" where they were taken.
      unigram_bits: entropy of the byte frequencies, for comparison.
      title: stands above the figure.
      path: where the PNG goes.
    """
    loads = [record for record in records if "load" in record]
    load = np.array([record["load"] for record in loads], float)
    layers = load.shape[1]
    rows = -(-layers // _MAX_COLUMNS)
    figure = Figure(figsize=(11, 5.2 + 2.3 * rows), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08))
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    halves = figure.add_gridspec(2, 1, height_ratios=(4.6, 0.6 + 2.3 * rows), hspace=0.04)
    top, bottom = figure.add_subfigure(halves[0]), figure.add_subfigure(halves[1])
    _draw_loss(top.subplots(), records, unigram_bits)
    _draw_loads(bottom, load / load.mean(2, keepdims=True), [record["step"] for record in loads])
    figure.savefig(path)


def _draw_loss(axes: Axes, records: list[Record], unigram_bits: float) -> None:
    step = np.array([record["step"] for record in records])
    loss = np.array([record["loss"] for record in records])
    held_out = [(record["step"], record["held_out"]) for record in records if "held_out" in record]
    axes.axhline(unigram_bits, color=_GREY, linestyle=(0, (4, 3)), linewidth=1.2)
    beside = axes.text(0.99, 0.98 * unigram_bits, f"byte frequencies alone: {unigram_bits:.2f}", color=_GREY)
    beside.set(ha="right", va="top", fontsize=_FONT_SIZE, transform=axes.get_yaxis_transform())
    axes.plot(step, loss, color=_TRAIN, alpha=0.25, linewidth=0.8)
    axes.plot(step, _smoothed(loss), color=_TRAIN, linewidth=1.8, label="training")
    label = f"held-out, at the end {held_out[-1][1]:.2f}"
    axes.plot(*zip(*held_out, strict=True), "o-", color=_HELD_OUT, markersize=4.5, clip_on=False, label=label)
    axes.set_ylabel("bits per byte")
    axes.set_xlabel("step")
    axes.set_xlim(0, step[-1])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, 1.25 * unigram_bits or None)  # the first few steps start above; a text of one byte has 0
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left", fontsize=_FONT_SIZE + 1)


def _draw_loads(figure: SubFigure, load: np.ndarray, steps: list[int]) -> None:
    """One map a layer, time to the right, experts downwards; `load` is `(time, layers, E)`, 1 for an even share."""
    layers, experts = load.shape[1:]
    columns = min(layers, _MAX_COLUMNS)
    rows = -(-layers // columns)
    title = "Load of the experts in every Mixture-of-Experts layer, relative to an even share"
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    extent = (steps[0] - 0.5, max(steps[-1], steps[0] + 1) + 0.5, experts - 0.5, -0.5)
    for axes in grid.flat[layers:]:
        axes.set_axis_off()
    for layer, axes in enumerate(grid.flat[:layers]):
        shown = np.clip(load[:, layer].T, _LOADS[0], _LOADS[-1])
        axes.imshow(shown, aspect="auto", interpolation="nearest", cmap=_COLORS, norm=_NORM, extent=extent)
        axes.set_title(f"layer {layer + 1}", fontsize=_FONT_SIZE)
        axes.tick_params(labelsize=_FONT_SIZE - 1, length=2)
        axes.xaxis.set_major_locator(MaxNLocator(4 if columns <= 4 else 2, integer=True, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 10k, not 10000
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    figure.supxlabel("step", fontsize=_FONT_SIZE + 1)
    figure.supylabel("expert", fontsize=_FONT_SIZE + 1)
    scale = figure.colorbar(ScalarMappable(_NORM, _COLORS), ax=grid, pad=0.015, aspect=24 * rows, extend="both")
    scale.set_ticks(list(_LOADS), labels=["¼×", "½×", "even", "2×", "4×"], fontsize=_FONT_SIZE)
    scale.minorticks_off()
    scale.outline.set_visible(False)


def _smoothed(loss: np.ndarray) -> np.ndarray:
    """Mean over a hundredth of the run to either side of every step, less near the ends."""
    step = np.arange(loss.size)
    reach = np.minimum(loss.size // 100, np.minimum(step, step[::-1]))
    total = np.concatenate([[0.0], np.cumsum(loss)])
    return (total[step + reach + 1] - total[step - reach]) / (2 * reach + 1)
