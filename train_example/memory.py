"""The device's memory."""

import os

import jax


def allow_all_memory() -> None:
    """Lets jax take 95 % of a GPU, not 75 %, unless the user has said how much; to be called before jax runs."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")


def peak_memory_gib() -> float | None:
    """The most memory the device has had in use so far, in GiB; None where it does not say, as on a CPU."""
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return None if peak is None else peak / 2**30
