"""Dispatch: from the experts each token chose to the rows each expert computes."""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.core import Tracer
from jaxtyping import Array, Int

from blaze_jax.checks import as_array, check_integers
from blaze_jax.explicit_mesh import explicit_mesh, per_device
from blaze_jax.implementation import Implementation, choose_dispatch_implementation, kernels_of
from blaze_jax.transformations import compiled_once, one_by_one
from pallas_kernels.compat import has_symbolic_sizes
from pallas_kernels.contract import EMPTY_SLOT, Dispatch
from pallas_kernels.family import Kernels

_MAX_PAIRS = 2**31 - 2**24  # rows are numbered in int32, with room for the gaps of aligned groups


@partial(jax.tree_util.register_dataclass, data_fields=("dispatch",), meta_fields=("kernels",))
@dataclass(frozen=True)
class Grouped:
    """Pairs by expert, and the kernels that grouped them: others need them in their own way."""

    kernels: Kernels
    dispatch: Dispatch


def check_experts(experts: Array, num_experts: int) -> None:
    """Raises ValueError unless `experts` is an integer array `(T, K)` with K ≤ E, of expert ids (where known)."""
    check_integers(num_experts=num_experts)
    if num_experts < 1:
        raise ValueError(f"{num_experts=} must be at least 1")
    if experts.ndim != 2 or not jnp.issubdtype(experts.dtype, jnp.integer):
        raise ValueError(f"experts must be an integer array (T, K), got {experts.dtype} of shape {experts.shape}")
    if not 1 <= experts.shape[1] <= num_experts:
        raise ValueError(f"experts has K={experts.shape[1]} slots a token, must be from 1 to E={num_experts}")
    if not has_symbolic_sizes(experts) and math.prod(experts.shape) > _MAX_PAIRS:
        raise ValueError(f"experts of shape {experts.shape} has more pairs than {_MAX_PAIRS}, int32 cannot number them")
    check_ids("experts", experts, num_experts)


def check_ids(name: str, experts: Int[Array, "..."], num_experts: int) -> None:
    """Raises ValueError if an expert id is out of range, where values are known."""
    if isinstance(experts, Tracer):
        return
    values = np.asarray(experts)
    wrong = (values < EMPTY_SLOT) | (values >= num_experts)
    if wrong.any():
        place = tuple(map(int, np.argwhere(wrong)[0]))
        raise ValueError(
            f"{name}[{', '.join(map(str, place))}] = {values[place]} must be an expert id from 0 to {num_experts - 1}, "
            f"or {EMPTY_SLOT} for an empty slot"
        )


def build_dispatch(
    experts: Int[Array, "T K"],
    num_experts: int,
    *,
    row_alignment: int = 1,
    implementation: Implementation | None = None,
) -> Dispatch:
    """Groups (token, slot) pairs by expert, without a sort: linear in T·K, stable by token, the same bits on every run.

    Args:
      experts: expert ids, -1 for an empty slot. Ids outside that range raise where values are known; under tracing they
        count as empty here, and `expert_ffn` turns the token's output into NaN.
      num_experts: E.
      row_alignment: every group starts at a multiple of this many rows; R grows to hold the gaps.
      implementation: None for the best that can run here, or "mosaic_gpu" (two launches) or "xla": the same bits.

    Returns:
      The four index arrays. R is `T·K`, or for `row_alignment` above 1 the most that aligned groups can take.

    Raises:
      ValueError: `experts` is not an integer array `(T, K)` with K ≤ E, an id is out of range, T·K rows are too many
        for int32, or a number is not an integer of at least 1.
      NotImplementedError: the implementation demanded cannot run here.
    """
    check_integers(row_alignment=row_alignment)
    if row_alignment < 1:
        raise ValueError(f"{row_alignment=} must be at least 1")
    experts = as_array("experts", experts)
    check_experts(experts, num_experts)
    return _built(experts, num_experts=num_experts, row_alignment=row_alignment, implementation=implementation)


@compiled_once("num_experts", "row_alignment", "implementation")
def _built(experts, *, num_experts: int, row_alignment: int, implementation: Implementation | None) -> Dispatch:
    def build(experts) -> Dispatch:
        ids = int32_experts(experts, num_experts)
        kernels = kernels_of(choose_dispatch_implementation(implementation, ids, num_experts), ids.shape[0])
        dispatch = group_by_expert(kernels, ids, num_experts, row_alignment=row_alignment, spare_rows=0)
        return dispatch._replace(token_expert_indices=ids, tiles=None)

    mesh = explicit_mesh(experts)
    return build(experts) if mesh is None else per_device(build, mesh, (P(),), P(), experts, explicit=mesh)


def group_by_expert(kernels: Kernels, experts: Int[Array, "T K"], num_experts: int, **alignment: int) -> Dispatch:
    """The dispatch that the kernels make of int32 ids, rows aligned as they like it or as is said."""
    return one_by_one(kernels, partial(kernels.dispatch, num_experts=num_experts, **alignment))(experts)


def int32_experts(experts: Int[Array, "T K"], num_experts: int) -> Int[Array, "T K"]:
    """Ids in int32, with E in the place of one out of range: a cast alone could make it an id, or an empty slot."""
    largest = min(num_experts - 1, jnp.iinfo(experts.dtype).max)
    known = experts <= largest
    if jnp.issubdtype(experts.dtype, jnp.signedinteger):
        known &= experts >= EMPTY_SLOT
    return jnp.where(known, experts.astype(jnp.int32), num_experts)
