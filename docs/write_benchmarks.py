"""`python -m docs.write_benchmarks`: writes what was measured into the documents, from the files in docs/results."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blaze_jax.benchmark.plots import draw
from blaze_jax.benchmark.results import Record, read_results, source, succeeded
from blaze_jax.benchmark.sizes import GPU_SIZES, PASSES
from blaze_jax.benchmark.studies import Routed
from blaze_jax.benchmark.tables import PARTS, Row, both_ms, cell, flatness, label, markdown, merged, table

START = "<!-- results: {}, written by `python -m docs.write_benchmarks`, do not edit -->"
END = "<!-- end of results -->"

DOCS = Path(__file__).parent
RESULTS = DOCS / "results"
README = DOCS.parent / "README.md"

PICTURED = "H200"
"""The GPU of figures and of the README's table; the tables of the documents are of every GPU, and so is the figure of
generation, whose plans are for a certain GPU each."""

type Result = dict[str, Any]


def main() -> None:
    """Draws the figures and writes the tables of all recorded results."""
    results = recorded_results()
    for file in draw(of_pictured(results), RESULTS):
        print(f"drew {file}")
    for path in (DOCS / "benchmarks.md", DOCS / "offload.md", README):
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
        return summary(of_pictured(results))
    lines: list[str] = []
    for result in results:
        if records := of_kind(kind, [result]):
            lines += markdown(_by_size(records, kind))
            lines += ["", flatness(records)] if kind == "scaling" else []
            lines += ["", f"{source(result)}: `{result['command']}`", ""]
    if kind == "compare":
        lines += _sizes_left_out(of_kind(kind, results))
    return "\n".join(lines).strip("\n")


def of_kind(kind: str, results: Sequence[Result]) -> list[Record]:
    """All records of a kind, or all that hold a part which a table of that kind shows."""
    records = (record for result in results for record in result["records"])
    return [record for record in records if record["kind"] == kind or record.get(PARTS.get(kind, ""))]


def of_pictured(results: Sequence[Result]) -> list[Result]:
    """The results of one GPU, so that no figure or table mixes those of several; and all of generation."""

    def pictured(result: Result) -> bool:
        return PICTURED.lower() in result["environment"]["device"].lower() or bool(of_kind("generation", [result]))

    return [result for result in results if pictured(result)]


def summary(results: Sequence[Result]) -> str:
    """The first of the default sizes, a row for each layer: what a reader should know first."""
    sizes = GPU_SIZES[0]
    shown = [r for r in results if any(record["sizes"] == sizes._asdict() for record in of_kind("compare", [r]))]
    pair = "forward / with backward, ms"
    rows: list[Row] = [("layer", f"back to back: {pair}", "to ours", f"single runs: {pair}", "to ours", "kept, MiB")]
    for layer in merged(of_kind("compare", shown))[sizes].values():
        if succeeded(layer):
            single = [layer[name] for name in PASSES]
            long_runs = [timed.get("sustained", {}) for timed in single]
            cells = [(both_ms(runs), cell(runs[1], "ratio_to_ours", ".1f", "×")) for runs in (long_runs, single)]
            rows.append((label(layer), *cells[0], *cells[1], cell(layer, "saved_mib", ",.0f")))
    about = (
        f"{sizes[0]:,} tokens of width {sizes[1]:,}, {sizes[4]} of {sizes[3]} experts of width {sizes[2]:,}, bfloat16"
    )
    return "\n".join([*markdown(rows), "", f"{about}; {source(*shown)}."])


def _name(sizes: dict[str, int]) -> str:
    return ", ".join(str(size) for size in sizes.values())


def _what(record: Record) -> tuple[str, str]:
    """The head of a column, and what was measured: a number of tokens, sizes, or a model."""
    if record["kind"] == "scaling":
        return "tokens", f"{record['sizes']['num_tokens']:,}"
    if record["kind"] == "routing":
        return "T, E, K", _name({name: record[name] for name in Routed._fields})
    return ("T, d, n, E, K", _name(record["sizes"])) if "sizes" in record else ("model", record["title"])


def _by_size(records: list[Record], kind: str) -> list[Row]:
    """The terminal's tables one below the other, each with what it is about."""
    header = (_what(records[0])[0], *table(records[0], kind)[0])
    shown = ((_what(record)[1], table(record, kind)[1:]) for record in records)
    return [header, *((what if i == 0 else "", *row) for what, rows in shown for i, row in enumerate(rows))]


def _sizes_left_out(compared: Sequence[Record]) -> list[str]:
    """Which of the default sizes no comparison has, if they are of default sizes."""
    measured, defaults = [record["sizes"] for record in compared], [sizes._asdict() for sizes in GPU_SIZES]
    missing = [_name(sizes) for sizes in defaults if sizes not in measured]
    if not missing or not any(sizes in defaults for sizes in measured):
        return []
    return [f"Default sizes not compared: {'; '.join(missing)}."]


if __name__ == "__main__":
    main()
