"""`python -m docs.write_benchmarks`: writes what was measured into the documents, from the files in docs/results."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blaze_jax.benchmark.inputs import BOTH
from blaze_jax.benchmark.plots import draw, published
from blaze_jax.benchmark.results import Record, read_results, source
from blaze_jax.benchmark.sizes import GPU_SIZES
from blaze_jax.benchmark.studies import DECIDERS
from blaze_jax.benchmark.tables import FLAT_FROM, flatness, label, milliseconds, table

START = "<!-- results: {}, written by `python -m docs.write_benchmarks`, do not edit -->"
END = "<!-- end of results -->"

DOCS = Path(__file__).parent
RESULTS = DOCS / "results"
README = DOCS.parent / "README.md"

type Result = dict[str, Any]


def main() -> None:
    """Draws the figures and writes the tables of all recorded results."""
    results = recorded_results()
    for file in draw(results, RESULTS):
        print(f"drew {file}")
    for path in (DOCS / "benchmarks.md", README):
        path.write_text(written(path.read_text(encoding="utf-8"), results), encoding="utf-8")


def recorded_results() -> list[Result]:
    """The contents of all files of results, in the order of their names."""
    return [read_results(path) for path in sorted(RESULTS.glob("*.json"))]


def written(page: str, results: Sequence[Result]) -> str:
    """The page, with what `render` makes of the results between the marks that name a kind of them."""
    blocks = re.compile(f"({START.format('(.*?)')}\n\n).*?(\n\n{END})", re.DOTALL)
    return blocks.sub(lambda found: f"{found[1]}{render(found[2], results)}{found[3]}", page)


def render(kind: str, results: Sequence[Result]) -> str:
    """The tables of a kind of results, each with where and how they were taken; or the "summary" of all."""
    if kind == "summary":
        return summary(results)
    lines: list[str] = []
    for result in results:
        records = [r for r in result["records"] if r["kind"] == kind]
        if records:
            lines += [*SECTIONS.get(kind, _by_size)(records), "", f"{source(result)}: `{result['command']}`", ""]
    if kind == "compare":
        lines += _sizes_left_out(results)
    return "\n".join(lines).strip("\n")


def summary(results: Sequence[Result]) -> str:
    """The first size that was compared, a row for each layer: what a reader should know first."""
    result = next(r for r in results if any(record["kind"] == "compare" for record in r["records"]))
    record = next(r for r in result["records"] if r["kind"] == "compare")
    layers = [layer for layer in record["layers"] if layer["status"] == "ok"]
    rows = [
        [
            label(layer),
            f"{milliseconds(layer['forward']['us'])} / {milliseconds(layer[BOTH]['us'])}",
            f"{layer[BOTH]['ratio_to_ours']:.1f}×",
            f"{layer['saved_mib']:,.0f}",
        ]
        for layer in layers
    ]
    header = ("layer", "forward / with backward, ms", "time to ours", "kept for the backward pass, MiB")
    sizes = "{num_tokens:,} tokens of width {model_width:,}, {experts_per_token} of {num_experts} experts of width "
    sizes = (sizes + "{expert_width:,}").format(**record["sizes"])
    return "\n".join([*_markdown(header, rows), "", f"{sizes}, {record['dtype']}; {source(result)}."])


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def _name(sizes: dict[str, int]) -> str:
    return ", ".join(str(size) for size in sizes.values())


def _what(record: Record) -> tuple[str, str]:
    """The head of a column, and what was measured: sizes, or a model."""
    return ("T, d, n, E, K", _name(record["sizes"])) if "sizes" in record else ("model", record["title"])


def _by_size(records: list[Record]) -> list[str]:
    """The terminal's tables one below the other, each with what it is about."""
    header, *_ = table(records[0])
    rows = [(_what(r)[1] if i == 0 else "", *row) for r in records for i, row in enumerate(table(r)[1:])]
    return _markdown((_what(records[0])[0], *header), rows)


def _sizes_left_out(results: Sequence[Result]) -> list[str]:
    """Which of the default sizes no comparison has, if they are of default sizes."""
    measured = [record["sizes"] for result in results for record in result["records"] if record["kind"] == "compare"]
    defaults = [sizes._asdict() for sizes in GPU_SIZES]
    missing = [_name(sizes) for sizes in defaults if sizes not in measured]
    if not missing or not any(sizes in defaults for sizes in measured):
        return []
    return [f"Default sizes not compared: {'; '.join(missing)}."]


def _scaling(records: list[Record]) -> list[str]:
    theirs = {r["num_tokens"]: (milliseconds(r["us"]), f"{r['mb']:,.0f}") for r in published("published_scaling")}
    header, *_ = table(records[0])
    rows = [(*table(r)[1], *theirs.get(r["sizes"]["num_tokens"], ("", ""))) for r in records]
    time, memory = (flatness(records, name) for name in ("ns_per_token", "saved_bytes_per_token"))
    lines = _markdown((*header, "MoEBlaze's slides, ms", "memory, MB"), rows)
    if time is not None and memory is not None:
        varies = f"time per token varies by {time:.1%}, saved memory per token by {memory:.1%}"
        lines += ["", f"From {FLAT_FROM:,} tokens on, {varies}."]
    return lines


def _routing(records: list[Record]) -> list[str]:
    both = list(records[0]["calls"])[:2]  # ours and XLA's, from logits to indices; parts of them follow
    walls = [name for name in both if all("wall_us" in r["calls"][name] for r in records)]
    deciders = [name for name in DECIDERS if all(name in r["calls"] for r in records)]
    rows = [
        [
            f"{r['num_tokens']:,}, {r['num_experts']}, {r['experts_per_token']}",
            *(f"{r['calls'][name]['us']:.1f}" for name in both),
            f"{r['speedup']:.1f}×",
            *(f"{r['calls'][name]['wall_us']:.0f}" for name in walls),
            *(f"{r['calls'][name]['us']:.1f}" for name in deciders),
        ]
        for r in records
    ]
    header = (
        "T, E, K",
        *(f"{name}, µs" for name in both),
        "faster by",
        *(f"{name}, separate call, µs" for name in walls),
        *(f"ours, {name}, µs" for name in deciders),
    )
    return _markdown(header, rows)


SECTIONS = {"scaling": _scaling, "routing": _routing}
"""Tables that are not the terminal's."""


if __name__ == "__main__":
    main()
