"""What a family of kernels is: a module with the operations of `Kernels`, which says what it can do.

The portable forms in `pallas_kernels.xla` are the contract of each operation: what it is passed, of which shapes, and
what it computes. Other families have operations of the same parameters, and may add some of their own. They give the
same results faster, and may differ in the last bits. Who calls kernels asks what they can do there, and not which
family they are.
"""

from collections.abc import Callable
from typing import Any, Protocol

from jaxtyping import Array, Int

from pallas_kernels import xla
from pallas_kernels.contract import Dispatch
from pallas_kernels.fp8 import CastWeight


class Kernels(Protocol):
    """A family of kernels.

    `groups` is what the family's own `dispatch` makes of the experts, or what `row_range`, `in_parts` or `of_experts`
    makes of that. Of rows of other groups, an operation that takes `into` keeps what it finds there: the results that
    the same call gave for those groups. Without `into` they hold anything. A family without `in_parts` and `of_experts`
    is given neither `into` nor tokens in several arrays, and need not take them.
    """

    @property
    def transformable(self) -> bool:
        """Whether jax differentiates and batches the operations itself; others are called for one example at a time."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether the kernels run while arrays travel between devices, so that beginning with what is there pays."""
        ...

    @property
    def in_parts(self) -> Callable[[Dispatch, int], tuple[Dispatch, tuple[Dispatch, ...]]] | None:
        """The function that cuts rows by part of the tokens; None where all are computed at once.

        `in_parts(groups, parts)` takes rows that were grouped by expert and part, as id `e * parts + p`. It returns all
        rows by expert, and for each part the rows of its tokens, by the same numbers.
        """
        ...

    @property
    def of_experts(self) -> Callable[..., Dispatch] | None:
        """The function that picks the rows of consecutive experts; None where all are computed at once.

        `of_experts(groups, first, experts, counted_from=None)` has the same numbers of rows, and counts experts from
        `counted_from`, the first one whose weights the operations get; None for `first`.
        """
        ...

    @property
    def in_fp8(self) -> Callable[[], "Kernels"] | None:
        """The function that gives the family with its row products in 8 bits, see `fp8`; None where there is none."""
        ...

    @property
    def unrounded(self) -> "Kernels":
        """The family that does not round to 8 bits: itself, unless `in_fp8` gave it."""
        ...

    @property
    def fp8_multiple(self) -> int:
        """What both widths of the experts must be multiples of for products in 8 bits."""
        ...

    @property
    def down_operands(self) -> Callable[[Array, list[Array]], tuple[Any, list[Any]]] | None:
        """What `down_projection` takes for all blocks of columns: made of the rows, and of each block of experts.

        The rows are used for nothing else. None where they are taken as they are. A family that has it takes `bound` in
        its up projection, what bounds the activation or None, and with one gives `Scaled` rows, which need no more.
        """
        ...

    @property
    def up_operands(self) -> Callable[..., tuple[Any, list[Any]]] | None:
        """The like for `up_backward`: `up_operands(d_pre_activations, weights, in_place)`.

        Only where `in_place` says so the rows are used for nothing else.
        """
        ...

    @property
    def cast_weights(self) -> Callable[..., tuple[tuple[CastWeight, ...], CastWeight]] | None:
        """What the products take in the place of weights: `cast_weights(ups, down, dtype, bounded)`; None as above.

        For rows of `dtype`; `bounded` says whether the up projection is passed a `bound`.
        """
        ...

    def decodes(self, weights: tuple[Any, ...], dtype: Any, /) -> bool:
        """Whether products of rows of that type take the compressed weights of one of them as they are."""
        ...

    def unsupported(self, x: Array, weights: tuple[Array, ...], biases: tuple[Array, ...], /) -> str | None:
        """Why experts of these arrays cannot run, or None: tokens, up weights and the down weights, all biases."""
        ...

    def router_unsupported(self, logits: Array, experts_per_token: int, /) -> str | None:
        """Why the router cannot take these logits, or None."""
        ...

    def dispatch_unsupported(self, num_experts: int, /) -> str | None:
        """Why rows of so many experts, or groups of experts and parts, cannot be grouped, or None."""
        ...

    def why_kernels_spill(self) -> str | None:
        """The reason why the kernels are slow on this machine and how to mend it, or None."""
        ...

    def row_range(self, groups: Dispatch, first_row: Int[Array, ""] | int, num_rows: int) -> Dispatch:
        """`num_rows` rows from `first_row` on, by the same expert; see the portable form."""
        ...

    router = staticmethod(xla.router)
    router_backward = staticmethod(xla.router_backward)
    token_cutoffs = staticmethod(xla.token_cutoffs)
    experts_added = staticmethod(xla.experts_added)
    dispatch = staticmethod(xla.dispatch)
    column_block = staticmethod(xla.column_block)
    up_projection = staticmethod(xla.up_projection)
    down_projection = staticmethod(xla.down_projection)
    combine = staticmethod(xla.combine)
    down_backward = staticmethod(xla.down_backward)
    up_backward = staticmethod(xla.up_backward)
    down_weight_gradients = staticmethod(xla.down_weight_gradients)
    up_weight_gradients = staticmethod(xla.up_weight_gradients)
