"""Combine: the weighted sum of each token's rows, for a block of columns."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import simt
from pallas_kernels.mosaic.device import num_sms
from pallas_kernels.simt.threads import branch, indices, lanes_where, shuffle, when
from pallas_kernels.simt.values import WARP, Long, Vector, lowest_bit, minimum, select
from pallas_kernels.traced_once import traced_once

WARPGROUPS = 1
WARPS, THREADS = WARPGROUPS * 4, WARPGROUPS * 128
BLOCKS_PER_SM = 24
COLUMNS = 8  # that a lane has: 16 bytes
ROWS_IN_FLIGHT = 4  # for each warp, which is what device memory needs


@traced_once("width", "blocks")
def combine(
    rows: Float[Array, "R columns"],
    token_index_map: Int[Array, "T K"],
    weights: Float[Array, "T K"] | None,
    out: Float[Array, "T_all d"] | None,
    first_column: Int[Array, ""] | int,
    addend: Float[Array, "T columns"] | None = None,
    *,
    first_token: Int[Array, ""] | int = 0,
    width: int | None = None,
    blocks: int | None = None,
) -> Float[Array, "T_all d"]:
    """Sums each token's rows in float32, in slot order, into columns of `out`, in place; see the portable twin.

    A warp owns 256 columns of a token at a time. Its lanes find the slots that have a row, 32 of them at once, and load
    just those rows, a few together. Rows are bfloat16 or float16, `out` has the same type, and `first_column` and all
    widths are multiples of 8. No result depends on `blocks`, thread blocks of the launch.
    """
    (num_rows, columns), (num_tokens, slots) = rows.shape, token_index_map.shape
    out_shape = (num_tokens, width or columns) if out is None else out.shape
    chunks, out_width, pieces = -(-columns // (WARP * COLUMNS)), out_shape[1], out_shape[1] // COLUMNS
    blocks = blocks or BLOCKS_PER_SM * num_sms()

    def add_rows(count, rows, column, place, factor, mask, sums):
        """The mask without its lowest `count` slots, and the sums with their rows."""
        loaded = []
        for _ in range(count):
            is_slot, slot = ~mask.equals(0), lowest_bit(mask) % WARP
            row = shuffle(place, slot)
            values = rows.load_vector(Long(minimum(row, num_rows - 1)) * columns + column, COLUMNS)
            values = select(is_slot, values, Vector.zeros(rows.kind, COLUMNS))
            loaded.append((values, factor and select(is_slot, shuffle(factor, slot), 0.0)))
            mask = mask & (mask - 1)
        for values, weight in loaded:
            sums = sums + (values.wide() * weight if weight else values.wide())
        return [mask, sums]

    def body(rows, token_index_map, first_token, first_column, weights, addend, before, out):
        first_token, first_column, lane = first_token[0], first_column[0], simt.thread() % WARP
        first_task = simt.block() * WARPS + simt.warp()
        for task in indices(first_task, num_tokens * chunks, blocks * WARPS):
            token, column = task // chunks, (task % chunks * WARP + lane) * COLUMNS
            inside, column = column < columns, minimum(column, columns - COLUMNS)  # all lanes are needed for shuffles
            sums = Vector.zeros("float32", COLUMNS)
            if addend:
                sums = addend.load_vector(Long(token) * columns + column, COLUMNS).wide()
            for first_slot in range(0, slots, WARP):
                size = min(WARP, slots - first_slot)
                slot = Long(token) * slots + (minimum(lane, size - 1) + first_slot).long()
                place, factor = token_index_map[slot], weights and weights[slot]
                counts = place < num_rows
                if factor:  # NaN shows, though there is no row
                    counts = counts | ~factor.equals(factor)
                mask = lanes_where(counts & (lane < size))
                for start in range(0, size, ROWS_IN_FLIGHT):
                    count = min(ROWS_IN_FLIGHT, size - start)
                    added = partial(add_rows, count, rows, column, place, factor, mask, sums)
                    mask, sums = branch(~mask.equals(0), added, [mask, sums])
            with when(inside):
                index = Long(first_token + token) * out_width + (first_column + column)
                out.store_vector(index, sums.to(out.kind))
        if before is None or out_shape == (num_tokens, columns):
            return
        with when(~out.is_same(before)):
            for item in indices(simt.block() * THREADS + simt.thread(), out_shape[0] * pieces, blocks * THREADS):
                token, column = item // pieces, item % pieces * COLUMNS
                is_other = (token < first_token) | (token >= first_token + num_tokens)
                with when(is_other | (column < first_column) | (column >= first_column + columns)):
                    index = Long(token) * out_width + column
                    out.store_vector(index, before.load_vector(index, COLUMNS))

    # Two arrays: one of both would be a launch more for each block of columns.
    first = (jnp.asarray(number, jnp.int32).reshape(1) for number in (first_token, first_column))
    inputs = (rows, token_index_map, *first)
    weights = None if weights is None else weights.astype(jnp.float32)
    outputs = [jax.ShapeDtypeStruct(out_shape, rows.dtype)] if out is None else []
    options = {"blocks": blocks, "warpgroups": WARPGROUPS, "outputs": outputs, "updated": 1 - len(outputs)}
    combined = simt.kernel(body, name="moe_combine", **options)
    return combined(*inputs, weights, addend, out)[0]
