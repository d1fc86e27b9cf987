"""Combine: the weighted sum of each token's rows, for a block of columns."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic_gpu import simt
from pallas_kernels.mosaic_gpu.row_matmul import NUM_SMS
from pallas_kernels.mosaic_gpu.simt import Long, Vector, loop, minimum, select

WARPGROUPS = 2
THREADS = WARPGROUPS * 128
COLUMNS = 8  # of a thread: 16 bytes
IN_FLIGHT = 8  # rows a thread loads before it adds them up


def combine(
    rows: Float[Array, "R columns"],
    token_index_map: Int[Array, "T K"],
    weights: Float[Array, "T K"] | None,
    out: Float[Array, "T d"],
    first_column: Int[Array, ""] | int,
    *,
    blocks: int = 4 * NUM_SMS,
) -> Float[Array, "T d"]:
    """Sums each token's rows in float32, in slot order, into columns of `out`, in place; see the portable twin.

    A thread owns 8 columns of a token at a time. Its loads of the token's rows are all under way before the first is
    added, which is what device memory needs. Rows are bfloat16 or float16, `out` has the same type, and `first_column`
    and all widths are multiples of 8. No result depends on `blocks`.
    """
    (num_rows, width), (num_tokens, slots) = rows.shape, token_index_map.shape
    pieces = width // COLUMNS

    def body(rows, positions, first_column, *rest):
        *weights, out = rest
        first_column = first_column[0]

        def work(item):
            token, column = item // pieces, item % pieces * COLUMNS
            sums = Vector.zeros("float32", COLUMNS)
            nothing = Vector.zeros(rows.kind, COLUMNS)
            for start in range(0, slots, IN_FLIGHT):
                batch = range(start, min(start + IN_FLIGHT, slots))
                loaded = []
                for slot in batch:
                    position = positions[token * slots + slot]
                    row = Long(minimum(position, num_rows - 1)) * width + column
                    loaded.append(select(position < num_rows, rows.load_vector(row, COLUMNS), nothing))
                for slot, row in zip(batch, loaded, strict=True):
                    value = row.wide()
                    if weights:
                        value = value * weights[0][Long(token) * slots + slot]
                    sums = sums + value
            out.store_vector(Long(token) * out_width + (first_column + column), sums.to(out.kind))

        loop(simt.block() * THREADS + simt.thread(), num_tokens * pieces, blocks * THREADS, work)

    out_width = out.shape[1]
    inputs = (rows, token_index_map, jnp.asarray(first_column, jnp.int32).reshape(1))
    optional = () if weights is None else (weights.astype(jnp.float32),)
    combined = simt.simt_kernel(body, name="moe_combine", blocks=blocks, warpgroups=WARPGROUPS, updated=1)
    return combined(*inputs, *optional, out)[0]
