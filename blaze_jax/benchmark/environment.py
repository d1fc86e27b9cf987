"""What a measurement was taken on."""

import re
import subprocess
from datetime import UTC, datetime

import jax
import jaxlib.version

from blaze_jax.version import __version__


def environment() -> dict[str, str]:
    """Device, driver, versions and the date, by name; what cannot be found out says so."""
    device = jax.devices()[0]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "platform": device.platform,
        "device": device.device_kind,
        "driver": _driver() if device.platform == "gpu" else "none",
        "cuda": _cuda(device) if device.platform == "gpu" else "none",
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "blaze_jax": __version__,
    }


def describe(values: dict[str, str]) -> str:
    """The same in a line."""
    line = "blaze_jax {blaze_jax}, jax {jax}, jaxlib {jaxlib}, {platform} {device}".format(**values)
    if values["platform"] == "gpu":
        line += ", driver {driver}, CUDA {cuda}".format(**values)
    return f"{line}, {values['date']}"


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
