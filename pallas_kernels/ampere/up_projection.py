"""Up projection: gathered token rows through the gate and up weights of their expert, then the activation."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.ampere.row_matmul import row_matmul
from pallas_kernels.ampere.store import add_bias, bias_of, for_rows, store_half
from pallas_kernels.ampere.tuning import tuned_tile
from pallas_kernels.contract import Dispatch
from pallas_kernels.mosaic.row_groups import TileSchedule
from pallas_kernels.simt.elementwise import value
from pallas_kernels.traced_once import traced_once
from pallas_kernels.tuning.parameters import MmaTuning


@traced_once("activation", "keep_pre_activations", "tuning")
def up_projection(
    x: Float[Array, "T d"],
    weights: tuple[Float[Array, "E d n"], ...],
    biases: tuple[Float[Array, "E n"], ...],
    groups: Dispatch[TileSchedule],
    *,
    activation: Callable[..., Array],
    keep_pre_activations: bool = True,
    tuning: MmaTuning | None = None,
) -> tuple[tuple[Float[Array, "R n"], ...], Float[Array, "R n"]]:
    """Pre-activations (gate and up, or up alone) and activation of every row; see the portable twin.

    A tile holds equal parts of each projection, and a warp the same columns of both, so that the activation is computed
    from the float32 sums.
    """
    weights = tuple(w.astype(x.dtype) for w in weights)
    n = weights[0].shape[2]

    def end(biases, results, where, sums):
        *pre_activations, hidden = results
        bias = [bias_of(biases[p] if biases else None, where, column, n) for p, column in where.halves]

        def end_rows(first, of_rows):
            pre = [add_bias(values, own) for values, own in zip(of_rows, bias, strict=True)]
            if pre_activations:
                for values, (projection, column) in zip(pre, where.halves, strict=True):
                    store_half(pre_activations[projection], where, first, column, values, n)
            operands = [pre] if len(weights) == 2 else [[half] for half in pre]  # of each activation
            for own, (_, column) in zip(operands, where.halves, strict=False):
                activated = [
                    [value(activation, numbers) for numbers in zip(*of_columns, strict=True)]
                    for of_columns in zip(*own, strict=True)
                ]
                store_half(hidden, where, first, column, activated, n)

        for_rows(where, sums, end_rows)

    rows = jax.ShapeDtypeStruct((groups.num_rows, n), x.dtype)
    *pre_activations, hidden = row_matmul(
        "moe_up_projection",
        groups.tiles,
        (x,),
        groups.expert_token_indices,
        weights,
        num_columns=n,
        extra=tuple(b.astype(jnp.float32) for b in biases),
        results=[rows] * (len(weights) * keep_pre_activations + 1),
        end=end,
        tile=tuned_tile("up_projection", tuning, rows, x.shape[1], groups),
    )
    return tuple(pre_activations), hidden
