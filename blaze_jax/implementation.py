"""Which implementation of the kernels a call runs on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array

from blaze_jax.checks import warn_once
from pallas_kernels import ampere, hopper, xla
from pallas_kernels.compat import has_symbolic_sizes
from pallas_kernels.family import Kernels
from pallas_kernels.mosaic.device import compute_capability, on_nvidia_gpu

Implementation = Literal["mosaic_gpu", "xla"]

FAMILIES: dict[str, Any] = {"hopper": hopper, "ampere": ampere}
"""The kernels behind "mosaic_gpu", by name."""

_demanded: ContextVar[str | None] = ContextVar("family", default=None)


def check_implementation(implementation: Implementation | None) -> None:
    """Raises ValueError unless `implementation` is None or a name."""
    if implementation not in (None, *get_args(Implementation)):
        raise ValueError(f"{implementation=} must be None or one of {', '.join(get_args(Implementation))}")


def choose_implementation(
    implementation: Implementation | None, x: Array, weights: tuple[Array, ...], biases: tuple[Array, ...]
) -> Implementation:
    """The implementation demanded, or for None the best that can run here.

    Demanded by name, kernels ask for no device: the call lowers and compiles on a machine without one. With None,
    an accelerator that has to do without them gets a warning, once for each reason.

    Raises:
      ValueError: there is no implementation of that name.
      NotImplementedError: the implementation demanded cannot do this.
    """
    arrays = (x, weights, biases)
    family = _gpu_family(x.dtype)

    def unsupported() -> str | None:
        unasked = _too_precise(x) if implementation is None else None
        return unasked or family.unsupported(*arrays)

    chosen = _choose(implementation, unsupported, arrays)
    if chosen == "mosaic_gpu" and (reason := family.why_kernels_spill()):
        warn_once(reason)
    return chosen


def choose_router_implementation(
    implementation: Implementation | None, logits: Array, experts_per_token: int
) -> Implementation:
    """Chooses in the same way for the router of these logits."""
    return _choose(implementation, partial(_gpu_family().router_unsupported, logits, experts_per_token), logits)


def choose_dispatch_implementation(
    implementation: Implementation | None, experts: Array, num_experts: int
) -> Implementation:
    """Chooses in the same way for grouping rows by these experts."""
    return _choose(implementation, partial(_gpu_family().dispatch_unsupported, num_experts), experts)


def _choose(implementation: Implementation | None, unsupported: Callable[[], str | None], arrays) -> Implementation:
    """The choice; `unsupported` says why the kernels cannot do it, or None."""
    check_implementation(implementation)
    reason = "the kernels need sizes that are known, not symbolic" if has_symbolic_sizes(arrays) else unsupported()
    if implementation == "mosaic_gpu" and reason:
        raise NotImplementedError(f"{implementation=} cannot run this: {reason}; use 'xla' or None")
    if implementation is not None:
        return implementation
    if jax.default_backend() == "cpu":
        return "xla"
    if not on_nvidia_gpu():
        device = jax.devices()[0].device_kind
        reason = f"they are for NVIDIA GPUs of compute capability 8.0 and newer, and this is {device}"
    if reason is None:
        return "mosaic_gpu"
    warn_once(
        f"the MoE layer runs in plain XLA, which is slower than the kernels for NVIDIA GPUs: {reason}. "
        "implementation='xla' says that this is meant"
    )
    return "xla"


def _too_precise(x: Array) -> str | None:
    """Why tokens `x` are not for kernels that round products to tf32, or None if they are."""
    precision = jax.config.jax_default_matmul_precision
    if x.dtype == jnp.float32 and precision in ("highest", "float32"):
        return f"jax_default_matmul_precision is {precision!r}, and their products of float32 are rounded to tf32"
    return None


def kernels_of(implementation: Implementation, num_tokens: int = 1, dtype=jnp.bfloat16) -> Kernels:
    """The family of kernels for tokens of `dtype`, which routers and dispatches do not ask for.

    The portable one where there are no tokens, since no kernel is launched without work.
    """
    return _gpu_family(dtype) if implementation == "mosaic_gpu" and num_tokens else xla


@contextmanager
def demanded_family(name: str | None) -> Iterator[None]:
    """Runs what is traced inside on this family of `FAMILIES`, whatever the GPU; None leaves the choice as it is."""
    token = _demanded.set(name)
    try:
        yield
    finally:
        _demanded.reset(token)


def family_in_demand() -> str | None:
    """The name that `demanded_family` was given."""
    return _demanded.get()


def _gpu_family(dtype=jnp.bfloat16) -> Any:
    """The kernels for the GPU that jax computes on, or for an H200 elsewhere; Hopper's take 16-bit tokens alone."""
    if name := _demanded.get():
        return FAMILIES[name]
    on_hopper = compute_capability() in (None, "9.0")
    return hopper if on_hopper and dtype in (jnp.bfloat16, jnp.float16) else ampere
