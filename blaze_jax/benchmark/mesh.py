"""`--mesh`: the experts over several devices against one, each case in a process of its own."""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from blaze_jax.benchmark.results_file import Record
from blaze_jax.benchmark.sizes import CPU_MESH_SIZES, MESH_SIZES, Sizes
from blaze_jax.parallelism import ROLES

_OPTIONS = ("exchange", "chunks", "row_budget", "keep_gathered")


def parse_mesh(text: str) -> dict[str, int]:
    """Devices by role, from "fsdp=2,expert=4"."""
    axes = {}
    for part in text.split(","):
        role, _, devices = part.partition("=")
        if role not in ROLES or not devices.isdecimal() or int(devices) < 1 or role in axes:
            raise argparse.ArgumentTypeError(f"{text!r} must be like fsdp=2,expert=4, of {', '.join(ROLES)}, each once")
        axes[role] = int(devices)
    return axes


def mesh_of(axes: dict[str, int]) -> Mesh:
    """The first devices, with an axis for each role."""
    devices = np.array(jax.devices()[: math.prod(axes.values())]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def parse_variant(text: str) -> dict[str, Any]:
    """Fields of `Parallelism`, from "chunks=2,exchange=permute"; "default" has none."""
    options = {}
    for part in text.split(",") if text != "default" else []:
        name, _, value = part.partition("=")
        if name not in _OPTIONS:
            raise argparse.ArgumentTypeError(f"{name!r} must be one of {', '.join(_OPTIONS)}")
        try:
            options[name] = value if name == "exchange" else json.loads(value.lower().replace("none", "null"))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} must be a name and its value") from None
    return options


def default_sizes() -> tuple[Sizes, ...]:
    """Sizes for the devices that are here, which another process looks for: a GPU's memory is left to the cases.

    Raises:
      ValueError: jax finds no devices.
    """
    command = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise ValueError(f"--mesh finds no devices: {_last_line(run.stderr)}")
    return CPU_MESH_SIZES if run.stdout.split()[-1:] == ["cpu"] else MESH_SIZES


def measure_mesh(
    item: tuple[Sizes, dict[str, Any]],
    axes: dict[str, int],
    *,
    layers: int,
    dtype: str | None,
    repeats: int,
    implementation,
    limit_seconds: float,
) -> tuple[dict | None, Record]:
    """Environment and record of a case; what went wrong is in its "status"."""
    sizes, options = item
    with tempfile.TemporaryDirectory() as folder:
        case, result = Path(folder) / "case.json", Path(folder) / "result.json"
        what = {"sizes": sizes, "axes": axes, "options": options, "layers": layers, "dtype": dtype, "repeats": repeats}
        case.write_text(json.dumps(what | {"implementation": implementation}))
        # jax takes it up where it computes on CPUs.
        variables = os.environ | {"JAX_NUM_CPU_DEVICES": str(math.prod(axes.values()))}
        command = [sys.executable, "-m", "blaze_jax.benchmark.mesh_case", str(case), str(result)]
        record: Record = {"kind": "mesh", "sizes": sizes._asdict(), "mesh": axes, "options": options, "layers": layers}
        try:
            run = subprocess.run(
                command, env=variables, capture_output=True, text=True, timeout=limit_seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return None, record | {"status": f"took longer than {limit_seconds:g} s"}
        if run.returncode:
            return None, record | {"status": _failure(run.returncode, run.stderr), "stderr": run.stderr[-4000:]}
        content = json.loads(result.read_text())
        return content["environment"], content["record"] | {"status": "ok"}


def _failure(status: int, stderr: str) -> str:
    """How a process ended."""
    if -status == signal.SIGKILL:
        return "was killed, as the system does when memory runs out: choose smaller sizes by --config"
    how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"{how}: {_last_line(stderr)}"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def mesh_text(record: Record) -> str:
    """The record in a few lines."""
    return "\n".join(_lines(record))


def _lines(record: Record) -> Iterator[str]:
    axes = ",".join(f"{role}={devices}" for role, devices in record["mesh"].items())
    options = ", ".join(f"{name}={value}" for name, value in record["options"].items()) or "defaults"
    layers = f", {record['layers']} layers" if record["layers"] > 1 else ""
    yield f"{Sizes(**record['sizes'])}{layers}, {axes}, {options}"
    if record["status"] != "ok":
        yield f"  {record['status']}"
        return
    for name, passed in record["passes"].items():
        yield (
            f"  {name}: one device {passed['one_ms']:.3f} ms, mesh {passed['mesh_ms']:.3f} ms, "
            f"{passed['share_of_linear']:.3f} of linear; received {passed['received_mib']:.0f} MiB"
        )
        if "exposed_ms" in passed and passed["communication_ms"]:
            yield (
                f"    busy {passed['one_busy_ms']:.3f} and {passed['mesh_busy_ms']:.3f} ms; communication "
                f"{passed['communication_ms']:.3f} ms at {passed['received_gb_per_s']:.0f} GB/s, exposed "
                f"{passed['exposed_ms']:.3f} ms ({passed['hidden_share']:.0%} hidden)"
            )
        memory = {which: m for which, m in passed["memory_mib"].items() if m}
        if memory:
            parts = (f"{which} {m['temporaries']:.0f} + {m['outputs']:.0f}" for which, m in memory.items())
            yield f"    temporaries + results a device, MiB: {', '.join(parts)}"
        yield "    scaled errors: " + ", ".join(f"{k} {v:.1e}" for k, v in passed["errors"].items())
