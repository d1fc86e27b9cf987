"""`--plot`: results as PNG files, drawn from what the JSON files hold and nothing else."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from blaze_jax.benchmark.inputs import BOTH
from blaze_jax.benchmark.results_file import RECORDED, Record, read_results
from blaze_jax.benchmark.scaling import FLAT_FROM, FLAT_WITHIN

OURS = "blaze_jax"
_OURS_COLOR, _PEER_COLOR, _PUBLISHED_COLOR, _GREY = "#2563a8", "#94a3b8", "#d6dbe3", "#6b7280"
_ACCENT = "#d1495b"
_COLUMNS = 3


class MissingLibraryError(Exception):
    """matplotlib is not installed."""


def draw(results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Draws every kind of result there is.

    Args:
      results: contents of results files.
      folder: where the PNG files go; made when missing.

    Returns:
      The files, in the order they were drawn.

    Raises:
      MissingLibraryError: matplotlib is not installed.
      ValueError: there is nothing to draw.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingLibraryError("--plot needs matplotlib: pip install 'blaze_jax[benchmark]'") from error
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
            figure.text(0.995, 0.004, _source(own[0][0]), ha="right", va="bottom", fontsize=7, color=_GREY)
            figure.savefig(folder / name)
            drawn.append(folder / name)
    if not drawn:
        kinds = sorted({record["kind"] for result in results for record in result["records"]})
        raise ValueError(f"there is no figure of these results: {', '.join(kinds) or 'none at all'}")
    return drawn


def sizes_label(sizes: dict[str, int]) -> str:
    """Sizes as a panel's title."""
    return (
        f"T={sizes['num_tokens']:,}  d={sizes['model_width']:,}  n={sizes['expert_width']:,}  "
        f"E={sizes['num_experts']}  K={sizes['experts_per_token']}"
    )


def _source(result: dict[str, Any]) -> str:
    e = result["environment"]
    driver = f", driver {e['driver']}, CUDA {e['cuda']}" if e["platform"] == "gpu" else ""
    return f"{e['device']}{driver}, jax {e['jax']}, {e['date']}"


def _figure(width: float, height: float, title: str):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.02, 1, 0.98))  # pyright: ignore[reportOptionalMemberAccess, reportCallIssue]
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    return figure


def _published(record: Record) -> list[Record]:
    """Other libraries' figures at the same sizes."""
    content = read_results(RECORDED / "published.json")
    return [r for r in content["records"] if r["kind"] == "published" and r["sizes"] == record["sizes"]]


def _draw_speed(records: Sequence[Record]):
    def tflops(sizes: dict[str, int], us: float) -> float:
        flops = 18 * sizes["num_tokens"] * sizes["experts_per_token"] * sizes["model_width"] * sizes["expert_width"]
        return flops / us / 1e6

    def bars(record: Record) -> list[tuple[str, float | None, str]]:
        rows = [(_label(r), r[BOTH]["tflops"] if BOTH in r else None, r["status"]) for r in record["layers"]]
        others = [(r["layer"], tflops(r["sizes"], r[BOTH]["us"]), "published") for r in _others(record)]
        return rows + others

    title = "Experts, forward + backward: TFLOP/s; dotted: a dense matmul in the same run; pale: figures of other runs"
    return _panels(records, title, bars, lambda r: r["ceilings"][BOTH]["tflops"])


def _draw_memory(records: Sequence[Record]):
    def bars(record: Record) -> list[tuple[str, float | None, str]]:
        rows = [
            (_label(r), r.get("saved_mib"), r["status"] if "saved_mib" not in r else "ok") for r in record["layers"]
        ]
        others = [(r["layer"], r["saved_mib"], "published") for r in _others(record) if "saved_mib" in r]
        return rows + others

    title = "Kept for the backward pass beside the layer's arguments: MiB; pale: figures of other runs"
    return _panels(records, title, bars, None)


def _draw_planned_memory(records: Sequence[Record]):
    def bars(record: Record) -> list[tuple[str, float | None, str]]:
        rows = [(r["layer"], r.get("peak_mib") if r["status"] == "ok" else None, r["status"]) for r in record["layers"]]
        others = [(r["layer"], r["peak_mib"], "published") for r in _others(record) if "peak_mib" in r]
        return rows + others

    title = "Peak of forward + backward beyond the arguments by XLA's plan for the H200, MiB; pale: other runs"
    return _panels(records, title, bars, None)


def _others(record: Record) -> list[Record]:
    """Published figures, but of a peer that was measured here."""
    measured = {r["layer"] for r in record["layers"] if BOTH in r}
    if record["dtype"] != "bfloat16":
        return []
    return [r for r in _published(record) if not any(r["layer"].startswith(name) for name in measured)]


def _label(row: Record) -> str:
    return row["layer"] if row["layer"] == OURS or not row["backend"] else f"{row['layer']} ({row['backend']})"


def _panels(records: Sequence[Record], title: str, bars: Callable, ceiling: Callable | None):
    """A panel of horizontal bars for each configuration."""
    from matplotlib.ticker import MaxNLocator

    columns = min(_COLUMNS, len(records))
    rows = -(-len(records) // columns)
    longest = max(len(bars(record)) for record in records)
    figure = _figure(5.2 * columns, 0.9 + rows * (0.55 + 0.27 * longest), title)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(records) :]:
        axes.set_axis_off()
    for record, axes in zip(records, grid.flat, strict=False):
        entries = bars(record)
        axes.set_title(sizes_label(record["sizes"]), fontsize=8.5, loc="left")
        most = max((value for _, value, _ in entries if value is not None), default=1.0)
        limit = max(most, ceiling(record) if ceiling else 0.0)
        for place, (name, value, status) in enumerate(entries):
            if value is None:
                axes.text(0.01 * limit, place, _short(status), va="center", fontsize=7, color=_ACCENT)
                continue
            color = _PUBLISHED_COLOR if status == "published" else _PEER_COLOR
            if name.startswith(OURS) or "kernels" in record:
                color = _OURS_COLOR
            axes.barh(place, value, color=color, height=0.72)
            axes.text(value + 0.012 * limit, place, _number(value), va="center", fontsize=7.5)
        if ceiling:
            axes.axvline(ceiling(record), color=_GREY, linestyle=":", linewidth=1.2)
        axes.set_yticks(range(len(entries)), [name for name, _, _ in entries], fontsize=7.5)
        axes.get_yticklabels()[0].set_fontweight("bold")
        axes.set_ylim(longest - 0.4, -0.6)  # bars of one height in all panels, the first on top
        axes.set_xlim(0, 1.16 * limit)
        axes.tick_params(axis="x", labelsize=7)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _short(status: str) -> str:
    """The reason up to its details."""
    head = status.split(":")[0].split(" (")[0]
    return head if head != "not run" else "not run: too slow"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def _draw_scaling(records: Sequence[Record]):
    figure = _figure(11, 4.4, "From few tokens to many: {}".format(_layer_label(records[0]["sizes"])))
    left, right = figure.subplots(1, 2)
    tokens = [r["sizes"]["num_tokens"] for r in records]
    published = [r for r in read_results(RECORDED / "published.json")["records"] if r["kind"] == "published_scaling"]
    shown = [r for r in published if tokens[0] <= r["num_tokens"] <= tokens[-1]]
    their_tokens = [r["num_tokens"] for r in shown]
    left.plot(tokens, [r["ns_per_token"] for r in records], "o-", color=_OURS_COLOR, label="blaze_jax")
    right.plot(tokens, [r["saved_bytes_per_token"] / 1024 for r in records], "o-", color=_OURS_COLOR, label="kept")
    peak = [(t, r["peak_bytes_per_token"] / 1024) for t, r in zip(tokens, records, strict=True) if "peak_mib" in r]
    if peak:
        right.plot(*zip(*peak, strict=True), "s--", color=_OURS_COLOR, alpha=0.55, label="peak, less weight gradients")
    if shown:
        label = "MoEBlaze's own figures (H100)"
        left.plot(their_tokens, [r["us"] * 1e3 / r["num_tokens"] for r in shown], "D", color=_ACCENT, label=label)
        memory = [r["mb"] * 1e6 / r["num_tokens"] / 1024 for r in shown]
        right.plot(their_tokens, memory, "D", color=_ACCENT, label=label)
    _band(left, records, "ns_per_token", 1.0)
    _band(right, records, "saved_bytes_per_token", 1024.0)
    for axes, what in ((left, "forward + backward, ns per token"), (right, "memory, KiB per token")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [_tokens(t) for t in tokens])
        axes.minorticks_off()
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
        axes.set_xlabel("tokens")
        axes.set_ylabel(what)
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    return figure


def _band(axes, records: Sequence[Record], name: str, unit: float) -> None:
    """The range that the values may keep to and still count as flat."""
    flat = [r for r in records if r["sizes"]["num_tokens"] >= FLAT_FROM]
    if len(flat) > 1:
        least = min(r[name] for r in flat) / unit
        ends = (flat[0]["sizes"]["num_tokens"], flat[-1]["sizes"]["num_tokens"])
        axes.fill_between(ends, least, least * (1 + FLAT_WITHIN), color=_OURS_COLOR, alpha=0.12, linewidth=0)


def _layer_label(sizes: dict[str, int]) -> str:
    return (
        f"d={sizes['model_width']}, n={sizes['expert_width']}, E={sizes['num_experts']}, K={sizes['experts_per_token']}"
    )


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
            axes.text(place, value, _number(value), ha="center", va="bottom", fontsize=8)
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.tick_params(axis="y", labelsize=7)
    for axes in (curves, speed, memory):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_kernels(records: Sequence[Record]):
    """A panel for each configuration: the kernels' times, the longest first, and each one's share of its ceiling."""
    records = [record for record in records if record["kernels"]] or list(records)

    def bars(record: Record) -> list[tuple[str, float | None, str]]:
        return [(_kernel_label(row), row["us"], "ok") for row in record["kernels"][:12]] or [("", None, "no kernels")]

    return _panels(records, "Where forward + backward spends its time: µs by kernel, share of its ceiling", bars, None)


def _kernel_label(row: Record) -> str:
    name = row["name"].removesuffix("_mosaic_gpu")[:32]
    return f"{name}  {row['share_of_ceiling']:.0%}" if "share_of_ceiling" in row else name
