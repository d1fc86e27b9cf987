"""Weight gradients: products that contract over an expert's rows, the gather on the contracted dimension.

Persistent blocks walk over 128 x 256 tiles of the experts' gradients. A k step is 64 rows of the expert: gathered token
rows on one side, rows stored by expert on the other. Rows past the expert's last are zero on both sides, since a
neighbour's NaN times zero would be NaN.

Where results are added to `sums`, the bulk copies that they leave by add them to what is in memory. A kernel adds to
each number once, so equal bits are no question of order. The result has to have the sums' own memory, as the launch
demands of XLA: other than where results are written, fresh memory would not do (see `mosaic/launches.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.contract import Dispatch, Sums
from pallas_kernels.hopper.gather import RowGather, row_chunks
from pallas_kernels.hopper.inline import K_STEP, PANEL, wgmma, zeros
from pallas_kernels.hopper.panels import leave, memory_to_add, store_buffers, store_panels, store_through, zero_rows
from pallas_kernels.hopper.tile_kernel import PANELS, TileKernel, in_panels
from pallas_kernels.mosaic.device import WIDTH_MULTIPLE
from pallas_kernels.mosaic.row_groups import GROUP_ROWS, TILE_COLUMNS, TILE_ROWS, TileSchedule
from pallas_kernels.traced_once import traced_once
from pallas_kernels.tuning import find_tuning
from pallas_kernels.tuning.parameters import KINDS, TileTuning


@traced_once("dtypes", "bias_dtypes", "tuning")
def up_weight_gradients(
    x: Float[Array, "T d"] | tuple[Float[Array, "T_part d"], ...],
    d_pre_activations: tuple[Float[Array, "R n"], ...],
    groups: Dispatch[TileSchedule],
    *,
    dtypes: tuple,
    bias_dtypes: tuple,
    sums: Sums | None = None,
    tuning: TileTuning | None = None,
) -> tuple[tuple[Float[Array, "E d n"], ...], tuple[Float[Array, "E n"], ...]]:
    """`X_gᵀ · dP` per projection, in one pass over the gathered token rows; see the portable twin.

    `x` may be in several arrays of as many tokens, one after the other; so may `dy` below.
    """
    x = x if isinstance(x, tuple) else (x,)
    dtypes = sums.dtypes if sums else dtypes
    contraction = RowContraction("up_weight_gradients", x, d_pre_activations, groups, dtypes[0], tuning, sums=sums)
    gradients = contraction.gradients()
    if not bias_dtypes:
        return gradients, ()
    # Sums over rows are products with ones: every row gathers the same token.
    is_row = groups.expert_token_indices < sum(part.shape[0] for part in x)
    rows_of_ones = groups._replace(expert_token_indices=jnp.where(is_row, jnp.int32(0), 1))
    ones = jnp.ones((1, WIDTH_MULTIPLE), x[0].dtype)
    biases = RowContraction("up_bias_gradients", (ones,), d_pre_activations, rows_of_ones, jnp.float32).gradients()
    return gradients, tuple(b[:, 0].astype(t) for b, t in zip(biases, bias_dtypes, strict=True))


@traced_once("dtype", "bias_dtype", "tuning")
def down_weight_gradients(
    weighted_hidden: Float[Array, "R n"],
    dy: Float[Array, "T d"] | tuple[Float[Array, "T_part d"], ...],
    row_weights: Float[Array, " R"],
    groups: Dispatch[TileSchedule],
    *,
    dtype,
    bias_dtype,
    sums: Sums | None = None,
    tuning: TileTuning | None = None,
) -> tuple[Float[Array, "E n d"], Float[Array, "E d"] | None]:
    """`(weights · A)ᵀ · dy_g`; see the portable twin."""
    # The gathered side on the left, where a tile is narrow: half the bytes to gather, and the product is transposed.
    dy = dy if isinstance(dy, tuple) else (dy,)
    operands = dy, (weighted_hidden,), groups, sums.dtypes[0] if sums else dtype, tuning
    (gradient,) = RowContraction("down_weight_gradients", *operands, transposed=True, sums=sums).gradients()
    if bias_dtype is None:
        return gradient, None
    stored = jnp.broadcast_to(row_weights.astype(dy[0].dtype)[:, None], (groups.num_rows, WIDTH_MULTIPLE))
    biases = RowContraction("down_bias_gradients", dy, (stored,), groups, bias_dtype, transposed=True)
    return gradient, biases.gradients()[0][:, 0]


class GradientTile(NamedTuple):
    """A tile of the gradient at place `expert`, and the rows `start` to `end` that it is summed over."""

    expert: jax.Array
    row_tile: jax.Array
    column_tile: jax.Array
    start: jax.Array
    end: jax.Array

    @property
    def steps(self):
        return (self.end - self.start + K_STEP - 1) // K_STEP


@dataclass
class RowContraction(TileKernel):
    """`tokens_gᵀ · s` over each expert's rows, or its transpose, for every `s` of `stored`, side by side in a tile.

    Attributes:
      kernel: its name in tables of tuned parameters; that of a bias gradient stands in none.
      tokens: `(T, a)` in one or several arrays, read by token index.
      stored: arrays `(R, b)`, read by row.
      groups: the rows by expert.
      result_dtype: float32, or a type of 16 bits, whose results wait in registers for the next tile's products.
      own_tuning: what the caller wants `tuning` to be, the order of an expert's tiles among it; None as tables say.
      transposed: results are `(E, b, a)` instead of `(E, a, b)`.
      sums: what the results are added to, of that dtype; None for no sums.
    """

    kernel: str
    tokens: tuple[jax.Array, ...]
    stored: tuple[jax.Array, ...]
    groups: Dispatch[TileSchedule]
    result_dtype: Any
    own_tuning: TileTuning | None = None
    transposed: bool = False
    sums: Sums | None = None

    tile = GradientTile

    def __post_init__(self):
        (_, d), (rows, n) = self.tokens[0].shape, self.stored[0].shape
        experts, self.dtype = self.groups.num_experts, self.tokens[0].dtype
        self.tuning = TileTuning()
        if self.kernel in KINDS:
            self.tuning = find_tuning(self.kernel, self.own_tuning, rows, self.dtype, d=d, n=n, E=experts)
        self.width = TILE_COLUMNS // len(self.stored)  # of a result's part of a tile
        self.tiles = (-(-d // TILE_ROWS), -(-n // self.width))  # of an expert
        self.num_tiles = experts * self.tiles[0] * self.tiles[1]
        chunks = row_chunks(self.groups.expert_token_indices, self.tokens)
        indices = {"offsets": self.groups.expert_token_offsets, "row_chunks": chunks}
        stored, self.copies = in_panels(self.stored)
        first, sums = self.sums and self.sums.first, self.sums and self.sums.arrays
        first = None if first is None else jnp.asarray(first, jnp.int32).reshape(1)
        self.operands = {**indices, "tokens": self.tokens, "stored": stored, "first": first, "sums": sums}
        self.gather = RowGather(self.tokens, rows=K_STEP, columns=TILE_ROWS)
        self.wide = jnp.dtype(self.result_dtype) == jnp.float32
        self.chunk_columns = 32 if self.wide else 64  # a chunk of the result is 128 bytes wide
        self.buffers = store_buffers(self.result_dtype, self.chunk_columns)
        self.scratch = {"zeroed": plgpu.Barrier(num_arrivals=2)}
        if self.sums:
            self.scratch |= memory_to_add(self.result_dtype, self.chunk_columns)

    def gradients(self) -> tuple[jax.Array, ...]:
        shape = (self.tokens[0].shape[1], self.stored[0].shape[1])
        shape = shape[::-1] if self.transposed else shape
        matrices = self.sums.arrays[0].shape[0] if self.sums else self.groups.num_experts
        result = jax.ShapeDtypeStruct((matrices, *shape), self.result_dtype)
        options = {"copies": self.copies, "in_place": {"sums": "results"}}
        return self.run(f"moe_{self.kernel}", results={"results": (result,) * len(self.stored)}, **options).results

    def find(self, refs, number):
        is_one, number = number < self.num_tiles, jnp.minimum(number, self.num_tiles - 1)
        in_expert = self.tiles[0] * self.tiles[1]
        expert = number // in_expert
        place = plgpu.planar_snake(
            lax.rem(number, in_expert), self.tiles, self.tuning.minor_dim, self.tuning.tile_width
        )
        rows = refs.offsets[expert], refs.offsets[expert + 1]
        return GradientTile(expert if refs.first is None else refs.first[0] + expert, *place, *rows), is_one

    def first_tokens(self, refs, tile: GradientTile):
        return self.gather.load_chunks(refs.row_chunks, tile.start)

    def fill(self, refs, tile: GradientTile, tokens, step, ahead, known_after):
        steps = tile.steps

        def load_step(k, slot, tokens, following):
            row = tile.start + k * K_STEP
            panels = self.width // PANEL
            for i, source in enumerate(refs.stored):
                slot.fetch_panels(source, (pl.ds(row, K_STEP),), tile.column_tile * self.width, i * panels, panels)
            offsets = self.gather.only_valid(tokens, tile.end - row)
            self.gather.copy(refs.tokens, offsets, slot.lhs, refs.landed, slot.number, tile.row_tile * TILE_ROWS)
            row += K_STEP
            if following:  # the last step is among those after which it is known
                row = jnp.where(k + 1 < steps, row, start_of(following))
            return self.gather.load_chunks(refs.row_chunks, row)

        def start_of(following):
            (tile, _), _ = following
            return tile.start

        following, find_following = ahead(lambda tile: ())
        step, tokens, following = refs.ring.fill(step, steps, load_step, tokens, following, find_following)
        after = known_after()
        # An empty expert has no step to load the next tile's first tokens in.
        first = partial(self.gather.load_chunks, refs.row_chunks)
        tokens = lax.cond(steps > 0, lambda t: t, lambda _: first(start_of(following)), tokens)
        return step, (following[0], tokens), after

    def nothing_held(self):
        columns = 8 if self.wide else TILE_COLUMNS  # nothing is held of a wide result
        return zeros(columns, self.result_dtype), GradientTile(*[jnp.int32(0)] * 5)

    def part(self, refs, tile: GradientTile):
        return tile, tile.steps

    def multiply(self, refs, turn, step, held, part: tuple[GradientTile, jax.Array], take):
        tile, steps = part

        def product(slot, row, accumulator, first):
            slot.wait_for_rows()

            # The gather left zeros in the rows past the expert's last; the other side must not hold a NaN there.
            @pl.when(tile.end - row < K_STEP)
            def _():
                own = pl.ds(refs.warpgroup * (TILE_COLUMNS // 2), TILE_COLUMNS // 2)
                zero_rows(slot.rhs.at[own], PANELS // 2, tile.end - row)
                plgpu.barrier_arrive(refs.zeroed)
                plgpu.barrier_wait(refs.zeroed)

            own = slot.lhs.at[pl.ds(refs.warpgroup * PANEL, PANEL)]
            return row + K_STEP, wgmma(accumulator, own, slot.rhs, first=first, transpose_lhs=True)

        def end(accumulator):
            if not self.wide:
                return accumulator.astype(self.result_dtype)
            for store in self.chunk_stores(refs, accumulator, tile):
                store()
            return held[0]

        under = self.stores(refs, turn, held)

        def run(step):
            step, accumulator, taken = refs.ring.multiply(step, steps, product, tile.start, under, last=take)
            return step, end(accumulator), taken

        def nothing_to_add(step):
            for store in under:
                store()
            return step, end(zeros(TILE_COLUMNS)), take()

        step, values, taken = lax.cond(steps > 0, run, nothing_to_add, step)
        return step, (values, tile), taken

    def stores(self, refs, turn, held):
        def unless_first(store: Callable):
            pl.when(turn > 0)(store)

        return [] if self.wide else [partial(unless_first, store) for store in self.chunk_stores(refs, *held)]

    def chunk_stores(self, refs, values, tile: GradientTile) -> list[Callable]:
        """The stores of `(64, 256)` values, a consumer's part of a tile, chunk by chunk of its columns."""
        return [partial(self.store, refs, values, tile, chunk) for chunk in range(TILE_COLUMNS // self.chunk_columns)]

    def store(self, refs, values, tile: GradientTile, chunk: int) -> None:
        width, column = self.chunk_columns, chunk * self.chunk_columns
        result, column_in_result = refs.results[column // self.width], column % self.width
        values = values[:, column : column + width]
        write = partial(store_panels, values=values, transposed=self.transposed)
        with store_through(refs.buffers, refs.warpgroup, chunk, write) as buffer:
            row = tile.row_tile * TILE_ROWS + refs.warpgroup * GROUP_ROWS
            columns = pl.ds(tile.column_tile * self.width + column_in_result, width)
            if not self.transposed:
                target = result.at[tile.expert, pl.ds(row, GROUP_ROWS), columns]
                leave(refs, buffer, target, add=self.sums is not None)
            else:
                for first in range(0, GROUP_ROWS, width):
                    target = result.at[tile.expert, columns, pl.ds(row + first, width)]
                    leave(refs, buffer.at[pl.ds(first, width)], target, add=self.sums is not None)
