"""`--plot`: results as PNG files, drawn from what the JSON files hold and nothing else."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from blaze_jax.benchmark.inputs import BOTH
from blaze_jax.benchmark.results_file import PUBLISHED, Record, read_results
from blaze_jax.benchmark.scaling import FLAT_FROM, FLAT_WITHIN
from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.benchmark.tables import label, reason

OURS = "blaze_jax"
_OUR_KERNELS = "moe_"
_OURS_COLOR, _PEER_COLOR, _PUBLISHED_COLOR, _GREY = "#2563a8", "#94a3b8", "#d6dbe3", "#6b7280"
_ACCENT = "#d1495b"
_COLUMNS = 2
_LEAST_SHARE = 0.005
"""Kernels that take less than that share of the time are drawn as one bar."""

type Bar = tuple[str, float | None, str]
"""Name, length, and the status of what it is of."""


def draw(results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Draws every kind of result there is.

    Args:
      results: contents of results files.
      folder: where the PNG files go; made when missing.

    Returns:
      The files, in the order they were drawn.

    Raises:
      ValueError: there is nothing to draw.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawers: tuple[tuple[str, str, Callable], ...] = (
        ("compare", "speed.png", _draw_speed),
        ("compare", "memory.png", _draw_memory),
        ("memory", "planned_memory.png", _draw_planned_memory),
        ("scaling", "scaling.png", _draw_scaling),
        ("training", "training.png", _draw_training),
        ("kernels", "kernels.png", _draw_kernels),
    )
    drawn = []
    for kind, name, drawer in drawers:
        own = [(result, [r for r in result["records"] if r["kind"] == kind]) for result in results]
        own = [(result, records) for result, records in own if records]
        if own:
            figure = drawer([record for _, records in own for record in records])
            figure.text(0.995, 0.004, source(own[0][0]), ha="right", va="bottom", fontsize=8, color=_GREY)
            _save(figure, folder / name)
            drawn.append(folder / name)
    if not drawn:
        kinds = sorted({record["kind"] for result in results for record in result["records"]})
        raise ValueError(f"there is no figure of these results: {', '.join(kinds) or 'none at all'}")
    return drawn


def _sizes(record: Record) -> str:
    sizes = "T={num_tokens:,}  d={model_width:,}  n={expert_width:,}  E={num_experts}  K={experts_per_token}"
    return sizes.format(**record["sizes"])


def source(result: dict[str, Any]) -> str:
    """What the results were measured on, and when."""
    e = result["environment"]
    driver = f", driver {e['driver']}, CUDA {e['cuda']}" if e["platform"] == "gpu" else ""
    return f"{e['device']}{driver}, jax {e['jax']}, {e['date']}"


def _figure(width: float, height: float, title: str):
    figure = Figure(figsize=(width, height), dpi=144, layout="constrained")
    foot = 0.2 / height  # where the source stands
    layout = {"rect": (0, foot, 1, 1 - foot), "h_pad": 0.08, "hspace": 0.05}
    figure.get_layout_engine().set(**layout)  # pyright: ignore[reportOptionalMemberAccess, reportCallIssue]
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    return figure


def _save(figure, path: Path) -> None:
    """Writes a PNG file of few colors, a third the size of matplotlib's own."""
    drawn = io.BytesIO()
    figure.savefig(drawn)
    Image.open(drawn).convert("RGB").quantize(128).save(path, optimize=True)


def _published(record: Record) -> list[Record]:
    """Figures of other runs at the same sizes."""
    same = {"kind": "published", "sizes": record["sizes"], "dtype": record["dtype"]}
    return [r for r in read_results(PUBLISHED)["records"] if r.items() >= same.items()]


def published_scaling() -> list[Record]:
    """MoEBlaze's own figures from few tokens to many."""
    return [r for r in read_results(PUBLISHED)["records"] if r["kind"] == "published_scaling"]


def _draw_speed(records: Sequence[Record]):
    def tflops(record: Record, row: Record) -> float | None:
        return 3 * Sizes(**record["sizes"]).forward_flops / row[BOTH]["us"] / 1e6 if BOTH in row else None

    title = "Forward + backward, TFLOP/s (pale: figures of other runs)"
    return _panels(records, title, _bars(tflops), lambda r: r["ceilings"][BOTH]["tflops"])


def _draw_memory(records: Sequence[Record]):
    title = "Kept for the backward pass in addition to the arguments, MiB (pale: figures of other runs)"
    return _panels(records, title, _bars(lambda _, row: row.get("saved_mib")))


def _draw_planned_memory(records: Sequence[Record]):
    def peak(_, row: Record) -> float | None:
        return row.get("peak_mib") if row.get("status", "ok") == "ok" else None

    title = "Peak of forward + backward beyond the arguments, by XLA's plan, MiB (pale: figures of other runs)"
    return _panels(records, title, _bars(peak))


def _bars(value: Callable[[Record, Record], float | None]) -> Callable[[Record], list[Bar]]:
    """A bar for each layer of a record, and for each other run at the same sizes that has a value."""

    def bars(record: Record) -> list[Bar]:
        names = [OURS if row["layer"] == OURS else label(row) for row in record["layers"]]
        ours = [(name, value(record, row), row["status"]) for name, row in zip(names, record["layers"], strict=True)]
        others = [(row["layer"], value(record, row), "published") for row in _published(record)]
        return ours + [bar for bar in others if bar[1] is not None]

    return bars


def _panels(records: Sequence[Record], title: str, bars: Callable, ceiling: Callable | None = None):
    """A panel of horizontal bars for each configuration, all bars of one height, the first on top."""
    columns = min(_COLUMNS, len(records))
    panels = [(record, bars(record)) for record in records]
    heights = [max(len(entries) for _, entries in panels[i : i + columns]) for i in range(0, len(panels), columns)]
    figure = _figure(5.4 * columns, 0.7 + sum(0.5 + 0.24 * height for height in heights), title)
    grid = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for i, ((record, entries), axes) in enumerate(zip(panels, grid.flat, strict=False)):
        axes.set_title(_sizes(record), fontsize=9.5, loc="left")
        most = max((value for _, value, _ in entries if value is not None), default=1.0)
        limit = max(most, ceiling(record) if ceiling else 0.0)
        lowest = heights[i // columns] - 0.4
        if ceiling:
            axes.axvline(ceiling(record), color=_GREY, linestyle=":", linewidth=1.2)
            text = f"dense matmul {_number(ceiling(record))}"
            axes.text(ceiling(record), lowest, text, ha="center", va="top", fontsize=8, color=_GREY)
        for place, (name, value, status) in enumerate(entries):
            if value is None:
                axes.text(0.012 * limit, place, reason(status), va="center", fontsize=8.5, color=_ACCENT)
                continue
            axes.barh(place, value, color=_bar_color(name, status), height=0.72)
            text = axes.text(value + 0.012 * limit, place, _number(value), va="center", fontsize=8.5)
            text.set_bbox({"facecolor": "white", "linewidth": 0, "pad": 1.5})  # the dotted line does not cross it
        axes.set_yticks(range(len(entries)), [name for name, _, _ in entries], fontsize=8.5)
        for tick in axes.get_yticklabels():
            tick.set_fontweight("bold" if tick.get_text().startswith(OURS) else "normal")
        axes.set_xticks([])
        axes.set_ylim(lowest, -0.6)
        axes.set_xlim(0, 1.16 * limit)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    return figure


def _bar_color(name: str, status: str) -> str:
    if name.startswith((OURS, _OUR_KERNELS)):
        return _OURS_COLOR
    return _PUBLISHED_COLOR if status == "published" else _PEER_COLOR


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def _draw_scaling(records: Sequence[Record]):
    layer = "d={model_width}, n={expert_width}, E={num_experts}, K={experts_per_token}".format(**records[0]["sizes"])
    figure = _figure(11, 4.4, f"From few tokens to many: {layer}")
    left, right = figure.subplots(1, 2)
    tokens = [r["sizes"]["num_tokens"] for r in records]
    shown = [r for r in published_scaling() if tokens[0] <= r["num_tokens"] <= tokens[-1]]
    times = [r["us"] * 1e3 / r["num_tokens"] for r in shown]
    memory = [r["mb"] * 1e6 / r["num_tokens"] / 1024 for r in shown]
    for axes, name, unit, ours, what, theirs in (
        (left, "ns_per_token", 1.0, "blaze_jax", "forward + backward, ns per token", times),
        (right, "saved_bytes_per_token", 1024.0, "blaze_jax, kept", "memory, KiB per token", memory),
    ):
        axes.plot(tokens, [r[name] / unit for r in records], "o-", color=_OURS_COLOR, label=ours)
        if axes is right and all("peak_mib" in r for r in records):
            peak = [r["peak_bytes_per_token"] / unit for r in records]
            style = {"color": _OURS_COLOR, "alpha": 0.55, "label": "blaze_jax, peak less weight gradients"}
            axes.plot(tokens, peak, "s--", **style)
        if shown:
            axes.plot([r["num_tokens"] for r in shown], theirs, "D", color=_ACCENT, label=shown[0]["layer"])
        flat = [(t, r[name] / unit) for t, r in zip(tokens, records, strict=True) if t >= FLAT_FROM]
        if len(flat) > 1:
            least = min(value for _, value in flat)
            label_of_band = f"at most {FLAT_WITHIN:.0%} above the least"
            band = {"color": _OURS_COLOR, "alpha": 0.12, "linewidth": 0, "label": label_of_band}
            axes.fill_between((flat[0][0], flat[-1][0]), least, least * (1 + FLAT_WITHIN), **band)
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [_tokens(t) for t in tokens])
        axes.minorticks_off()
        axes.set_ylim(0, 1.4 * axes.get_ylim()[1])
        axes.set_xlabel("tokens")
        axes.set_ylabel(what)
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(framealpha=1, edgecolor="none", fontsize=8, loc="upper right")
    return figure


def _tokens(number: int) -> str:
    if number >= 1 << 20 and number % (1 << 20) == 0:
        return f"{number >> 20}M"
    return f"{number >> 10}k" if number % 1024 == 0 else str(number)


def _draw_training(records: Sequence[Record]):
    figure = _figure(11, 4.2, "The same model, trained with each layer: {}".format(records[0]["title"]))
    curves, speed, memory = figure.subplots(1, 3, width_ratios=(2.2, 1, 1))
    for record, color, style in zip(records, (_OURS_COLOR, _ACCENT, _GREY), ("-", "--", ":"), strict=False):
        steps = range(1, len(record["loss"]) + 1)
        curves.plot(steps, record["loss"], style, color=color, linewidth=1.4, label=record["layer"])
    curves.set_xlabel("step")
    curves.set_ylabel("training loss, bits per byte")
    curves.legend(frameon=False, fontsize=8)
    names = [record["layer"] for record in records]
    for axes, key, what in ((speed, "tokens_per_second", "tokens/s"), (memory, "peak_gib", "peak memory, GiB")):
        values = [record[key] for record in records]
        axes.set_title(what, fontsize=9)
        axes.set_xticks(range(len(names)), [name.replace("+", " +\n") for name in names], fontsize=8)
        for place, value in enumerate(values):
            if value is None:
                axes.text(place, 0, "not\nreported", ha="center", va="bottom", fontsize=8, color=_ACCENT)
                continue
            axes.bar(place, value, color=_OURS_COLOR if place == 0 else _PEER_COLOR, width=0.6)
            axes.text(place, value, f"{value:,.0f}" if value >= 1000 else f"{value:.1f}", ha="center", va="bottom")
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.set_ylim(0, 1.1 * max(filter(None, values), default=1.0))
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
    for axes in (curves, speed, memory):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_kernels(records: Sequence[Record]):
    """A panel for each configuration, as last measured: the kernels' times and each one's share of its ceiling."""
    seen = [record for record in records if record["kernels"]] or records
    latest = {_sizes(record): record for record in seen}

    def bars(record: Record) -> list[Bar]:
        least = _LEAST_SHARE * sum(row["us"] for row in record["kernels"])
        small = [row["us"] for row in record["kernels"] if row["us"] < least]
        rows = [(_kernel_label(row), row["us"], "ok") for row in record["kernels"] if row["us"] >= least]
        if small:
            rows.append((f"{len(small)} others", sum(small), "ok"))
        return rows or [("", None, "no kernels")]

    title = "Forward + backward by kernel, µs, and its share of what the device can do"
    return _panels(list(latest.values()), title, bars)


def _kernel_label(row: Record) -> str:
    name = row["name"].split("_mosaic_gpu")[0][:40]
    return f"{name}  {row['share_of_ceiling']:.0%}" if "share_of_ceiling" in row else name
