"""What a router is given beside the logits: what a caller decides of each token, and what there is of each expert."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from blaze_jax.checks import as_array
from blaze_jax.dispatch import check_ids, int32_experts
from blaze_jax.router import Router
from pallas_kernels.contract import EMPTY_SLOT


class GivenRouting(NamedTuple):
    """What a caller decides of the routing of each token; None where that is left to the router.

    Attributes:
      mask: `(...)` bool, whether the token is routed.
      expert_ids: `(..., slots)` int32, its experts, -1 in an empty slot.
      segment_ids: `(...)` integers, equal for tokens of one text; only losses between neighbours look at them.
      seeds: `(..., 2)` uint32, random bits for its jitter.
    """

    mask: Bool[Array, "..."] | None = None
    expert_ids: Int[Array, "... slots"] | None = None
    segment_ids: Int[Array, "..."] | None = None
    seeds: UInt32[Array, "... 2"] | None = None

    def checked(self, shape: tuple[int, ...], num_experts: int) -> "GivenRouting":
        """All as arrays, E in the place of an id out of range.

        Raises:
          ValueError: they do not fit tokens of that leading shape, or, where values are known, an id is out of range.
        """
        mask = self.mask if self.mask is None else as_array("mask", self.mask)
        if mask is not None and (mask.dtype != bool or mask.shape != shape):
            raise ValueError(f"mask has dtype {mask.dtype} and shape {mask.shape}, must be bool of shape {shape}")
        segments = self.segment_ids if self.segment_ids is None else as_array("segment_ids", self.segment_ids)
        if segments is not None and not (jnp.issubdtype(segments.dtype, jnp.integer) and segments.shape == shape):
            dtype = segments.dtype
            raise ValueError(
                f"segment_ids has dtype {dtype} and shape {segments.shape}, must be integers of shape {shape}"
            )
        ids = self.expert_ids if self.expert_ids is None else as_array("expert_ids", self.expert_ids)
        if ids is None:
            return GivenRouting(mask, None, segments)
        slots = ids.shape[-1] if ids.ndim else 0
        if not jnp.issubdtype(ids.dtype, jnp.integer) or ids.shape[:-1] != shape or not 1 <= slots <= num_experts:
            raise ValueError(
                f"expert_ids has dtype {ids.dtype} and shape {ids.shape}, must be integers of shape "
                f"{(*shape, 'slots')} with 1 to {num_experts} slots"
            )
        check_ids("expert_ids", ids, num_experts)
        return GivenRouting(mask, int32_experts(ids, num_experts), segments)

    def treats_tokens_apart(self, router: Router) -> bool:
        """Whether the experts of a token depend on that token only."""
        return self.expert_ids is not None or router.treats_tokens_apart()

    def applied(
        self, logits: Float[Array, "T E"], router: Router
    ) -> tuple[Float[Array, "T E"], Int[Array, "T slots"] | None]:
        """The logits, -inf for tokens that go nowhere, and the given experts, E where a token has one again.

        A token for which no experts are given goes nowhere, unless that may be a choice of this router.
        """
        mask, ids = self.mask, self.expert_ids
        if ids is not None:
            if router.scoring != "relu":
                some = (ids != EMPTY_SLOT).any(-1)
                mask = some if mask is None else mask & some
            again = jnp.tril(ids[:, :, None] == ids[:, None], -1).any(-1) & (ids != EMPTY_SLOT)
            ids = jnp.where(again, logits.shape[1], ids)
            ids = ids if mask is None else jnp.where(mask[:, None], ids, EMPTY_SLOT)
        return (logits if mask is None else jnp.where(mask[:, None], logits, -jnp.inf)), ids


class ExpertFactors(NamedTuple):
    """What a router has of each expert beside the logits, `(E,)` or None; see `route`."""

    selection_bias: Float[Array, " E"] | None = None
    gain: Float[Array, " E"] | None = None

    def checked(self, num_experts: int, router: Router) -> "ExpertFactors":
        """Both as arrays; ValueError if one does not fit."""
        arrays = {name: a if a is None else as_array(name, a) for name, a in self._asdict().items()}
        for name, array in arrays.items():
            if array is None:
                continue
            if not jnp.issubdtype(array.dtype, jnp.floating):
                raise ValueError(f"{name} has dtype {array.dtype}, must be floating")
            if array.shape != (num_experts,):
                raise ValueError(f"{name} has shape {array.shape}, must be {(num_experts,)}")
        if self.gain is not None and router.weight_norm != "rms":
            raise ValueError(f"gain must be None, because {router} has weight_norm={router.weight_norm!r}")
        if self.selection_bias is not None and router.open_ended:
            raise ValueError(f"selection_bias must be None, because {router} takes experts by their logits alone")
        return ExpertFactors(**arrays)
