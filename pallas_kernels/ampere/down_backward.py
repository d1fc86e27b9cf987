"""Backward of the down projection and the activation, which is recomputed from the saved pre-activations."""

from collections.abc import Callable, Sequence
from operator import add
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import simt
from pallas_kernels.ampere.row_matmul import RingEnd, WarpOutput, row_matmul, store_rows
from pallas_kernels.ampere.tile import HALF, Tile, tuned_tile
from pallas_kernels.contract import Dispatch
from pallas_kernels.mosaic.row_groups import TileSchedule, bias_part, sum_in_order
from pallas_kernels.simt.elementwise import with_gradients
from pallas_kernels.simt.matrices import CHUNK, chunk_size, load_matrices, start_copy, unpack
from pallas_kernels.simt.threads import combine_lanes, when
from pallas_kernels.simt.values import WARP, Int, Long, Pointer, minimum, select
from pallas_kernels.traced_once import traced_once
from pallas_kernels.tuning.parameters import MmaTuning

ROWS = 16  # that a warp has of a piece


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
            with when(where.rows > first_row):  # a branch of their own, as in `for_rows`
                d_hidden = [d[2 * i : 2 * i + 2] for d in sums[of_rows][half]]
                pre, weight = pieces.load(slot, where.lane, 8 * i), row_weights[2 * of_rows + i]
                finish_rows(results, where, first_row, where.halves[half][1], d_hidden, pre, weight)

    def finish_rows(results, where, first_row, column, d_hidden, pre, weight):
        """The end of 8 rows of half a panel. With more at once the registers of some activations run out."""
        d_pre, weighted = [[] for _ in pre], []
        d_weight = simt.Float(0.0)
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


class Pieces(NamedTuple):
    """Pieces of a tile of other operands: 16 rows of half a panel of every warp, in the warp's own part of a slot.

    Attributes:
      arrays: how many operands there are.
      kind: dtype of their elements.
      columns: their width.
      tile: the block's.
    """

    arrays: int
    kind: str
    columns: int
    tile: Tile

    @property
    def number(self) -> int:
        """Pieces of a tile."""
        return self.tile.warp_rows // ROWS * 2

    @property
    def chunks(self) -> int:
        """Chunks of 16 bytes in a row."""
        return HALF // chunk_size(self.kind)

    @property
    def words(self) -> int:
        """Words of an array's piece."""
        return ROWS * self.chunks * 4

    def start(self, arrays: Sequence[Pointer], where: WarpOutput, piece: Int, slot: Pointer) -> None:
        """Starts the warp's copies. What is not the tile's is zero: others may be writing there."""
        elements = chunk_size(self.kind)
        own = self._own(slot)
        first_column = where.halves[0][1] + piece % 2 * (self.tile.columns // 2)
        for i in range(ROWS * self.chunks // WARP):
            item = where.lane + i * WARP
            row, chunk = item // self.chunks, item % self.chunks
            of_warp, column = piece // 2 * ROWS + row, first_column + chunk * elements
            known = (of_warp < where.rows) & (column < self.columns)
            start = Long(where.row + of_warp) * self.columns + column
            for number, array in enumerate(arrays):
                start_copy(own, self.word(row, chunk) + number * self.words, array, start, known)

    def load(self, slot: Pointer, lane: Int, first_row: int) -> list[list[list[simt.Float]]]:
        """The thread's numbers in 8 rows, from 0 or 8 on: of each array and each 8 columns, two."""
        own = self._own(slot)
        return [self._load(own.at(number * self.words), lane, first_row) for number in range(self.arrays)]

    def _load(self, piece: Pointer, lane: Int, first_row: int) -> list[list[simt.Float]]:
        if self.kind != "float32":
            words = load_matrices(piece, self.word(lane % 8 + first_row, lane // 8))
            return [unpack(word, self.kind) for word in words]
        row, quad = lane // 4 + first_row, lane % 4
        places = [self.word(row, quad // 2 + 2 * i) + quad % 2 * 2 for i in range(4)]
        return [[x.as_float() for x in piece.load_vector(place, 2).elements()] for place in places]

    def _own(self, slot: Pointer) -> Pointer:
        return slot.at(simt.thread() // WARP * (self.arrays * self.words))

    def word(self, row: Int, chunk: Int) -> Int:
        """The word where 16 bytes are. What lanes load together is in all 32 banks, as with `Panels.word`."""
        swizzle = row % 4 * 2 if self.kind == "float32" else (row >> 1) % 4
        return (row * self.chunks + (chunk ^ swizzle)) * 4
