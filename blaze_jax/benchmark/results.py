"""Results files, which every measuring program writes: what was measured, on what, by which command, as JSON."""

import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version

from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.version import __version__

type Record = dict[str, Any]

OURS = "blaze_jax"
"""The name of our layer in every record."""

PUBLISHED = Path(__file__).parent / "published.json"
"""Figures of other implementations at the sizes measured here, from other runs."""


class ResultsFile:
    """Collects records, and writes all of them to a file after each: what was measured outlives a crash.

    Args:
      path: the file, None for none; its folder is made.
      environment: what the measurement is taken on.
      command: what to type to measure again.

    Raises:
      ValueError: the file cannot be written, told before anything is measured.
    """

    def __init__(self, path: Path | None, environment: dict[str, str], command: str):
        self.path = path
        self.content: dict[str, Any] = {"environment": environment, "command": command, "records": []}
        try:
            self.write()
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}; choose another file") from error

    def add(self, record: Record) -> None:
        """Appends a record."""
        self.content["records"].append(record)
        self.write()

    def write(self) -> None:
        """Writes the content, if there is a file."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
            partial.replace(self.path)


def command_line(module: str, arguments: Sequence[str]) -> str:
    """The command to type again, without the options that say where its results went."""
    text = shlex.join(["python", "-m", module, *arguments])
    return re.sub(r" --(json|plot)[ =]('[^']*'|\S+)", "", text)


def read_results(path: Path) -> dict[str, Any]:
    """The content of a results file.

    Raises:
      ValueError: it is none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as results: {error}") from error
    if not isinstance(content, dict) or not {"environment", "command", "records"} <= content.keys():
        raise ValueError(f"{path} is no file of results: it must have environment, command and records")
    return content


def published(kind: str, **same: Any) -> list[Record]:
    """Figures of other runs that agree in `same`."""
    wanted = {"kind": kind, **same}
    return [r for r in read_results(PUBLISHED)["records"] if r.items() >= wanted.items()]


def head(kind: str, sizes: Sizes, dtype) -> Record:
    """The beginning of every record of a layer."""
    return {"kind": kind, "sizes": sizes._asdict(), "dtype": jnp.dtype(dtype).name}


def succeeded(record: Record) -> bool:
    """Whether all of it was measured; a record that has no status was."""
    return record.get("status", "ok") == "ok"


def environment() -> dict[str, str]:
    """Device, driver, versions and the date, by name; what cannot be found out says so."""
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "platform": device.platform,
        "device": device.device_kind,
        "driver": _driver() if on_gpu else "none",
        "cuda": _cuda(device) if on_gpu else "none",
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "blaze_jax": __version__,
    }


def describe(values: dict[str, str]) -> str:
    """An environment in a line."""
    line = "blaze_jax {blaze_jax}, jax {jax}, jaxlib {jaxlib}, {platform} {device}"
    if values["platform"] == "gpu":
        line += ", driver {driver}, CUDA {cuda}"
    return f"{line}, {{date}}".format(**values)


def source(*results: dict[str, Any]) -> str:
    """The devices and the dates of results files, for a table's foot."""
    dates: dict[str, list[str]] = {}
    for e in (result["environment"] for result in results):
        driver = f", driver {e['driver']}, CUDA {e['cuda']}" if e["platform"] == "gpu" else ""
        dates.setdefault(f"{e['device']}{driver}, jax {e['jax']}", []).append(e["date"])
    return "; ".join(f"{device}, {' and '.join(sorted(set(days)))}" for device, days in dates.items())


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown (nvidia-smi: {type(error).__name__})"
    return answer[0] if answer else "unknown (nvidia-smi lists no GPU)"


def _cuda(device) -> str:
    """The CUDA version from the platform's own words, such as "cuda 13000"."""
    version = str(getattr(device.client, "platform_version", ""))
    found = re.search(r"\bcuda (\d+)", version)
    if found is None:
        return f"unknown ({version or 'the platform does not say'})"
    return f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}"
