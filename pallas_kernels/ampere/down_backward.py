"""Backward of the down projection and the activation, which is recomputed from the saved pre-activations."""

from collections.abc import Callable
from operator import add

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.ampere.pieces import ROWS, Pieces
from pallas_kernels.ampere.row_matmul import RingEnd, row_matmul
from pallas_kernels.ampere.store import store_rows
from pallas_kernels.ampere.tile import HALF
from pallas_kernels.ampere.tuning import tuned_tile
from pallas_kernels.contract import Dispatch
from pallas_kernels.mosaic.row_groups import TileSchedule, bias_part, sum_in_order
from pallas_kernels.simt.elementwise import with_gradients
from pallas_kernels.simt.language import when
from pallas_kernels.simt.matrices import CHUNK
from pallas_kernels.simt.values import Float as Number
from pallas_kernels.simt.values import Long, minimum, select
from pallas_kernels.simt.warp import combine_lanes
from pallas_kernels.traced_once import traced_once
from pallas_kernels.tuning.parameters import MmaTuning


@traced_once("activation", "tuning")
def down_backward(
    dy: Float[Array, "T d"],
    w_down: Float[Array, "E n d"],
    b_down: Float[Array, "E d"] | None,
    pre_activations: tuple[Float[Array, "R n"], ...],
    row_weights: Float[Array, " R"],
    groups: Dispatch[TileSchedule],
    *,
    activation: Callable[..., Array],
    tuning: MmaTuning | None = None,
) -> tuple[tuple[Float[Array, "R n"], ...], Float[Array, "R n"], Float[Array, " R"]]:
    """Gradients of the pre-activations, weighted activation, gradient of the row weights; see the portable twin.

    At the end of a tile its pre-activations come through the ring of operand slots. The gradient of a row weight is the
    sum of 32 columns at a time, which are then added up in order.
    """
    num_rows, n = pre_activations[0].shape
    dtype = pre_activations[0].dtype
    tile = tuned_tile("down_backward", tuning, pre_activations[0], dy.shape[1], groups)
    pieces = Pieces(len(pre_activations), dtype.name, n, tile)
    derivative = with_gradients(activation, len(pre_activations))

    def begin(row_weights, where):
        rows = [where.row + where.lane // 4 + i for i in range(0, tile.warp_rows, 8)]
        return [row_weights[minimum(row, num_rows - 1)] for row in rows]

    def finish(row_weights, results, where, sums, piece, slot):
        of_rows, half = divmod(piece, 2)
        for i in range(2):
            first_row = of_rows * ROWS + 8 * i
            with when(where.rows > first_row):  # a branch of their own, as in `store.for_rows`
                d_hidden = [d[2 * i : 2 * i + 2] for d in sums[of_rows][half]]
                pre, weight = pieces.load(slot, where.lane, 8 * i), row_weights[2 * of_rows + i]
                finish_rows(results, where, first_row, where.halves[half][1], d_hidden, pre, weight)

    def finish_rows(results, where, first_row, column, d_hidden, pre, weight):
        """The end of 8 rows of half a panel. With more at once the registers of some activations run out."""
        d_pre, weighted = [[] for _ in pre], []
        d_weight = Number(0.0)
        for eight, of_columns in enumerate(d_hidden):
            known = column + eight * CHUNK < n
            own = []
            for i, d in enumerate(of_columns):
                hidden, gradients = derivative([p[eight][i] for p in pre], weight * d)
                d_weight = d_weight + select(known, d * hidden, 0.0)
                own.append((weight * hidden, *gradients))
            for result, values in zip((weighted, *d_pre), zip(*own, strict=True), strict=True):
                result.append(list(values))
        for result, values in zip(results, (*d_pre, weighted), strict=False):
            store_rows(result, where, first_row, column, values, n)
        row = where.lane // 4 + first_row
        total = combine_lanes(add, d_weight, 4)
        with when((where.lane % 4).equals(0) & (row < where.rows) & (column < n)):
            results[-1][Long(column // HALF) * num_rows + (where.row + row)] = total

    parts = jax.ShapeDtypeStruct((-(-n // HALF), num_rows), jnp.float32)
    *d_pre, weighted_hidden, d_row_weights = row_matmul(
        "moe_down_backward",
        groups.tiles,
        (dy,),
        groups.expert_token_indices,
        (w_down.astype(dtype),),
        transposed=True,
        num_columns=n,
        extra=row_weights.astype(jnp.float32),
        in_place=pre_activations,  # a tile has read a piece before it writes it
        results=[jax.ShapeDtypeStruct((num_rows, n), dtype), parts],
        end=RingEnd(pieces.number, pieces.start, begin, finish),
        tile=tile,
    )
    of_an_expert = jnp.arange(num_rows) < groups.expert_token_offsets[-1]
    d_row_weights = jnp.where(of_an_expert, sum_in_order(d_row_weights), 0)
    if b_down is not None:
        d_row_weights += bias_part(dy, b_down, groups)
    return tuple(d_pre), weighted_hidden, d_row_weights
