"""The GPU that kernels are launched on."""

import jax

H200_SMS = 132


def num_sms() -> int:
    """Streaming multiprocessors of the GPU that jax computes on; an H200's where a program is made elsewhere."""
    return jax.devices()[0].core_count if jax.default_backend() == "gpu" else H200_SMS


def compute_capability() -> str | None:
    """That of the GPU that jax computes on, such as "9.0"; None without one. GPUs of AMD have a name, "gfx942"."""
    return jax.devices()[0].compute_capability if jax.default_backend() == "gpu" else None


def on_nvidia_gpu() -> bool:
    """Whether jax computes on an NVIDIA GPU with kernels here: of compute capability 8.0 or newer."""
    major = (compute_capability() or "").partition(".")[0]
    return major.isdigit() and int(major) >= 8
