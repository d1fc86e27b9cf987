"""Whether experts multiply numbers of 8 bits: `precision="fp8"` does where it pays, by the rule that stands here."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

from jaxtyping import Array

from blaze_jax.activations import Activation
from blaze_jax.checks import warn_once
from pallas_kernels.compat import has_symbolic_sizes
from pallas_kernels.family import Kernels

Precision = Literal["fp8"]

LEAST_WIDTH = 1024
"""Where a width of the experts is less, products in 8 bits save less than the casts take."""

LEAST_ROWS = 1024
"""Where an expert has fewer rows, casting its weights takes longer than all that it gains."""

LEAST_PRODUCTS = 2**36
"""Where a product of all rows takes fewer multiplications, launches and casts take as long as the products save."""

MOST_BOUNDED_WIDTH = 2048
"""Wider tokens are bounded too loosely: the bound grows with the root of the width for each of two factors, and small
activations would lose digits of e4m3."""

_everywhere: ContextVar[bool] = ContextVar("fp8_everywhere", default=False)


@contextmanager
def fp8_everywhere(is_so: bool = True) -> Iterator[None]:
    """What is traced inside multiplies 8 bits wherever `precision="fp8"` is asked for, whether it pays or not."""
    token = _everywhere.set(is_so)
    try:
        yield
    finally:
        _everywhere.reset(token)


def is_fp8_everywhere() -> bool:
    """Whether `fp8_everywhere` is around."""
    return _everywhere.get()


def check_precision(precision: Precision | None) -> None:
    """Raises ValueError unless `precision` is None or a name."""
    if precision not in (None, *get_args(Precision)):
        raise ValueError(f"{precision=} must be None or one of {', '.join(get_args(Precision))}")


def kernels_in_fp8(kernels: Kernels, x: Array, weights: tuple[Array, ...], expected_rows: float | None) -> Kernels:
    """The family with its row products in 8 bits; as it is where they would not pay.

    A warning says so once, except where there are fewer rows than experts.

    Args:
      kernels: the family.
      x: tokens.
      weights: `(E, d, n)`, the down weights last.
      expected_rows: of all experts together; None for as many as make it pay.

    Raises:
      NotImplementedError: the family has no such products, or not of these widths.
    """
    if kernels.in_fp8 is None:
        raise NotImplementedError(
            f"precision='fp8' needs an NVIDIA Hopper GPU and tokens of bfloat16 or float16, not {x.dtype} on this one; "
            "leave it out, or use implementation='xla'"
        )
    num_experts, width, model_width = weights[-1].shape
    multiple = kernels.fp8_multiple
    if width % multiple or model_width % multiple:
        raise NotImplementedError(
            f"precision='fp8' needs widths that are multiples of {multiple}, got model width {model_width} and "
            f"expert width {width}; leave it out, or use implementation='xla'"
        )
    if expected_rows is None or is_fp8_everywhere():
        return kernels.in_fp8()
    if reason := why_fp8_loses(x, width, model_width, num_experts, expected_rows):
        if has_symbolic_sizes(x) or expected_rows >= num_experts:  # fewer draw parameters, or a token after another
            warn_once(f"precision='fp8' is left out, and experts multiply {x.dtype}: {reason}")
        return kernels
    return kernels.in_fp8()


def hidden_bound(activation: Activation, model_width: int, save: str, adapted: bool) -> Callable[..., Array] | None:
    """The activation's bound, where the up projection writes 8 bits by it; None where a pass casts what it writes.

    With int8 pre-activations the kernel would spill registers, and an adapter of the down projection takes 16 bits.
    """
    return None if save == "int8" or adapted or model_width > MOST_BOUNDED_WIDTH else activation.bound


def why_fp8_loses(x: Array, width: int, model_width: int, num_experts: int, expected_rows: float) -> str | None:
    """Why experts of these sizes are faster in 16 bits, by what was measured on an H200; None where they are not."""
    if min(width, model_width) < LEAST_WIDTH:
        return (
            f"widths of less than {LEAST_WIDTH} are faster so, and these are model width {model_width} and expert "
            f"width {width}"
        )
    if has_symbolic_sizes(x):
        return None
    if expected_rows < LEAST_ROWS * num_experts:
        rows = round(expected_rows / num_experts)
        return f"experts of less than {LEAST_ROWS} tokens are faster so, and these have {rows} on average"
    if expected_rows * width * model_width < LEAST_PRODUCTS:
        least = math.ceil(LEAST_PRODUCTS / (width * model_width))
        return (
            f"at model width {model_width} and expert width {width} less than {least} rows of all experts together are "
            f"faster so, and these have {round(expected_rows)}"
        )
    return None
