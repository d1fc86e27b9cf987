"""The record as text."""

from typing import Any

_SHOWN_KERNELS = 4
_LEAST_SHARE = 0.005


def print_report(record: dict[str, Any]) -> None:
    """A table of parts, each followed by its longest kernels, and what a step takes in all."""
    ceilings, step = record["ceilings"], record["step_ms"]
    peak = "not reported" if record["peak_gib"] is None else f"{record['peak_gib']:.1f} GiB"
    print(
        f"{record['preset']}: {record['batch_size']} x {record['sequence_length']} bytes a step, remat "
        f"{record['remat']}, {record['parameters'] / 1e6:,.0f}M parameters; peak memory {peak}, "
        f"compiled in {record['compile_seconds']:.0f} s"
    )
    floor = ", ".join(f"{name} {gib:.1f}" for name, gib in record["floor_gib"].items())
    print(f"memory that no step does without: {sum(record['floor_gib'].values()):.1f} GiB ({floor})")
    print(f"dense matmul {ceilings['tflops']:.0f} TFLOP/s, copy {ceilings['gbs']:.0f} GB/s")
    print(f"{'part':24s} {'ms':>8s} {'of step':>8s} {'bound ms':>9s} {'reached':>8s} {'launches':>9s}  bound by")
    for row in record["parts"]:
        reached = f"{row['bound_ms'] / row['ms']:8.0%}" if row["ms"] and row["bound_ms"] else f"{'':8s}"
        print(
            f"{row['part']:24s} {row['ms']:8.2f} {row['ms'] / step:8.1%} {row['bound_ms']:9.2f} {reached} "
            f"{row['launches']:9.0f}  {row['bound'] or ''}"
        )
        for kernel in row["kernels"][:_SHOWN_KERNELS]:
            if kernel["ms"] >= _LEAST_SHARE * step:
                print(f"    {kernel['name'][:66]:66s} {kernel['ms']:8.2f}")
    print(f"{'gaps':24s} {record['gaps_ms']:8.2f} {record['gaps_ms'] / step:8.1%}")
    print(
        f"{'step':24s} {step:8.2f} {'':8s} {record['bound_ms']:9.2f} {record['bound_ms'] / step:8.0%}; "
        f"in CUDA graphs and without the profiler {record['wall_ms']:.2f} ms"
    )
    tflops = record["model_tflop"] / record["wall_ms"] * 1e3
    print(
        f"{record['tokens_per_second']:,.0f} tokens/s, {tflops:.0f} TFLOP/s of the model's own arithmetic, "
        f"{tflops / ceilings['tflops']:.0%} of dense"
    )
