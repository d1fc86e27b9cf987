"""The record as a figure."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from blaze_jax.benchmark.results import source

_BAR, _BOUND, _GAPS = "#94a3b8", "#2563a8", "#d1495b"


def plot(content: dict[str, Any], path: Path) -> None:
    """Draws a bar for each part of the step, and in it the least it could take, as a PNG file."""
    (record,) = content["records"]
    rows = [row for row in record["parts"] if row["ms"] or row["bound_ms"]]
    names = [row["part"] for row in rows] + ["gaps"]
    times = [row["ms"] for row in rows] + [record["gaps_ms"]]
    figure = Figure(figsize=(8, 0.9 + 0.32 * len(names)), dpi=144, layout="constrained")
    axes = figure.subplots()
    axes.barh(range(len(names)), times, height=0.72, color=[_BAR] * len(rows) + [_GAPS], label="measured")
    axes.barh(range(len(rows)), [r["bound_ms"] for r in rows], height=0.36, color=_BOUND, label="bound")
    limit = max(times)
    for place, ms in enumerate(times):
        axes.text(ms + 0.01 * limit, place, f"{ms:.1f}", va="center", fontsize=8.5)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * limit)
    axes.set_xlabel(f"ms of a step of {record['step_ms']:.1f} ms; {source(content)}", fontsize=8)
    axes.set_title(
        f"{record['preset']}, {record['batch_size']} × {record['sequence_length']:,} bytes a step: "
        f"{record['tokens_per_second']:,.0f} tokens/s",
        fontsize=10,
        loc="left",
    )
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
