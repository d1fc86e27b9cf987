"""Limits of the Hopper kernels, and the assembler that makes them slow: its warpgroups cannot trade registers."""

import ctypes
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import jax.numpy as jnp
import jaxlib.version
from jaxtyping import Array

from pallas_kernels.mosaic.device import weights_unsupported
from pallas_kernels.routing.dispatch import dispatch_unsupported


def unsupported(
    x: Array,
    weights: tuple[Array, ...],
    biases: tuple[Array, ...],
) -> str | None:
    """Why an expert FFN of these arrays cannot run on the kernels, or None if it can.

    Args:
      x: tokens `(T, d)`.
      weights: up weights `(E, d, n)`, then the down weights.
      biases: every bias there is.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return (
            f"x has dtype {x.dtype}, the tensor cores take bfloat16 or float16 (MoE(..., dtype=jnp.bfloat16) casts the "
            "tokens; parameters may stay float32)"
        )
    if reason := dispatch_unsupported(weights[0].shape[0]) or weights_unsupported(weights, biases):
        return reason
    if len({weight.dtype for weight in weights[:-1]}) > 1:
        return f"w_gate and w_up have dtypes {weights[0].dtype} and {weights[1].dtype}, must have the same"
    if x.size // 8 >= 2**31:
        return f"x of shape {x.shape} is too large for the gather's 32-bit offsets in units of 16 bytes"
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
