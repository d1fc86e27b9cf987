"""The kernels that are a row matmul and little else: up and down projection, and back through the up projection.

Rows of the last two exist a block of columns at a time: the layer sums a block of rows by token before it asks for the
next one, so it never holds rows of full width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.codings import is_quantized
from pallas_kernels.contract import Dispatch, Quantized
from pallas_kernels.fp8 import Scaled, bounded_scales, largest_of_experts, token_norms
from pallas_kernels.hopper.decoded_matmul import DecodedRowMatmul, of_blocks, store_block
from pallas_kernels.hopper.decoding import TileDecoder
from pallas_kernels.hopper.elementwise import value
from pallas_kernels.hopper.fp8 import quantize_tokens, up_weights
from pallas_kernels.hopper.gather import row_chunks
from pallas_kernels.hopper.inline import K_STEP, PANEL, pack_e4m3
from pallas_kernels.hopper.panels import store_of_rows
from pallas_kernels.hopper.quantization import BLOCK, as_dtype, empty_quantized, packed_width, quantize_panels
from pallas_kernels.hopper.row_matmul import HeldRowMatmul, RowTile, by_tiles, of_rows, store_rows, tile_panel
from pallas_kernels.hopper.tile_kernel import MOST_FOR_CONSUMERS, in_panels
from pallas_kernels.mosaic.device import num_sms
from pallas_kernels.mosaic.interpreter import blocks
from pallas_kernels.mosaic.row_groups import TILE_COLUMNS, TILE_ROWS, TileSchedule
from pallas_kernels.traced_once import traced_once
from pallas_kernels.tuning import find_tuning
from pallas_kernels.tuning.parameters import ColumnBlock, TileTuning, with_columns

TILE_BLOCKS = TILE_COLUMNS // BLOCK


@traced_once("activation", "keep_pre_activations", "quantize", "fp8", "bound", "tuning")
def up_projection(
    x: Float[Array, "T d"],
    weights: tuple[Float[Array, "E d n"], ...],
    biases: tuple[Float[Array, "E n"], ...],
    groups: Dispatch[TileSchedule],
    *,
    activation: Callable[..., Array],
    keep_pre_activations: bool = True,
    quantize: bool = False,
    into: tuple[tuple[Float[Array, "R n"] | Quantized, ...], Float[Array, "R n"] | Scaled] | None = None,
    fp8: bool = False,
    bound: Callable[..., Array] | None = None,
    tuning: TileTuning | None = None,
) -> tuple[tuple[Float[Array, "R n"] | Quantized, ...], Float[Array, "R n"] | Scaled]:
    """Pre-activations (gate and up, or up alone) and activation of every row; see the portable twin.

    A tile holds as many columns of each projection side by side, so one wgmma multiplies a gathered tile
    with both. The activation is computed from the float32 accumulators and stored at the end of its tile; the packed
    pre-activations follow under the next tile. Where they are not kept, the activation does. Of those that are
    quantized, two panels side by side become one; see `quantization`.

    `into` holds results of the same call for other groups, whose rows are kept. Compressed weights are decoded on their
    way; see `decoding`. With `fp8`, tokens and weights are multiplied in 8 bits; see `pallas_kernels.fp8`. With the
    activation's `bound` as well, activations are written in 8 bits, two panels as one like pre-activations that are
    quantized, at scales that are known before the products.
    """
    (num_experts, d, n), dtype = weights[0].shape, x.dtype
    if quantize and not fp8:  # what packs two panels of a projection as one decodes nothing
        weights = tuple(weight.astype(dtype) if is_quantized(weight) else weight for weight in weights)
    decoder = None
    if is_quantized(weights[0]) and not fp8:
        decoder = TileDecoder(weights[0], transposed=False, side_by_side=len(weights))
    found = find_tuning("up_projection", tuning, groups.num_rows, dtype, d=d, n=n, E=num_experts)
    narrow = not (quantize or fp8 or decoder)  # which pack two panels of a projection as one, or share out blocks
    found, columns = _with_columns(found, groups, n * len(weights), narrow=narrow)
    width = columns // len(weights)  # of a projection's part of a tile
    panels = width // PANEL
    of_hidden = width // 2 if bound else width  # columns of a tile's activations
    column_tiles = -(-n // width)

    def place(panel, column_tile):
        """The projection that a panel of a tile belongs to, and its first column there."""
        return panel // panels, column_tile * width + panel % panels * PANEL

    def load(refs, tile, k, slot):
        steps, first = pl.ds(k * K_STEP, K_STEP), tile.column_tile * width
        if decoder:
            decoder.fetch(refs, slot, refs.weights, tile.expert, first, k)
            return
        for i, weight in enumerate(refs.weights):
            if fp8:
                own = slot.rhs.at[pl.ds(i * width, width)]
                slot.fetch(weight.at[tile.expert, pl.ds(first, width), steps], own)
            else:
                slot.fetch_panels(weight, (tile.expert, steps), first, i * panels, panels)

    def finish(refs, part, accumulator):
        packed, activated, kept = {}, [], {}
        bounds: Any = bounds_of_rows(refs, part) if bound else None
        scales: Any = None
        for panel in range(panels):
            own = range(panel, len(weights) * panels, panels)  # of each projection
            pre = [tile_panel(refs, part, accumulator, p) for p in own]
            for p, values in zip(own, pre, strict=True):
                kept[p] = values
                packed[p] = None if quantize else values.astype(dtype)
            activated.append(value(activation, pre).astype(dtype))
            if bound:
                scales = bounded_scales(bound, *bounds) if panel == 0 else scales
                if panel % 2:
                    pair = (hidden.astype(jnp.float32) for hidden in activated[-2:])
                    pair = (hidden * lax.broadcast_in_dim(1 / scales, hidden.shape, (0,)) for hidden in pair)
                    activated[-2:] = [pack_e4m3(*pair, dtype)]
                    if keep_pre_activations:
                        store_hidden(refs, part, panel // 2, activated[-1])
            elif keep_pre_activations:
                store_hidden(refs, part, panel, activated[-1])
        if bound:
            own_rows = jnp.where(part.column_tile == 0, part.rows, 0)
            store_of_rows(refs.written[1].scales, 0, part.row, scales, own_rows)
        if quantize:
            return lax.concatenate([quantized(refs, part, kept, block) for block in range(TILE_BLOCKS)], 1)
        return lax.concatenate([packed[p] for p in sorted(packed)] if keep_pre_activations else activated, 1)

    def bounds_of_rows(refs, part):
        """What the rows' scales are made of, loaded before the arithmetic that hides how long that takes."""
        of_tokens, largest = refs.bounds
        return of_rows(of_tokens, part), [largest[part.expert, i] for i in range(2 * len(weights))]

    def store_hidden(refs, part, panel, values):
        """Stores a panel of the activation, the last of the tile's with an odd turn: others begin with an even one."""
        if panel == 0:  # there may be one panel, which would come in the turn of the one before
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        output = refs.written[1].values if bound else refs.written[1]
        column = part.column_tile * of_hidden + panel * PANEL
        store_rows(refs, part, panel - of_hidden // PANEL, values, output, column)

    def quantized(refs, part, pre, block):
        projection, column = place(2 * block, part.column_tile)
        numbers, scales = quantize_panels(pre[2 * block], pre[2 * block + 1], dtype)
        own, line = refs.written[0][projection].scales, column // BLOCK
        store_of_rows(own, line, part.row, scales, jnp.where(line < own.shape[0], part.rows, 0))
        return numbers

    def store(refs, part, panel, values):
        if not keep_pre_activations:
            store_hidden(refs, part, panel, values)
            return
        projection, column = place(2 * panel if quantize else panel, part.column_tile)
        pre_activations = refs.written[0][projection]
        output, column = (pre_activations.values, column // 2) if quantize else (pre_activations, column)
        store_rows(refs, part, panel, values, output, column)

    def store_blocks(refs, tile: RowTile, blocks):
        turn, pre_activations = 0, refs.written[0]
        together = [blocks] if len(weights) > 1 else [[block] for block in blocks]
        for i, own in enumerate(together):
            column = tile.column_tile * width + (2 * i + refs.warpgroup) * PANEL

            def activated(first, count, own=own):
                return value(activation, [block(first, count) for block in own])

            stored = [(refs.written[1], activated)]
            if keep_pre_activations:
                stored = [*zip(pre_activations, own, strict=True), *stored]
            for output, values in stored:
                store_block(refs, tile, turn, values, output, column)
                turn += 1

    scales, bounds, copies = None, None, len(weights)
    fetched: Any
    if decoder:
        fetched, copies = tuple(map(decoder.operands, weights)), decoder.copies
    elif fp8:
        scaled, of_columns = zip(*(up_weights(weight, dtype, bool(bound)) for weight in weights), strict=True)
        if bound:
            row_norms = token_norms(x).at[groups.expert_token_indices].get(mode="fill", fill_value=0)
            bounds = row_norms, largest_of_experts(of_columns, biases)
        x, of_tokens = quantize_tokens(x, groups)
        scales = of_tokens, by_tiles([weight.scales for weight in scaled], column_tiles, columns)
        fetched = tuple(weight.values for weight in scaled)
    else:
        fetched, copies = in_panels(tuple(weight.astype(dtype) for weight in weights), len(weights) * panels)
    bias = by_tiles(biases, column_tiles, columns) if biases else None
    if decoder and bias is not None:
        bias = of_blocks(bias)
    rows = jax.ShapeDtypeStruct((groups.num_rows, n), dtype)
    kept = jax.eval_shape(partial(empty_quantized, groups.num_rows, n, dtype)) if quantize else rows
    hidden: Any = rows
    if bound:
        shapes = ((groups.num_rows, packed_width(n)), dtype), ((1, groups.num_rows), jnp.float32)
        hidden = Scaled(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))  # pyright: ignore[reportArgumentType]
        if into is not None:
            assert isinstance(into[1], Scaled)
            into = into[0], into[1]._replace(scales=into[1].scales[None])
    if quantize and into is not None:
        into = as_dtype(into[0], dtype), into[1]
    gathered = {"tokens": (x,), "row_chunks": row_chunks(groups.expert_token_indices, (x,))}
    operands = {**gathered, "weights": fetched, "scales": scales, "bounds": bounds, "bias": bias, "into": into}
    walk: dict[str, Any] = {"schedule": groups.tiles, "column_tiles": column_tiles, "k_steps": -(-x.shape[1] // K_STEP)}
    walk |= {"operands": operands, "load": load, "tuning": found}
    if decoder:
        kernel = DecodedRowMatmul(**walk, store=store_blocks, decoder=decoder)
    else:
        held_columns = TILE_BLOCKS * PANEL if quantize else columns if keep_pre_activations else of_hidden
        forms: dict[str, Any] = {"transposed_weights": fp8, "packed": fp8, "held_columns": held_columns}
        kernel = HeldRowMatmul(**walk, columns=columns, finish=finish, store=store, **forms)
    pre_activations, hidden = kernel.run(
        "moe_up_projection",
        results={"written": ((kept,) * len(weights) if keep_pre_activations else (), hidden)},
        in_place={"into": "written"},
        copies=copies,
        registers=MOST_FOR_CONSUMERS if decoder or fp8 else (88, 208),
    ).written
    if bound:
        hidden = hidden._replace(scales=hidden.scales[0])
    return as_dtype(pre_activations, jnp.int16) if quantize else pre_activations, hidden


def column_block(num_rows: int, d: int, n: int, num_experts: int, dtype, *, tuning: ColumnBlock | None = None) -> int:
    """Columns of a block at most, as tuned for this layer; see the portable twin."""
    return find_tuning("column_block", tuning, num_rows, dtype, d=d, n=n, E=num_experts).columns


@traced_once("num_columns", "tuning")
def down_projection(
    hidden: Float[Array, "R n"] | Scaled,
    w_down: Float[Array, "E n d"] | Scaled,
    b_down: Float[Array, "E d"] | None,
    groups: Dispatch[TileSchedule],
    first_column: Int[Array, ""] | int,
    num_columns: int,
    *,
    into: Float[Array, "R columns"] | None = None,
    tuning: TileTuning | None = None,
) -> Float[Array, "R columns"]:
    """Columns `first_column` to `first_column + num_columns` of every row's expert output; see the portable twin."""
    block, pairs = (first_column, num_columns), ((hidden, w_down),)
    return _rows_of_block("down_projection", pairs, groups, *block, b_down, into, tuning, transposed=False)


@traced_once("num_columns", "tuning")
def up_backward(
    d_pre_activations: tuple[Float[Array, "R n"] | Scaled, ...],
    weights: tuple[Float[Array, "E d n"] | Scaled, ...],
    groups: Dispatch[TileSchedule],
    first_column: Int[Array, ""] | int,
    num_columns: int,
    *,
    into: Float[Array, "R columns"] | None = None,
    tuning: TileTuning | None = None,
) -> Float[Array, "R columns"]:
    """`Σ dP · Wᵀ` over the projections, into one accumulator; see the portable twin."""
    block, pairs = (first_column, num_columns), tuple(zip(d_pre_activations, weights, strict=True))
    return _rows_of_block("up_backward", pairs, groups, *block, None, into, tuning, transposed=True)


def _with_columns(tuning: TileTuning, groups: Dispatch[TileSchedule], num_columns: int, *, narrow: bool = True):
    """The parameters, and how many of `num_columns` a tile has."""
    wide_tiles = groups.tiles.num_tiles * -(-num_columns // TILE_COLUMNS)
    return with_columns(tuning, wide_tiles, blocks(num_sms()), narrow=narrow)


def _rows_of_block(kernel, pairs, groups, first_column, num_columns, bias, into, tuning, *, transposed):
    """The sum over `pairs` of rows `(R, k)` times a block of columns of weights `(E, k, d)`, or `(E, d, k)` transposed.

    Of pairs in 8 bits, from `fp8.down_operands` or `fp8.up_operands`, all weights are. The `bias` is `(E, d)` or None.
    Rows of other groups are kept from `into`, if that is given.
    """
    first_column, scales, packed = jnp.asarray(first_column, jnp.int32), None, isinstance(pairs[0][0], Scaled)
    if packed:
        transposed, scales = True, tuple(operand.scales for operand in pairs[0])
        pairs = tuple((rows.values, weights.values) for rows, weights in pairs)
    (num_rows, _), dtype, columns_at = pairs[0][0].shape, pairs[0][0].dtype, 1 if transposed else 2
    shape = pairs[0][1].shape
    depth = shape[3 - columns_at]  # rows of 8 bits may be wider, see `fp8.quantize_together`
    steps_each = -(-depth // K_STEP)
    sizes = {"d": shape[columns_at], "n": depth * (1 + packed), "E": shape[0]}
    decoder = TileDecoder(pairs[0][1], transposed=transposed) if is_quantized(pairs[0][1]) else None
    found = find_tuning(kernel, tuning, num_rows, dtype, **sizes)
    found, columns = _with_columns(found, groups, num_columns, narrow=decoder is None)
    panels, column_tiles = columns // PANEL, -(-num_columns // columns)

    def of_columns(values):
        return by_tiles([lax.dynamic_slice_in_dim(values, first_column, num_columns, axis=1)], column_tiles, columns)

    scales = scales and (scales[0], of_columns(scales[1]))
    bias = None if bias is None else of_columns(bias)
    if decoder:
        bias = None if bias is None else of_blocks(bias)
        pairs = tuple((rows, decoder.operands(weights)) for rows, weights in pairs)
    elif pairs[0][1].dtype != dtype:  # converted for the block's columns alone
        converted = (lax.dynamic_slice_in_dim(w, first_column, num_columns, axis=columns_at) for _, w in pairs)
        pairs = tuple((rows, block.astype(dtype)) for (rows, _), block in zip(pairs, converted, strict=True))
        first_column = jnp.zeros_like(first_column)

    def load(refs, tile, k, slot):
        column = refs.first_column[0] + tile.column_tile * columns

        def fetch(pair, k, first):
            rows, weights = pair
            steps = pl.ds(k * K_STEP, K_STEP)
            slot.fetch(rows.at[pl.ds(tile.row, TILE_ROWS), pl.ds(first + k * K_STEP, K_STEP)], slot.lhs)
            if decoder:
                decoder.fetch(refs, slot, (weights,), tile.expert, column, k)
                return
            if transposed:
                slot.fetch(weights.at[tile.expert, pl.ds(column, columns), steps], slot.rhs)
                return
            slot.fetch_panels(weights, (tile.expert, steps), column, 0, panels)

        for_pair(refs, k, fetch)

    def for_pair(refs, k, work):
        """Calls `work(pair, k, first)` for the pair that a k step belongs to, with its number among those of the pair.

        `first` is the first column of the pair's rows, which in 8 bits lie side by side with those of the others.
        """
        if len(pairs) == 1:
            work(refs.pairs[0], k, 0)
            return
        for i, pair in enumerate(refs.pairs):

            @pl.when((k >= i * steps_each) & (k < (i + 1) * steps_each))
            def _(pair=pair, i=i):
                work(pair, k - i * steps_each, i * depth if packed else 0)

    def finish(refs, part: RowTile, accumulator):
        parts = [tile_panel(refs, part, accumulator, panel) for panel in range(panels)]
        return lax.concatenate([values.astype(dtype) for values in parts], 1)

    def store(refs, part: RowTile, panel: int, values):
        store_rows(refs, part, panel, values, refs.rows, part.column_tile * columns + panel * PANEL)

    def store_blocks(refs, tile: RowTile, blocks):
        for i, block in enumerate(blocks):
            column = tile.column_tile * columns + (2 * i + refs.warpgroup) * PANEL
            store_block(refs, tile, i, block, refs.rows, column)

    operands = {"pairs": pairs, "first_column": first_column.reshape(1), "scales": scales, "bias": bias, "into": into}
    walk: dict[str, Any] = {"schedule": groups.tiles, "column_tiles": column_tiles, "k_steps": len(pairs) * steps_each}
    walk |= {"operands": operands, "load": load, "tuning": found}
    options: dict[str, Any] = {"copies": 2 if transposed else 1 + panels}
    if decoder:
        matmul = DecodedRowMatmul(**walk, store=store_blocks, decoder=decoder)
        options = {"copies": 1 + decoder.copies, "registers": MOST_FOR_CONSUMERS}
    else:
        forms: dict[str, Any] = {"transposed_weights": transposed, "packed": packed, "held_columns": columns}
        matmul = HeldRowMatmul(**walk, columns=columns, finish=finish, store=store, **forms)
    rows = jax.ShapeDtypeStruct((num_rows, num_columns), dtype)
    return matmul.run(f"moe_{kernel}", results={"rows": rows}, in_place={"into": "rows"}, **options).rows
