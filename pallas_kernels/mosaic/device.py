"""The GPU that kernels are launched on, what its tensor cores and copies cannot do, and the assembler that slows it."""

import ctypes
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib.version
from jaxtyping import Array

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


WIDTH_MULTIPLE = 8
"""Rows of 16 bits must be whole multiples of 16 bytes, what all copies move."""


def weights_unsupported(weights: tuple[Array, ...], biases: tuple[Array, ...]) -> str | None:
    """Why an expert FFN of these parameters cannot run on the kernels, or None if it can.

    Args:
      weights: up weights `(E, d, n)`, then the down weights.
      biases: every bias there is.
    """
    for array in (*weights, *biases):
        if array.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"a weight or bias has dtype {array.dtype}, must be bfloat16, float16 or float32"
    _, d, n = weights[0].shape
    for name, width in (("d", d), ("n", n)):
        if width % WIDTH_MULTIPLE:
            return f"{name}={width} must be a multiple of {WIDTH_MULTIPLE}"
    return None


_LIBRARIES = (("libnvJitLink.so.13", "cu13/lib"), ("libnvJitLink.so.12", "nvjitlink/lib"))
"""NVIDIA's linker for each major release of CUDA, and where its package keeps it in the namespace `nvidia`."""

_FIRST_THAT_XLA_TAKES = (12, 5)


@cache
def nvjitlink_version() -> tuple[int, int] | None:
    """Version of NVIDIA's linker that loads here, from its package or the system; None without one."""
    spec = find_spec("nvidia")
    packages = [Path(path) for path in (spec.submodule_search_locations or ())] if spec else []
    paths = [path / folder / name for path, (name, folder) in product(packages, _LIBRARIES)]
    for path in (*filter(Path.exists, paths), *(name for name, _ in _LIBRARIES)):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        major, minor = ctypes.c_uint(), ctypes.c_uint()
        if hasattr(library, "nvJitLinkVersion"):  # since 12.3
            library.nvJitLinkVersion(ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value
    return None


def why_kernels_spill() -> str | None:
    """The reason why the expert kernels spill registers here, with its remedies; None if they do not.

    From 0.12 on, jaxlib assembles kernels for NVIDIA's linker wherever XLA finds one that it takes. Code to be linked
    cannot move registers from one warpgroup to another (`setmaxnreg`), which the expert kernels count on.
    """
    if jaxlib.version.__version_info__ < (0, 12):
        return None
    version = nvjitlink_version()
    if version is None or version < _FIRST_THAT_XLA_TAKES:
        return None
    release = f"jaxlib {jaxlib.version.__version__} assembles them for nvJitLink {version[0]}.{version[1]}"
    return (
        f"the Hopper kernels spill registers (550 to 1030 bytes a thread in most of them) and are slower for it, "
        f"because {release}. Remedies: with CUDA 12, pip install 'nvidia-nvjitlink-cu12<12.5' "
        "'nvidia-cusparse-cu12<12.4', which the extra blaze_jax[cuda12] does; with CUDA 13, jax below 0.12, which the "
        "extra blaze_jax[cuda13] installs"
    )
