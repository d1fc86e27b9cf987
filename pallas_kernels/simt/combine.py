"""Combine: the weighted sum of each token's rows, for a block of columns."""

from functools import partial, reduce
from itertools import zip_longest
from operator import or_

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic.device import num_sms
from pallas_kernels.mosaic.traced_once import traced_once
from pallas_kernels.simt import language as simt
from pallas_kernels.simt.language import branch, indices, when
from pallas_kernels.simt.values import Long, Vector, minimum, select
from pallas_kernels.tuning.parameters import CombineTuning, find_tuning, shape_key

WARPGROUPS = 2
THREADS = WARPGROUPS * 128
COLUMNS = 8  # of a thread: 16 bytes


@traced_once("blocks", "tuning")
def combine(
    rows: Float[Array, "R columns"],
    token_index_map: Int[Array, "T K"],
    weights: Float[Array, "T K"] | None,
    out: Float[Array, "T d"],
    first_column: Int[Array, ""] | int,
    addend: Float[Array, "T columns"] | None = None,
    *,
    blocks: int | None = None,
    tuning: CombineTuning | None = None,
) -> Float[Array, "T d"]:
    """Sums each token's rows in float32, in slot order, into columns of `out`, in place; see the portable twin.

    A thread owns 8 columns of a token at a time. Its loads of the token's rows are all under way before the first is
    added, which is what device memory needs. Rows are bfloat16 or float16, `out` has the same type, and `first_column`
    and all widths are multiples of 8. No result depends on `blocks`, thread blocks of the launch, or on `tuning`, which
    says how many there are per SM otherwise.
    """
    (num_rows, width), (num_tokens, slots) = rows.shape, token_index_map.shape
    pieces, out_width = width // COLUMNS, out.shape[1]
    other_pieces = out_width // COLUMNS - pieces
    shape = shape_key(num_tokens * slots, rows.dtype, d=out_width, columns=width, K=slots)
    tuning = find_tuning(CombineTuning, "combine", tuning, shape)
    blocks = blocks or tuning.blocks_per_sm * num_sms()
    in_flight = tuning.rows_in_flight

    def load(rows, place, column):
        nothing = Vector.zeros(rows.kind, COLUMNS)
        row = Long(minimum(place, num_rows - 1)) * width + column
        return select(place < num_rows, rows.load_vector(row, COLUMNS), nothing)

    def add(rows, column, places, factors, sums):
        loaded = [load(rows, place, column) for place in places]
        for row, factor in zip_longest(loaded, factors):
            sums = sums + (row.wide() if factor is None else row.wide() * factor)
        return [sums]

    def body(rows, token_index_map, first_column, weights, addend, before, out):
        first_column = first_column[0]
        first_item = simt.block() * THREADS + simt.thread()
        for item in indices(first_item, num_tokens * pieces, blocks * THREADS):
            token, column = item // pieces, item % pieces * COLUMNS
            sums = Vector.zeros("float32", COLUMNS)
            if addend:
                sums = addend.load_vector(Long(token) * width + column, COLUMNS).wide()
            for start in range(0, slots, in_flight):
                batch = range(start, min(start + in_flight, slots))
                places = [token_index_map[token * slots + slot] for slot in batch]
                factors = [weights[Long(token) * slots + slot] for slot in batch] if weights else []
                turn = partial(add, rows, column, places, factors, sums)
                if start == 0:
                    (sums,) = turn()
                else:  # slots that token rounding may fill, and mostly leaves empty
                    counts = [place < num_rows for place in places] + [~f.equals(f) for f in factors]
                    (sums,) = branch(reduce(or_, counts), turn, [sums])
            out.store_vector(Long(token) * out_width + (first_column + column), sums.to(out.kind))
        if not other_pieces:
            return
        with when(~out.is_same(before)):
            for item in indices(first_item, num_tokens * other_pieces, blocks * THREADS):
                token, column = item // other_pieces, item % other_pieces * COLUMNS
                column = select(column < first_column, column, column + width)
                index = Long(token) * out_width + column
                out.store_vector(index, before.load_vector(index, COLUMNS))

    inputs = (rows, token_index_map, jnp.asarray(first_column, jnp.int32).reshape(1))
    weights = None if weights is None else weights.astype(jnp.float32)
    combined = simt.simt_kernel(body, name="moe_combine", blocks=blocks, warpgroups=WARPGROUPS, updated=1)
    return combined(*inputs, weights, addend, out)[0]
