"""Results as tables: the same rows for the terminal and for the documents."""

from collections.abc import Iterator, Sequence
from typing import Any

from blaze_jax.benchmark.inputs import BOTH, FORWARD
from blaze_jax.benchmark.results_file import Record

type Row = Sequence[str]


def milliseconds(us: float) -> str:
    """Microseconds in milliseconds."""
    return f"{us / 1e3:.2f}"


def label(layer: Record) -> str:
    """A layer with its backend."""
    return f"{layer['layer']} ({layer['backend']})" if layer.get("backend") else layer["layer"]


def reason(status: str) -> str:
    """What is wrong with a layer, up to the details."""
    head = status.split(":")[0].split(" (")[0]
    return head if head != "not run" else "not run: too slow"


def _number(record: Record, name: str, missing: str) -> str:
    return f"{record[name]:,.0f}" if name in record else missing


def _comparison(record: Record) -> Iterator[Row]:
    yield "layer", "forward / both, ms", "spread", "TFLOP/s", "of dense", "saved / peak, MiB", "time to ours"
    for layer in record["layers"]:
        forward = f"{milliseconds(layer[FORWARD]['us'])} / " if FORWARD in layer else ""
        if layer["status"] != "ok":
            saved = f"{layer['saved_mib']:,.0f} / –" if "saved_mib" in layer else ""
            yield label(layer), forward + reason(layer["status"]), "", "", "", saved, ""
            continue
        both = layer[BOTH]
        yield (
            label(layer),
            forward + milliseconds(both["us"]),
            f"{both['spread']:.0%}",
            f"{both['tflops']:.3g}",
            f"{both['share_of_dense']:.0%}",
            f"{layer['saved_mib']:,.0f} / {_number(layer, 'peak_mib', '?')}",
            f"{both['ratio_to_ours']:.2f}×" if "ratio_to_ours" in both else "?",
        )


def _memory(record: Record) -> Iterator[Row]:
    yield "layer", "saved, MiB", "temporaries, MiB", "with results, MiB"
    for layer in record["layers"]:
        status = reason(layer["status"])
        planned = [_number(layer, name, "") for name in ("temporaries_mib", "peak_mib")]
        yield layer["layer"], _number(layer, "saved_mib", ""), *(planned if status == "ok" else (status, ""))


def _scaling(record: Record) -> Iterator[Row]:
    yield "tokens", "forward+backward, ms", "spread", "ns per token", "saved, MiB", "peak, MiB"
    yield (
        f"{record['sizes']['num_tokens']:,}",
        milliseconds(record["us"]),
        f"{record['spread']:.0%}",
        f"{record['ns_per_token']:.1f}",
        f"{record['saved_mib']:,.0f}",
        _number(record, "peak_mib", "?"),
    )


def _rounding(record: Record) -> Iterator[Row]:
    yield "routing", "experts, ms", "pairs", "rows of whole tiles", "TFLOP/s", "speed-up", "with router, ms", "speed-up"
    for name, row in record["routings"].items():
        yield (
            name,
            milliseconds(row["us"]),
            f"{row['pairs']:,}",
            f"{row['rows_of_tiles']:,}",
            f"{row['tflops']:.3g}",
            f"{row['speedup']:.2f}×",
            milliseconds(row["us_with_router"]),
            f"{row['speedup_with_router']:.2f}×",
        )


def _passes(record: Record) -> Iterator[Row]:
    yield "pass", "burst, ms (TFLOP/s)", "of dense", "back to back, ms (TFLOP/s)", "of dense"
    for name, timed in record["passes"].items():
        sustained = timed["sustained"]
        yield (
            name,
            f"{milliseconds(timed['us'])} ({timed['tflops']:.3g})",
            f"{timed['share_of_dense']:.0%}",
            f"{milliseconds(sustained['us'])} ({sustained['tflops']:.3g})",
            f"{sustained['tflops'] / record['ceilings']['sustained_tflops']:.0%}",
        )


def _kernels(record: Record) -> Iterator[Row]:
    yield "kernel of forward+backward", "launches", "µs", "TFLOP/s", "GB/s", "of its ceiling"
    for row in record["kernels"]:
        rates = ["", "", ""]
        if "tflops" in row:
            share = f"{row['share_of_ceiling']:.0%} ({row['ceiling']})"
            rates = [f"{row['tflops']:.1f}", f"{row['gbs']:.0f}", share]
        yield row["name"][:58], f"{row['launches']:.1f}", f"{row['us']:.1f}", *rates


def _calls(record: Record) -> Iterator[Row]:
    yield "call", "µs", "spread", "separate call, µs", "kernels"
    for name, row in record["calls"].items():
        times = f"{row['us']:.1f}", f"{row['spread']:.0%}", f"{row['wall_us']:.1f}"
        yield name, *times, str(row["kernels"])


def _compile_time(record: Record) -> Iterator[Row]:
    yield "layers", "kernels", "different", "trace, s (CPU)", "lower, s (CPU)", "compile, s (CPU)", "together, s (CPU)"
    for model in record["models"]:
        stages = [(model[f"{stage}_s"], model[f"{stage}_cpu_s"]) for stage in ("trace", "lower", "compile")]
        stages.append((sum(wall for wall, _ in stages), sum(cpu for _, cpu in stages)))
        times = (f"{wall:.1f} ({cpu:.1f})" for wall, cpu in stages)
        yield *(str(model[name]) for name in ("layers", "kernels", "different_kernels")), *times


_TABLES = {
    "compare": _comparison,
    "memory": _memory,
    "scaling": _scaling,
    "token_rounding": _rounding,
    "kernels": _passes,
    "routing": _calls,
    "compile_time": _compile_time,
}


def table(record: Record) -> list[Row]:
    """The header and the rows of a record."""
    return list(_TABLES[record["kind"]](record))


def terminal(record: Record) -> str:
    """A record as the terminal shows it: tables, what went wrong, and notes."""
    tables = [table(record), *([list(_kernels(record))] if record.get("kernels") else [])]
    lines = [line for rows in tables for line in _aligned(*rows)]
    return "\n".join(f"  {line}" for line in (*lines, *_ceilings(record), *dict.fromkeys(_notes(record))))


def _aligned(*rows: Row) -> Iterator[str]:
    """Columns as wide as they must be, the first one to the left."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    for row in rows:
        yield "  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]).rstrip()


def _ceilings(record: Record) -> Iterator[str]:
    """What the device reached, of each pass if they were timed apart."""
    found = record.get("ceilings", {})
    for rates in [found] if "gbs" in found else found.values():
        one_expert = rates.get("one_expert_tflops")
        sustained = rates.get("sustained_one_expert_tflops")
        longer = f" ({sustained:.4g} back to back)" if sustained else ""
        own = f", our product of one expert {one_expert:.4g} TFLOP/s{longer}" if one_expert else ""
        yield f"dense matmul {rates['tflops']:.4g} TFLOP/s{own}, copy {rates['gbs']:.0f} GB/s"


def _notes(value: Any) -> Iterator[str]:
    """What a record says of itself and its parts."""
    if isinstance(value, list):
        for part in value:
            yield from _notes(part)
    if isinstance(value, dict):
        if value.get("status", "ok") != "ok":
            yield f"{label(value)}: {value['status']}"
        if value.get("note"):
            yield f"note: {value['note']}"
        for part in value.values():
            yield from _notes(part)
