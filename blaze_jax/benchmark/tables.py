"""Records as tables: the same rows for the terminal and for the documents.

`@_rows(kind, header)` stands before the function that makes the rows of a record of that kind.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from blaze_jax.benchmark.results import Record, published, succeeded
from blaze_jax.benchmark.sizes import PASSES, Sizes

type Row = Sequence[str]

FLAT_FROM = 65536
FLAT_WITHIN = 0.15
"""From that many tokens on, time and memory per token should stay within that share of each other."""

_SHOWN_KERNELS, _LEAST_SHARE = 4, 0.005
"""How many kernels of a part of a training step are shown, and the least share of the step that one of them takes."""


def milliseconds(us: float) -> str:
    """Microseconds in milliseconds."""
    return f"{us / 1e3:.2f}"


def label(layer: Record) -> str:
    """A layer's name with its backend."""
    return f"{layer['layer']} ({layer['backend']})" if layer.get("backend") else layer["layer"]


def reason(status: str) -> str:
    """Says what is wrong with a layer, up to the details."""
    head = status.split(":")[0].split(" (")[0]
    return head if head != "not run" else "not run: too slow"


def table(record: Record, kind: str | None = None) -> list[Row]:
    """The header and the rows of a record, or of another kind of table that it holds."""
    header, rows = _TABLES[kind or record["kind"]]
    return [header, *rows(record)]


def terminal(record: Record) -> str:
    """A record as the terminal shows it: tables, what went wrong, and notes."""
    if not succeeded(record):
        return f"  {record['status']}"
    tables = [table(record), *(table(record, kind) for kind, held in PARTS.items() if record.get(held))]
    lines = [line for rows in tables for line in _aligned(*rows)]
    lines += _step_summary(record) if record["kind"] == "step_profile" else []
    return "\n".join(f"  {line}" for line in (*lines, *_ceilings(record), *dict.fromkeys(_notes(record))))


def markdown(rows: Sequence[Row]) -> list[str]:
    """The lines of a table in a document; the first row is its header."""
    return [f"| {' | '.join(cells)} |" for cells in (rows[0], ["---"] * len(rows[0]), *rows[1:])]


def merged(records: Sequence[Record]) -> dict[Sizes, dict[str, Record]]:
    """The layers of all records by sizes and name, each pass as last measured in single runs and back to back."""
    found: dict[Sizes, dict[str, Record]] = {}
    for record in records:
        layers = found.setdefault(Sizes(**record["sizes"]), {})
        for row in record["layers"]:
            old = layers.get(row["layer"], {})
            both = {name: old.get(name, {}) | row.get(name, {}) for name in PASSES}
            layers[row["layer"]] = old | row | {name: timed for name, timed in both.items() if timed}
    return found


def flatness(records: Sequence[Record]) -> str:
    """Says how much time and memory per token vary where they should not grow; nothing for less than two records."""
    said = []
    for what, name in (("time", "ns"), ("saved memory", "saved_bytes"), ("peak memory", "peak_bytes")):
        many = [r for r in records if r["sizes"]["num_tokens"] >= FLAT_FROM]
        values = [r[f"{name}_per_token"] for r in many if f"{name}_per_token" in r]
        if len(values) > 1:
            varies = max(values) / min(values) - 1
            grows = any(value > (1 + FLAT_WITHIN) * min(values[: i + 1]) for i, value in enumerate(values))
            verdict = "grows" if grows else "flat" if varies <= FLAT_WITHIN else "falls"
            said.append(f"{what} per token varies by {varies:.1%} ({verdict})")
    return f"From {FLAT_FROM:,} tokens on, {', '.join(said)}; up to {FLAT_WITHIN:.0%} counts as flat." if said else ""


PARTS = {"kernel": "kernels", "alone": "alone", "precision_kernel": "by_kernel"}
"""Tables in addition to a record's own, by their kind, and what in the record they show."""

_TABLES: dict[str, tuple[Row, Callable[[Record], Iterator[Row]]]] = {}
"""By kind, the header and what makes the rows."""


def _rows(kind: str, header: str) -> Callable:
    def register(rows: Callable[[Record], Iterator[Row]]) -> Callable:
        _TABLES[kind] = header.split(" | "), rows
        return rows

    return register


def cell(record: Record, name: str, form: str, unit: str = "") -> str:
    """A value as text; nothing for one that is missing."""
    return "" if record.get(name) is None else f"{record[name]:{form}}{unit}"


def both_ms(passes: Sequence[Record]) -> str:
    """Milliseconds of the passes that have a time, one behind the other."""
    return " / ".join(milliseconds(timed["us"]) for timed in passes if "us" in timed)


@_rows(
    "compare",
    "layer | single run: forward / both, ms | spread | TFLOP/s | of dense | to ours"
    " | back to back: forward / both, ms | TFLOP/s | MHz | W | to ours | saved / peak, MiB",
)
def _comparison(record: Record) -> Iterator[Row]:
    for layer in record["layers"]:
        passes = [layer.get(name, {}) for name in PASSES]
        single, memory = both_ms(passes), "saved_mib" in layer or "peak_mib" in layer
        if not succeeded(layer):
            single = " / ".join([*[milliseconds(p["us"]) for p in passes if "us" in p], reason(layer["status"])])
        both = passes[1]
        cells = single, cell(both, "spread", ".0%"), cell(both, "tflops", ".3g"), cell(both, "share_of_dense", ".0%")
        runs = [timed.get("sustained", {}) for timed in passes]
        rates = (cell(runs[1], name, form) for name, form in (("tflops", ".3g"), ("mhz", ".0f"), ("watts", ".0f")))
        kept = f"{cell(layer, 'saved_mib', ',.0f') or '?'} / {cell(layer, 'peak_mib', ',.0f') or '–'}" if memory else ""
        ratios = [cell(timed, "ratio_to_ours", ".2f", "×") for timed in (both, runs[1])]
        yield label(layer), *cells, ratios[0], both_ms(runs), *rates, ratios[1], kept


@_rows("memory", "layer | saved, MiB | temporaries, MiB | with results, MiB")
def _memory(record: Record) -> Iterator[Row]:
    for layer in record["layers"]:
        planned = [cell(layer, name, ",.0f") for name in ("temporaries_mib", "peak_mib")]
        planned = planned if succeeded(layer) else [reason(layer["status"]), ""]
        yield label(layer), cell(layer, "saved_mib", ",.0f"), *planned


@_rows(
    "scaling",
    "forward+backward, ms | spread | ns per token | saved, MiB | peak, MiB | MoEBlaze's slides, ms | memory, MB",
)
def _scaling(record: Record) -> Iterator[Row]:
    time = milliseconds(record["us"]), f"{record['spread']:.0%}", f"{record['ns_per_token']:.1f}"
    memory = cell(record, "saved_mib", ",.0f"), cell(record, "peak_mib", ",.0f") or "?"
    theirs = [
        (milliseconds(r["us"]), cell(r, "mb", ",.0f"))
        for r in published("published_scaling", num_tokens=record["sizes"]["num_tokens"])
    ]
    yield *time, *memory, *(theirs or [("", "")])[0]


@_rows("few_tokens", "experts in use | their weights, MB | forward, µs | a copy of them, µs | ratio")
def _few_tokens(record: Record) -> Iterator[Row]:
    times = f"{record['us']:.1f}", f"{record['floor_us']:.1f}", f"{record['times_floor']:.2f}×"
    yield str(record["experts_used"]), f"{record['bytes'] / 1e6:.0f}", *times


@_rows("bases", "base | MB | forward, µs | of plain | with the gradient of tokens, µs | of plain")
def _bases(record: Record) -> Iterator[Row]:
    for name, row in record["bases"].items():
        forward, both = ((f"{row[f'{p}_us']:.1f}", f"{row[f'{p}_of_plain']:.2f}×") for p in ("forward", "both"))
        yield name, f"{row['bytes'] / 1e6:,.0f}", *forward, *both


@_rows(
    "token_rounding",
    "routing | experts, ms | pairs | rows of whole tiles | TFLOP/s | speed-up | with router, ms | speed-up",
)
def _rounding(record: Record) -> Iterator[Row]:
    for name, row in record["routings"].items():
        sizes = cell(row, "pairs", ",.0f"), cell(row, "rows_of_tiles", ",.0f"), f"{row['tflops']:.3g}"
        routed = milliseconds(row["us_with_router"]), f"{row['speedup_with_router']:.2f}×"
        yield name, milliseconds(row["us"]), *sizes, f"{row['speedup']:.2f}×", *routed


@_rows("kernels", "pass | burst, ms (TFLOP/s) | of dense | back to back, ms (TFLOP/s) | of dense")
def _passes(record: Record) -> Iterator[Row]:
    for name, timed in record["passes"].items():
        cells = []
        for run, dense in ((timed, "tflops"), (timed["sustained"], "sustained_tflops")):
            share = run["tflops"] / record["ceilings"][dense]
            cells += [f"{milliseconds(run['us'])} ({run['tflops']:.3g})", f"{share:.0%}"]
        yield name, *cells


@_rows(
    "generation",
    "sequences × prompt | may be used, GB | experts in | layers from the host | prompts, tokens/s (planned)"
    " | after them, tokens/s (planned) | peak, GiB",
)
def _generation(record: Record) -> Iterator[Row]:
    rates = []
    for name in ("prefill_tokens_per_second", "decode_tokens_per_second"):
        planned = cell(record, f"planned_{name}", ",.0f")
        rates.append(cell(record, name, ",.0f") + (f" ({planned})" if planned else ""))
    chunks = record.get("chunks", 1)
    given = f"{record['gpu_bytes'] / 1e9:.0f}" if "gpu_bytes" in record else "all"
    sizes = (
        f"{record['batch']} × {record['prompt']}",
        given,
        form_of_experts(record),
        (cell(record, "streamed_layers", "g") or "0") + (f", {chunks} chunks each" if chunks > 1 else ""),
    )
    yield *sizes, *rates, cell(record, "peak_gib", ".1f")


def form_of_experts(record: Record) -> str:
    """What the experts' weights are kept in."""
    bits = record.get("expert_bits")
    return record.get("base") or (f"bfloat16, exponents in {bits} bits" if bits else "bfloat16")


@_rows("kernel", "kernel of forward+backward | launches | µs | TFLOP/s | GB/s | of its ceiling")
def _kernels(record: Record) -> Iterator[Row]:
    for row in record["kernels"]:
        rates = ["", "", ""]
        if "tflops" in row:
            share = f"{row['share_of_ceiling']:.0%} ({row['ceiling']})"
            rates = [f"{row['tflops']:.1f}", f"{row['gbs']:.0f}", share]
        yield row["name"][:58], f"{row['launches']:.1f}", f"{row['us']:.1f}", *rates


@_rows("alone", "alone, back to back | µs | TFLOP/s | of dense | MHz | W | pJ/FLOP | of dense")
def _alone(record: Record) -> Iterator[Row]:
    """The passes, the kernels that multiply, and the dense product that their rates and energies are shares of."""
    runs = {name: timed["sustained"] for name, timed in record["passes"].items()} | record["alone"]
    dense = record["alone"]["dense matmul"]
    for name, run in runs.items():
        shares = [f"{run[r] / dense[r]:.0%}" if run.get(r) else "" for r in ("tflops", "pj_per_flop")]
        gauged = cell(run, "mhz", ".0f"), cell(run, "watts", ".0f"), cell(run, "pj_per_flop", ".3f")
        yield name, f"{run['us']:.1f}", f"{run['tflops']:.1f}", shares[0], *gauged, shares[1]


@_rows(
    "routing",
    "route + dispatch, µs (separate call) | XLA's top_k + argsort | faster by | capacity factor 1 | rounded to nearest"
    " | rounded down | route | dispatch | XLA's top_k | XLA's argsort",
)
def _routing(record: Record) -> Iterator[Row]:
    """A row of all calls in the order of the record: ours and XLA's from logits to indices, deciders, parts."""
    ours, xla, *others = (f"{row['us']:.1f} ({row['wall_us']:.0f})" for row in record["calls"].values())
    yield ours, xla, f"{record['speedup']:.1f}×", *others


@_rows(
    "compile_time",
    "layers | kernels | different | trace, s (CPU) | lower, s (CPU) | compile, s (CPU) | together, s (CPU)",
)
def _compile_time(record: Record) -> Iterator[Row]:
    for model in record["models"]:
        stages = [(model[f"{stage}_s"], model[f"{stage}_cpu_s"]) for stage in ("trace", "lower", "compile")]
        stages.append((sum(wall for wall, _ in stages), sum(cpu for _, cpu in stages)))
        times = (f"{wall:.1f} ({cpu:.1f})" for wall, cpu in stages)
        yield *(str(model[name]) for name in ("layers", "kernels", "different_kernels")), *times


@_rows(
    "mesh",
    "pass | one device, ms | mesh, ms | of linear | received, MiB | communication, ms | hidden"
    " | temporaries + results, MiB (one device) | largest error",
)
def _mesh(record: Record) -> Iterator[Row]:
    for name, row in record["passes"].items():
        times = f"{row['one_ms']:.3f}", f"{row['mesh_ms']:.3f}", f"{row['share_of_linear']:.3f}"
        travel = ("", "")
        if row.get("communication_ms"):
            rate = f"{row['communication_ms']:.3f} at {row['received_gb_per_s']:.0f} GB/s"
            travel = rate, f"{row['hidden_share']:.0%}"
        plans = {which: f"{m['temporaries']:.0f} + {m['outputs']:.0f}" for which, m in row["memory_mib"].items() if m}
        memory = f"{plans['mesh']} ({plans['one']})" if len(plans) == 2 else ""
        worst = max(row["errors"], key=row["errors"].__getitem__)
        yield name, *times, cell(row, "received_mib", ",.0f"), *travel, memory, f"{row['errors'][worst]:.1e} ({worst})"


@_rows("reading", "read | s, by turn | GB/s, fastest")
def _reading(record: Record) -> Iterator[Row]:
    for what, seconds in record["seconds"].items():
        yield what, ", ".join(f"{s:.2f}" for s in seconds), f"{record['bytes'] / min(seconds) / 1e9:.2f}"
    yield "layer at the file's speed", f"{record['share_of_file']:.0%} by medians", ""


@_rows("atomic", "form | forward+backward, ms (kernels alone) | ns per pair | chosen | a gather, in pairs of products")
def _atomic(record: Record) -> Iterator[Row]:
    for name, row in record["forms"].items():
        time = f"{milliseconds(row['wall_us'])} ({milliseconds(row['us'])})"
        yield (
            name,
            time,
            f"{row['ns_per_pair']:.2f}",
            "yes" if name == record["chosen"] else "",
            cell(row, "in_products", ".0f"),
        )


@_rows(
    "routers",
    "layer | forward+backward, ms | of K experts | back to back | pairs | temporaries, MiB | of K experts"
    " | with results, MiB | of K experts",
)
def _routers(record: Record) -> Iterator[Row]:
    for name, row in record["layers"].items():
        times = milliseconds(row["us"]), cell(row, "us_ratio", ".3f"), milliseconds(row["sustained"]["us"])
        planned = [(cell(row, n, ",.0f"), cell(row, f"{n}_ratio", ".3f")) for n in ("temporaries_mib", "peak_mib")]
        yield name, *times, f"{row['pairs']:,}", *planned[0], *planned[1]


@_rows(
    "precision",
    "products of | single run: forward / both, ms | back to back: forward / both, ms | faster by | MHz | W"
    " | temporaries, MiB",
)
def _precision(record: Record) -> Iterator[Row]:
    first = next(iter(record["layers"].values()))
    for name, row in record["layers"].items():
        passes = [row[phase] for phase in PASSES]
        runs = [timed["sustained"] for timed in passes]
        ratios = (first[phase]["sustained"]["us"] / row[phase]["sustained"]["us"] for phase in PASSES)
        faster = " / ".join(f"{ratio:.2f}×" for ratio in ratios)
        gauged = cell(runs[1], "mhz", ".0f"), cell(runs[1], "watts", ".0f")
        yield name, both_ms(passes), both_ms(runs), faster, *gauged, cell(row, "temporaries_mib", ",.0f")


@_rows(
    "precision_kernel",
    "kernel of both passes | 16 bits, µs | 8 bits, µs | weights cast before | faster by | least, µs | by | reached",
)
def _precision_kernels(record: Record) -> Iterator[Row]:
    """What one launch or all of a kernel take in both precisions, and what it must take in 8 bits at least."""
    layers = [of_layer["forward+backward"] for of_layer in record["by_kernel"].values()]
    wide, narrow, *_ = layers
    for name in {**narrow, **wide}:
        us = [kernels.get(name, {}).get("us") for kernels in layers]
        faster = f"{us[0] / us[1]:.2f}×" if us[0] and us[1] else ""
        row = narrow.get(name, {})
        reached = f"{row['least_us'] / row['us']:.0%}" if row.get("least_us") and row["us"] else ""
        shown = (f"{value:.0f}" if value else "" for value in us)
        yield name, *shown, faster, cell(row, "least_us", ".0f"), row.get("bound", ""), reached


@_rows("expected", "GPUs | communication, ms | of linear, exposed | hidden")
def _expected(record: Record) -> Iterator[Row]:
    for devices, (ms, exposed, hidden) in record["devices"].items():
        yield devices, f"{ms:.1f}", f"{exposed:.2f}", f"{hidden:.2f}"


@_rows(
    "training",
    "layer | tokens/s | peak memory, GiB | by XLA's plan | compiled in, s | final loss, bits/byte | difference",
)
def _training(record: Record) -> Iterator[Row]:
    memory = ("not reported" if record[name] is None else f"{record[name]:.1f}" for name in ("peak_gib", "planned_gib"))
    difference = f"{record['final_loss_difference']:+.2%}" if "final_loss_difference" in record else ""
    rest = cell(record, "compile_seconds", ",.0f"), f"{record['final_loss']:.4f}", difference
    yield record["layer"], cell(record, "tokens_per_second", ",.0f"), *memory, *rest


@_rows("precision_training", "trained in | final loss, bits/byte, by seed | mean | difference, mean | ms a step")
def _precision_training(record: Record) -> Iterator[Row]:
    """Means with their standard errors; the differences are between runs from one seed."""
    for name, row in record["precisions"].items():
        finals = ", ".join(f"{loss:.4f}" for loss in row["final_losses"])
        means = [f"{row['mean']:.4f} ± {row['standard_error']:.4f}"]
        means.append(f"{row['difference']:+.4f} ± {row['difference_standard_error']:.4f}")
        yield name, finals, *means, f"{row['step_seconds'] * 1e3:.1f}"


@_rows("step_profile", "part | ms | of step | bound, ms | reached | launches | bound by")
def _step_profile(record: Record) -> Iterator[Row]:
    step = record["step_ms"]
    for row in record["parts"]:
        reached = f"{row['bound_ms'] / row['ms']:.0%}" if row["ms"] and row["bound_ms"] else ""
        bound = f"{row['bound_ms']:.2f}", reached, f"{row['launches']:.0f}", row["bound"] or ""
        yield row["part"], f"{row['ms']:.2f}", f"{row['ms'] / step:.1%}", *bound
        for kernel in row["kernels"][:_SHOWN_KERNELS]:
            if kernel["ms"] >= _LEAST_SHARE * step:
                yield f"    {kernel['name'][:66]}", f"{kernel['ms']:.2f}", *[""] * 5
    yield "gaps", f"{record['gaps_ms']:.2f}", f"{record['gaps_ms'] / step:.1%}", *[""] * 4
    yield "step", f"{step:.2f}", "", f"{record['bound_ms']:.2f}", f"{record['bound_ms'] / step:.0%}", "", ""


def _step_summary(record: Record) -> Iterator[str]:
    """A training step in whole: its model, memory and speed."""
    peak = "not reported" if record["peak_gib"] is None else f"{record['peak_gib']:.1f} GiB"
    yield (
        f"{record['preset']}: {record['batch_size']} x {record['sequence_length']} bytes a step, remat "
        f"{record['remat']}, {record['parameters'] / 1e6:,.0f}M parameters; peak memory {peak}, "
        f"compiled in {record['compile_seconds']:.0f} s"
    )
    floor = ", ".join(f"{name} {gib:.1f}" for name, gib in record["floor_gib"].items())
    yield f"memory that no step does without: {sum(record['floor_gib'].values()):.1f} GiB ({floor})"
    tflops = record["model_tflop"] / record["wall_ms"] * 1e3
    yield (
        f"after {record['after']} steps, in CUDA graphs and without the profiler {record['wall_ms']:.2f} ms: "
        f"{record['tokens_per_second']:,.0f} tokens/s, {tflops:.0f} TFLOP/s of the model's own arithmetic, "
        f"{tflops / record['ceilings']['tflops']:.0%} of dense"
    )


def _aligned(*rows: Row) -> Iterator[str]:
    """Columns as wide as they must be, the first one to the left."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    for row in rows:
        yield "  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]).rstrip()


_PRODUCTS = {
    "dense matmul": "tflops",
    "dense matmul of 8 bits": "fp8_tflops",
    "our product of one expert": "one_expert_tflops",
}


def _ceilings(record: Record) -> Iterator[str]:
    """The device's rates, of each pass if they were timed apart."""
    found = record.get("ceilings", {})
    for rates in [found] if "gbs" in found else found.values():
        products = []
        for what, name in _PRODUCTS.items():
            longer = cell(rates, f"sustained_{name}", ".4g")
            if name in rates:
                products.append(f"{what} {rates[name]:.4g} TFLOP/s{f' ({longer} back to back)' if longer else ''}")
        yield f"{', '.join(products)}, copy {rates['gbs']:.0f} GB/s"


def _notes(value: Any) -> Iterator[str]:
    """Notes and failures of a record and its parts."""
    if isinstance(value, list):
        for part in value:
            yield from _notes(part)
    if isinstance(value, dict):
        if not succeeded(value):
            yield f"{label(value)}: {value['status']}"
        if value.get("note"):
            yield f"note: {value['note']}"
        for part in value.values():
            yield from _notes(part)
