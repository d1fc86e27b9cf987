"""Backward of the down projection and the activation, which is recomputed from the saved pre-activations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.codings import is_quantized
from pallas_kernels.contract import Dispatch, Quantized
from pallas_kernels.hopper.decoded_matmul import DecodedPanelRowMatmul
from pallas_kernels.hopper.decoding import TileDecoder
from pallas_kernels.hopper.elementwise import value_and_gradients
from pallas_kernels.hopper.fp8 import backward_weights, quantize_tokens
from pallas_kernels.hopper.gather import row_chunks
from pallas_kernels.hopper.inline import K_STEP, PANEL
from pallas_kernels.hopper.panels import load_columns, load_interleaved, store_columns, store_interleaved, store_sums
from pallas_kernels.hopper.quantization import BLOCK, as_dtype, load_quantized
from pallas_kernels.hopper.row_matmul import PanelRowMatmul, by_tiles, decoded, ragged_copy
from pallas_kernels.hopper.tile_kernel import MOST_FOR_CONSUMERS, PANELS
from pallas_kernels.mosaic.row_groups import (
    GROUP_ROWS,
    TILE_COLUMNS,
    TILE_ROWS,
    TileSchedule,
    bias_part,
    rows_of_tiles,
    sum_in_order,
)
from pallas_kernels.traced_once import traced_once
from pallas_kernels.tuning import find_tuning
from pallas_kernels.tuning.parameters import TileTuning

ROWS = plgpu.Layout.WGMMA.reduce(1)
PIECE = 16  # columns worked on at a time, what the registers have room for in addition to a tile
A_ROW_EACH = plgpu.Layout.WG_STRIDED((TILE_ROWS,), vec_size=1)  # of a tile's, for each thread of a consumer
WARPS = 4  # of a consumer
COPIES = TILE_COLUMNS // TILE_ROWS


@traced_once("activation", "fp8", "tuning")
def down_backward(
    dy: Float[Array, "T d"],
    w_down: Float[Array, "E n d"],
    b_down: Float[Array, "E d"] | None,
    pre_activations: tuple[Float[Array, "R n"] | Quantized, ...],
    row_weights: Float[Array, " R"],
    groups: Dispatch[TileSchedule],
    *,
    activation: Callable[..., Array],
    into: Float[Array, "R n"] | tuple[tuple[Float[Array, "R n"], ...], Float[Array, "R n"]] | None = None,
    fp8: bool = False,
    tuning: TileTuning | None = None,
) -> tuple[tuple[Float[Array, "R n"], ...], Float[Array, "R n"], Float[Array, " R"]]:
    """Gradients of the pre-activations, weighted activation, gradient of the row weights; see the portable twin.

    At the end of a tile its pre-activations come through the ring of operand slots, 64 columns a slot, and the results
    leave from there: the ring runs on over the end of a tile, as deep as for the products. A panel of quantized ones
    comes twice, for one half of its numbers and for the other. `into` is the weighted activation of other groups, whose
    rows are kept; with quantized pre-activations, which keep their place, their gradients and then that. With `fp8`,
    `dy` and the weights are multiplied in 8 bits.
    """
    num_pre, num_rows = len(pre_activations), groups.num_rows
    n, dtype = w_down.shape[1], dy.dtype
    quantized, d_pre_into = isinstance(pre_activations[0], Quantized), None
    if quantized:
        pre_activations = as_dtype(pre_activations, dtype)
        d_pre_into, into = into or (None, None)
    row_weights, column_tiles = row_weights.astype(jnp.float32), -(-n // TILE_COLUMNS)
    tile_tuning = find_tuning("down_backward", tuning, num_rows, dtype, d=dy.shape[1], n=n, E=w_down.shape[0])
    tokens, decoding = dy, None
    if fp8:
        (scaled,) = backward_weights([w_down], dtype)
        tokens, of_tokens = quantize_tokens(dy, groups)
        w_down, decoding = scaled.values, (of_tokens, by_tiles([scaled.scales], column_tiles))
    fetched: Any
    decoder = None
    if is_quantized(w_down) and not quantized:
        decoder = TileDecoder(w_down, transposed=True)
        fetched = decoder.operands(w_down)
    else:
        fetched = w_down.astype(dtype)

    def load(refs, tile, k, slot):
        if decoder:
            decoder.fetch(refs, slot, (refs.w_down,), tile.expert, tile.column_tile * TILE_COLUMNS, k)
            return
        for first in range(0, TILE_COLUMNS, TILE_ROWS):  # as many copies as for a panel
            columns = pl.ds(tile.column_tile * TILE_COLUMNS + first, TILE_ROWS)
            block = refs.w_down.at[tile.expert, columns, pl.ds(k * K_STEP, K_STEP)]
            slot.fetch(block, slot.rhs.at[pl.ds(first, TILE_ROWS)])

    def load_panel(refs, tile, panel, slot):
        first = tile.column_tile * TILE_COLUMNS + panel * PANEL
        columns = pl.ds(first // BLOCK * PANEL if quantized else first, PANEL)
        for i, pre in enumerate((refs.pre[0], refs.pre[-1])):  # an ungated one twice
            pre = pre.values if quantized else pre
            slot.fetch(pre.at[pl.ds(tile.row, TILE_ROWS), columns], slot.rhs.at[pl.ds(i * TILE_ROWS, TILE_ROWS)])

    def leave_panel(refs, part, panel, buffers):
        """Starts the copies of a panel's results."""
        plgpu.commit_smem()
        columns = pl.ds(part.column_tile * TILE_COLUMNS + panel * PANEL, PANEL)
        for buffer, output in zip(buffers, (*refs.d_pre, refs.weighted_hidden), strict=True):
            ragged_copy(buffer, output, part, columns)
        plgpu.commit_smem_to_gmem_group()

    def end_block(refs, part, row_weights, accumulator, panel, slot):
        """What `end_panel` does, of compressed weights: of all rows of a block, the transpose."""
        own = [slot.rhs.at[pl.ds(i * TILE_ROWS, TILE_ROWS)] for i in range(num_pre)]
        leaving = (*own, slot.lhs)
        line = ((part.row_tile * column_tiles + part.column_tile) * PANELS + panel) * WARPS
        for first in range(0, TILE_ROWS, PIECE):
            of_rows = row_weights.at[pl.ds(first, PIECE)]
            of_rows = plgpu.load(of_rows, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            of_rows = lax.broadcast_in_dim(of_rows, (GROUP_ROWS, PIECE), (1,))
            d_hidden = accumulator[:, first : first + PIECE]
            pre = [load_interleaved(b, first, PIECE) for b in own]
            hidden, d_pre = value_and_gradients(activation, pre, of_rows * d_hidden)
            store_sums(refs.d_row_weights, line, first, d_hidden * hidden)
            for buffer, result in zip(leaving, (*d_pre, of_rows * hidden), strict=True):
                store_interleaved(buffer, first, result.astype(dtype))
        leave_panel(refs, part, panel, leaving)

    def begin(refs, part):
        if decoder:
            every = refs.row_weights.at[pl.ds(part.row, TILE_ROWS)]
            row_weights = refs.own_row_weights.at[refs.warpgroup]
            row_weights[...] = plgpu.load(every, layout=A_ROW_EACH, optimized=False)
            plgpu.commit_smem()
            return partial(end_block, refs, part, row_weights)
        row_weight = plgpu.load(refs.row_weights.at[pl.ds(part.row, GROUP_ROWS)], layout=ROWS, optimized=False)
        scales = None
        if quantized:
            scales = [[scale(refs, part, pre, block) for pre in refs.pre] for block in range(TILE_COLUMNS // BLOCK)]
        return partial(end_panel, refs, part, row_weight, scales)

    def scale(refs, part, pre, block):
        line = jnp.minimum(part.column_tile * (TILE_COLUMNS // BLOCK) + block, pre.scales.shape[0] - 1)
        return plgpu.load(pre.scales.at[line, pl.ds(part.row, GROUP_ROWS)], layout=ROWS, optimized=False)

    def end_panel(refs, part, row_weight, scales, accumulator, panel, slot):
        own = [slot.rhs.at[pl.ds(i * TILE_ROWS + refs.warpgroup * GROUP_ROWS, GROUP_ROWS)] for i in range(num_pre)]
        # The results leave from where the pre-activations were, and from the left operand's part of the slot.
        leaving = (*own, slot.lhs.at[pl.ds(refs.warpgroup * GROUP_ROWS, GROUP_ROWS)])
        weight = lax.broadcast_in_dim(row_weight, (GROUP_ROWS, PIECE), (0,))
        d_weight = plgpu.layout_cast(jnp.zeros((GROUP_ROWS,), jnp.float32), ROWS)
        for first in range(0, PANEL, PIECE):
            column = panel * PANEL + first
            d_hidden = decoded(refs, part, accumulator[:, column : column + PIECE], column)
            if quantized:
                block, half = divmod(panel, 2)
                pre = [load_quantized(b, first, half, s) for b, s in zip(own, scales[block], strict=True)]
            else:
                pre = [load_columns(b, first) for b in own]
            hidden, d_pre = value_and_gradients(activation, pre, weight * d_hidden)
            d_weight += (d_hidden * hidden).sum(axis=1)
            for buffer, result in zip(leaving, (*d_pre, weight * hidden), strict=True):
                store_columns(buffer, first, result.astype(dtype))
        leave_panel(refs, part, panel, leaving)
        rows = pl.ds(refs.warpgroup * GROUP_ROWS, GROUP_ROWS)
        line = (part.row_tile * column_tiles + part.column_tile) * PANELS + panel
        refs.d_row_weights.at[line, rows][...] = d_weight

    rows = jax.ShapeDtypeStruct((num_rows, n), dtype)
    parts = column_tiles * PANELS * (WARPS if decoder else 1)  # of a row's sum
    sums = jax.ShapeDtypeStruct((groups.tiles.num_tiles * parts, TILE_ROWS), jnp.float32)
    gathered = {"tokens": (tokens,), "row_chunks": row_chunks(groups.expert_token_indices, (tokens,))}
    others = {"w_down": fetched, "scales": decoding, "row_weights": row_weights, "pre": pre_activations, "into": into}
    kernel = (DecodedPanelRowMatmul if decoder else PanelRowMatmul)(
        schedule=groups.tiles,
        operands={**gathered, **others} | ({"d_pre_into": d_pre_into} if quantized else {}),
        column_tiles=column_tiles,
        k_steps=-(-tokens.shape[1] // K_STEP),
        load=load,
        load_panel=load_panel,
        begin=begin,
        tuning=tile_tuning,
        transposed_weights=True,
        packed=fp8,
        decoder=decoder,
    )
    out = kernel.run(
        "moe_down_backward",
        results={"d_pre": (rows,) * num_pre, "weighted_hidden": rows, "d_row_weights": sums},
        # A tile has read its pre-activations before it writes their gradients.
        in_place={"d_pre_into" if quantized else "pre": "d_pre", "into": "weighted_hidden"},
        copies=COPIES,
        registers=MOST_FOR_CONSUMERS if decoder else (88, 208),
    )
    d_row_weights = out.d_row_weights.reshape(-1, parts, TILE_ROWS).swapaxes(0, 1)
    d_row_weights = rows_of_tiles(sum_in_order(d_row_weights), groups.tiles, num_rows)
    if b_down is not None:
        d_row_weights += bias_part(dy, b_down, groups)
    return out.d_pre, out.weighted_hidden, d_row_weights
