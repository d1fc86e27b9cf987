"""A profile as a figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blaze_jax.benchmark.plan import MIB
from blaze_jax.profiler.layer_report import LayerMemory, LayerReport

_COLORS = (
    *("#2563a8", "#7fb3e0", "#d1495b", "#e8a33d", "#6aa56f", "#8f7bb5"),
    *("#4b5563", "#14b8a6", "#f0abc0", "#a16207", "#84cc16", "#c4b5fd"),
)
_TRANSIENT = {"color": "#f3f4f6", "edgecolor": "#9ca3af", "hatch": "//", "linewidth": 0}


def draw_layers(reports: Sequence[LayerReport], path: Path) -> Path:
    """Stacked bars, ours above the conventional layer's, for every kind of layer; needs matplotlib.

    Raises:
      ValueError: there is no layer to draw.
    """
    if not reports:
        raise ValueError("no layer was seen, there is nothing to draw")
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for r in reports for m in (r.ours, r.conventional) if m for name in m.kept))
    colors = {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(names)}
    figure = Figure(figsize=(10, 1.0 + 1.7 * len(reports)), dpi=150, layout="constrained")
    figure.suptitle("Kept for the backward pass, and alive for a moment: MiB", fontsize=11, fontweight="bold")
    grid = figure.subplots(len(reports), 1, squeeze=False)
    shown: dict[str, Any] = {}
    for report, axes in zip(reports, grid.flat, strict=True):
        rows: list[tuple[str, LayerMemory]] = [("blaze_jax", report.ours)]
        if report.conventional is not None:
            rows.append(("conventional", report.conventional))
        for place, (_, memory) in enumerate(rows):
            parts = [(name, size, {"color": colors[name]}) for name, size in memory.kept.items()]
            if memory.transient is not None:
                parts.append(("transient", memory.transient, _TRANSIENT))
            left = 0.0
            for name, size, style in parts:
                shown.setdefault(name, axes.barh(place, size / MIB, left=left, height=0.65, **style))
                left += size / MIB
            transient = "transient, not known" if memory.transient is None else f"{memory.transient / MIB:,.1f}"
            axes.text(left, place, f" {memory.kept_bytes / MIB:,.1f} + {transient}", va="center", fontsize=8)
        axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=9)
        axes.invert_yaxis()
        axes.margins(x=0.3)
        axes.set_title(str(report.layer), fontsize=8, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
