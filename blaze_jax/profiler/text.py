"""A profile in words."""

from typing import TYPE_CHECKING

from blaze_jax.benchmark.plan import MIB
from blaze_jax.profiler.layer_report import LayerMemory, LayerReport

if TYPE_CHECKING:
    from blaze_jax.profiler.memory_profiler import Profile


def render(profile: "Profile") -> str:
    """All of it, a line for each figure."""
    lines = [f"memory of a step on {profile.device}, {'run' if profile.ran else 'compiled, not run'}"]
    lines.append(f"  peak: {'not known' if profile.peak is None else _mib(profile.peak)}: {profile.peak_note}")
    if profile.plan is not None:
        plan = profile.plan
        parts = {"arguments": plan.arguments, "results": plan.outputs, "temporaries": plan.temporaries}
        lines.append(f"  plan: {', '.join(f'{name} {_mib(size)}' for name, size in parts.items())}")
    if profile.kept is None:
        lines.append("  kept over all layers: not known of a step that runs; `examine` counts it")
    elif profile.kept:
        kept = ", ".join(f"{name} {_mib(size)}" for name, size in profile.kept.items())
        lines.append(f"  kept from forward to backward, by name, over all layers: {kept}")
    else:
        lines.append("  kept from forward to backward: nothing with a name; is the backward pass in this function?")
    if not profile.traced:
        lines.append("  no blaze_jax layer was traced: a program compiled ahead of time does not show its layers")
    for report in profile.layers:
        lines += _layer(report)
    return "\n".join(lines)


def _layer(report: LayerReport) -> list[str]:
    times = "" if report.traced == 1 else f", traced {report.traced} times"
    lines = [f"layer {report.layer}{times} (a loop over layers is traced once, however long it is)"]
    lines += _memory("blaze_jax", report.ours, report.total_flops)
    if report.conventional is None:
        return [*lines, f"  conventional: not compared, {report.note}"]
    lines += _memory("conventional (sort + lax.ragged_dot)", report.conventional, report.total_flops)
    ratio = report.conventional.kept_bytes / max(1, report.ours.kept_bytes)
    return [*lines, f"  the conventional layer keeps {ratio:.2f} times as much"]


def _memory(name: str, memory: LayerMemory, total_flops: int) -> list[str]:
    parts = ", ".join(f"{part} {_mib(size)}" for part, size in sorted(memory.kept.items(), key=lambda kv: -kv[1]))
    transient = f"not known: {memory.note}" if memory.transient is None else _mib(memory.transient)
    share = memory.recomputed_flops / max(1, total_flops)
    return [
        f"  {name} keeps {_mib(memory.kept_bytes)}: {parts}",
        f"  {name} transient buffers: {transient}",
        f"  {name} recomputes {memory.recomputed_flops / 1e9:,.2f} GFLOP of products, {share:.0%} more arithmetic",
    ]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.2f} MiB"
