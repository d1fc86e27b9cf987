"""Figures of records as PNG files, drawn from what the results files hold and nothing else; needs matplotlib.

`@_figure(kind, file)` stands before the function that draws all records of that kind; most are panels of bars.
"""

import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from PIL import Image

from blaze_jax.benchmark.results import OURS, Record, published, source, succeeded
from blaze_jax.benchmark.sizes import BOTH, Sizes
from blaze_jax.benchmark.tables import FLAT_FROM, FLAT_WITHIN, form_of_experts, label, merged, reason
from blaze_jax.offload import plan as offload

BLUE, PALE_BLUE, PALE, GREY, RED = "#2563a8", "#a8c1de", "#d6dbe3", "#94a3b8", "#d1495b"
_TEXT_GREY = "#6b7280"
_OUR_KERNELS = "moe_"
_COLUMNS = 2
_LEAST_SHARE = 0.005
"""Kernels that take less than that share of the time are drawn as one bar."""


class Bar(NamedTuple):
    """A bar, of pieces one after the other, and the text behind it.

    Attributes:
      name: stands at the left; bold if it is ours.
      pieces: lengths and colors; none for a bar that could not be measured.
      text: a number, or the reason why there is none.
    """

    name: str
    pieces: Sequence[tuple[float, str]]
    text: str

    @property
    def length(self) -> float:
        """All pieces together."""
        return sum(value for value, _ in self.pieces)


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
    drawn = []
    for name, figure in _figures(results):
        save(figure, folder / name)
        drawn.append(folder / name)
    if not drawn:
        kinds = sorted({record["kind"] for result in results for record in result["records"]})
        raise ValueError(f"there is no figure of these results: {', '.join(kinds) or 'none at all'}")
    return drawn


def draw_one(result: dict[str, Any], path: Path) -> None:
    """Draws the first figure of a results file's content as a PNG file."""
    save(next(_figures([result]))[1], path)


type Drawer = Callable[[Sequence[Record]], Figure]

_DRAWERS: list[tuple[str, str, Drawer]] = []
"""A kind of record, the name of a file, and what draws it."""


def _figure(kind: str, file: str) -> Callable[[Drawer], Drawer]:
    def register(drawer: Drawer) -> Drawer:
        _DRAWERS.append((kind, file, drawer))
        return drawer

    return register


def _figures(results: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Figure]]:
    """The figures and the names of their files."""
    for kind, name, drawer in _DRAWERS:
        if found := [(record, result) for result in results for record in result["records"] if record["kind"] == kind]:
            figure = drawer([record for record, _ in found])
            foot = source(*(result for _, result in found))
            figure.text(0.995, 0.004, foot, ha="right", va="bottom", fontsize=8, color=_TEXT_GREY)
            yield name, figure


def new_figure(width: float, height: float, title: str) -> Figure:
    """An empty figure with room for its source at the foot."""
    figure = Figure(figsize=(width, height), dpi=144, layout="constrained")
    foot = 0.2 / height
    layout = {"rect": (0, foot, 1, 1 - foot), "h_pad": 0.08, "hspace": 0.05}
    figure.get_layout_engine().set(**layout)  # pyright: ignore[reportOptionalMemberAccess, reportCallIssue]
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG file of few colors, a third the size of matplotlib's own; makes its folder."""
    drawn = io.BytesIO()
    figure.savefig(drawn)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(drawn).convert("RGB").quantize(128).save(path, optimize=True)


def draw_bars(axes, title: str, bars: Sequence[Bar], *, ceiling: float = 0.0, rows: int = 0) -> None:
    """Draws horizontal bars, the first on top, with room for `rows` of them, and a dotted line at a dense product."""
    limit = max([bar.length for bar in bars] + [ceiling]) or 1.0
    lowest = max(rows, len(bars)) - 0.4
    axes.set_title(title, fontsize=9.5, loc="left")
    if ceiling:
        axes.axvline(ceiling, color=_TEXT_GREY, linestyle=":", linewidth=1.2)
        text = f"dense matmul {number(ceiling)}"
        axes.text(ceiling, lowest, text, ha="center", va="top", fontsize=8, color=_TEXT_GREY)
    box = {"facecolor": "white", "linewidth": 0, "pad": 1.5}  # the dotted line does not cross the text
    for place, bar in enumerate(bars):
        left = 0.0
        for value, color in bar.pieces:
            axes.barh(place, value, left=left, color=color, height=0.72)
            left += value
        color = "black" if bar.pieces else RED
        axes.text(left + 0.012 * limit, place, bar.text, va="center", fontsize=8.5, color=color, bbox=box)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars], fontsize=8.5)
    for tick in axes.get_yticklabels():
        tick.set_fontweight("bold" if tick.get_text().startswith(OURS) else "normal")
    axes.set_xticks([])
    axes.set_ylim(lowest, -0.6)
    axes.set_xlim(0, 1.16 * limit)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def number(value: float) -> str:
    """A length in few digits."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def one_piece(name: str, value: float | None, color: str, missing: str = "", text=number) -> Bar:
    """A bar of one color, or the reason why its value is missing."""
    return Bar(name, [], missing) if value is None else Bar(name, [(value, color)], text(value))


def _panels(title: str, panels: Mapping[str, Sequence[Bar]], ceilings: Sequence[float] = ()) -> Figure:
    """A panel of bars for each configuration, all bars of one height."""
    columns, entries = min(_COLUMNS, len(panels)), list(panels.items())
    heights = [max(len(bars) for _, bars in entries[i : i + columns]) for i in range(0, len(entries), columns)]
    figure = new_figure(5.4 * columns, 0.7 + sum(0.5 + 0.24 * height for height in heights), title)
    grid = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights)
    for axes in grid.flat[len(entries) :]:
        axes.set_axis_off()
    for i, ((name, bars), axes) in enumerate(zip(entries, grid.flat, strict=False)):
        draw_bars(axes, name, bars, ceiling=ceilings[i] if ceilings else 0.0, rows=heights[i // columns])
    return figure


def _title(sizes: Sizes) -> str:
    return "T={:,}  d={:,}  n={:,}  E={}  K={}".format(*sizes)


def _of_layers(title: str, records: Sequence[Record], bar: Callable[[Sizes, Record], tuple], ceilings=()) -> Figure:
    """A panel for each configuration with a bar for each layer, of a length and pale or not as `bar` says."""
    panels = {}
    for sizes, layers in merged(records).items():
        bars = panels[_title(sizes)] = []
        for row in layers.values():
            length, pale = bar(sizes, row)
            name = OURS if row["layer"] == OURS else label(row)
            own, other = (PALE_BLUE, PALE) if pale else (BLUE, GREY)
            if length is not None or not succeeded(row):
                bars.append(one_piece(name, length, own if name.startswith(OURS) else other, reason(row["status"])))
    return _panels(title, panels, ceilings)


@_figure("compare", "speed.png")
def _speed(records: Sequence[Record]) -> Figure:
    def tflops(sizes: Sizes, row: Record) -> tuple[float | None, bool]:
        timed = row.get(BOTH, {})
        run = timed.get("sustained", timed)
        return 3 * sizes.forward_flops / run["us"] / 1e6 if "us" in run else None, run is timed

    dense = {Sizes(**r["sizes"]): r.get("ceilings", {}).get(BOTH, {}).get("sustained_tflops", 0.0) for r in records}
    title = "Forward + backward, TFLOP/s: back to back, in turns (pale: single runs, each on an emptied L2 cache)"
    return _of_layers(title, records, tflops, list(dense.values()))


@_figure("compare", "memory.png")
def _kept(records: Sequence[Record]) -> Figure:
    title = "Kept for the backward pass in addition to the arguments, MiB (pale: figures of other runs)"
    measured = [record["sizes"] for record in records]
    others = [r | {"layers": [r | {"status": "ok"}]} for r in published("published") if r["sizes"] in measured]
    return _of_layers(title, [*records, *others], lambda _, row: (row.get("saved_mib"), "kind" in row))


@_figure("memory", "planned_memory.png")
def _planned(records: Sequence[Record]) -> Figure:
    title = "Peak of forward + backward beyond the arguments, by XLA's plan, MiB"
    return _of_layers(title, records, lambda _, row: (row.get("peak_mib") if succeeded(row) else None, False))


@_figure("scaling", "scaling.png")
def _scaling(records: Sequence[Record]) -> Figure:
    layer = "d={model_width}, n={expert_width}, E={num_experts}, K={experts_per_token}".format(**records[0]["sizes"])
    figure = new_figure(11, 4.4, f"From few tokens to many: {layer}")
    tokens = [r["sizes"]["num_tokens"] for r in records]
    shown = [r for r in published("published_scaling") if tokens[0] <= r["num_tokens"] <= tokens[-1]]
    times = [r["us"] * 1e3 / r["num_tokens"] for r in shown]
    memory = [r["mb"] * 1e6 / r["num_tokens"] / 1024 for r in shown]
    halves = (
        ("ns_per_token", 1.0, OURS, "forward + backward, ns per token", times),
        ("saved_bytes_per_token", 1024.0, f"{OURS}, kept", "memory, KiB per token", memory),
    )
    for axes, (name, unit, ours, what, theirs) in zip(figure.subplots(1, 2), halves, strict=True):
        values = [r[name] / unit for r in records]
        axes.plot(tokens, values, "o-", color=BLUE, label=ours)
        if theirs is memory and all("peak_mib" in r for r in records):
            peak = [r["peak_bytes_per_token"] / unit for r in records]
            axes.plot(tokens, peak, "s--", color=BLUE, alpha=0.55, label=f"{OURS}, peak less weight gradients")
        if shown:
            axes.plot([r["num_tokens"] for r in shown], theirs, "D", color=RED, label=shown[0]["layer"])
        flat = [(t, value) for t, value in zip(tokens, values, strict=True) if t >= FLAT_FROM]
        if len(flat) > 1:
            least = min(value for _, value in flat)
            band = {"color": BLUE, "alpha": 0.12, "linewidth": 0, "label": f"at most {FLAT_WITHIN:.0%} above the least"}
            axes.fill_between((flat[0][0], flat[-1][0]), least, least * (1 + FLAT_WITHIN), **band)
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [f"{t >> 20}M" if t % 2**20 == 0 else f"{t / 1024:g}k" for t in tokens])
        axes.minorticks_off()
        axes.set(ylim=(0, 1.4 * axes.get_ylim()[1]), xlabel="tokens", ylabel=what)
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(framealpha=1, edgecolor="none", fontsize=8, loc="upper right")
    return figure


@_figure("generation", "generation.png")
def _generation(records: Sequence[Record]) -> Figure:
    """The speed that is planned for each memory of a GPU as a line, and what was measured as a point."""
    models: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        if "plan" in record:
            of_model = models.setdefault(f"{record['title']}, {record['batch']} sequences", {})
            of_model.setdefault(form_of_experts(record), []).append(record)
    columns = min(len(models), 2)
    rows = -(-len(models) // columns)
    about = "Tokens a second after the prompts, by the GPU memory that may be used"
    figure = new_figure(5.4 * columns, 3.8 * rows, about)
    panels = [figure.add_subplot(rows, columns, at + 1) for at in range(len(models))]
    for (title, of_model), axes in zip(models.items(), panels, strict=True):
        for (form, measured), color in zip(of_model.items(), (BLUE, RED, GREY), strict=False):
            axes.plot(*_planned_speed(measured[0]), color=color, label=f"{form}, planned")
            gb, speed = zip(*((r["gpu_bytes"] / 1e9, r["decode_tokens_per_second"]) for r in measured), strict=True)
            axes.plot(gb, speed, "o", color=color, label=f"{form}, measured")
        axes.set_title(title, fontsize=9.5, loc="left")
        axes.set(xlabel="GB", ylabel="tokens/s", yscale="log")
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    return figure


def _planned_speed(record: Record) -> tuple[list[int], list[float]]:
    """GB that may be used, from the least to what holds all layers, and the tokens a second that are planned."""
    sizes, rates = offload.Sizes(**record["plan"]["sizes"]), offload.Rates(**record["plan"]["rates"])
    memory, speed = [], []
    for gb in itertools.count(1):
        try:
            plan = offload.make_plan(sizes, rates, gb * 10**9, record["batch"], record["batch"] * record["prompt"])
        except offload.GpuMemoryError:
            continue
        memory.append(gb)
        speed.append(plan.decode_tokens_per_second)
        if not plan.streamed:
            break  # as with memory enough
    return memory, speed


@_figure("training", "training.png")
def _training(records: Sequence[Record]) -> Figure:
    figure = new_figure(11, 4.2, "The same model, trained with each layer: {}".format(records[0]["title"]))
    curves, *others = figure.subplots(1, 3, width_ratios=(1.8, 1, 1))
    by_time = any(record["layer"] == "dense-twin" for record in records)  # which takes other steps in the same time
    for record, color, style in zip(records, (BLUE, RED, GREY), ("-", "--", ":"), strict=False):
        length = record["step_seconds"] if by_time else 1
        steps = [length * step for step in range(1, len(record["loss"]) + 1)]
        curves.plot(steps, record["loss"], style, color=color, linewidth=1.4, label=record["layer"])
    curves.set(xlabel="seconds" if by_time else "step", ylabel="training loss, bits per byte")
    curves.legend(frameon=False, fontsize=8)
    curves.spines[["top", "right"]].set_visible(False)
    halves = ("tokens_per_second", "tokens/s", "{:,.0f}"), ("peak_gib", "peak memory, GiB", "{:.1f}")
    for axes, (key, what, text) in zip(others, halves, strict=True):
        bars = []
        for record in records:
            color = BLUE if record["layer"] == OURS else GREY
            bars.append(one_piece(record["layer"], record[key], color, "not reported", text.format))
        draw_bars(axes, what, bars)
    return figure


@_figure("kernels", "kernels.png")
def _kernels(records: Sequence[Record]) -> Figure:
    """A panel for each configuration, as last measured: the kernels' times and each one's share of its ceiling."""
    panels = {}
    for record in [record for record in records if record["kernels"]] or records:
        least = _LEAST_SHARE * sum(row["us"] for row in record["kernels"])
        small = [row["us"] for row in record["kernels"] if row["us"] < least]
        times = [(_kernel_label(row), row["us"]) for row in record["kernels"] if row["us"] >= least]
        times += [(f"{len(small)} others", sum(small))] if small else []
        bars = [one_piece(name, us, BLUE if name.startswith(_OUR_KERNELS) else GREY) for name, us in times]
        panels[_title(Sizes(**record["sizes"]))] = bars or [Bar("", [], "no kernels")]
    return _panels("Forward + backward by kernel, µs, and its share of what the device can do", panels)


def _kernel_label(row: Record) -> str:
    name = row["name"].split("_mosaic_gpu")[0][:40]
    return f"{name}  {row['share_of_ceiling']:.0%}" if "share_of_ceiling" in row else name


@_figure("step_profile", "step.png")
def _step(records: Sequence[Record]) -> Figure:
    """The parts of a training step, and in each the least it could take."""
    panels = {}
    for record in records:
        name = "{preset}, {batch_size} × {sequence_length:,} a step: {tokens_per_second:,.0f} tokens/s".format(**record)
        bars = panels[name] = []
        for row in record["parts"]:
            if row["ms"] or row["bound_ms"]:
                least = min(row["ms"], row["bound_ms"])
                bars.append(Bar(row["part"], [(least, BLUE), (row["ms"] - least, GREY)], f"{row['ms']:.1f}"))
        bars.append(one_piece("gaps", record["gaps_ms"], RED, text="{:.1f}".format))
    return _panels("A training step by its parts, ms; blue: the least it could take", panels)
