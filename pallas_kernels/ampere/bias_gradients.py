"""Sums over each expert's rows: biases' gradients."""

from operator import add

import jax
from jaxtyping import Array
from jaxtyping import Float as FloatArray

from pallas_kernels import simt
from pallas_kernels.contract import Dispatch
from pallas_kernels.simt.threads import block_barrier, combine_lanes, loop, when
from pallas_kernels.simt.values import WARP, Float, Long, minimum, select, total

_WARPGROUPS = 2
_WARPS = _WARPGROUPS * 4
_COLUMNS = 64  # that a block has
_NEIGHBOURS = 8  # columns that a thread has
_LANES = _COLUMNS // _NEIGHBOURS
_ROWS = _WARPS * WARP // _LANES  # that a block's threads load at once
_IN_FLIGHT = 4  # loads of a thread


def expert_sums(
    name: str,
    rows: FloatArray[Array, "rows width"],
    groups: Dispatch,
    *,
    num_tokens: int,
    dtype,
    weights: FloatArray[Array, " R"] | None = None,
    gathered: bool = False,
) -> FloatArray[Array, "E width"]:
    """Sums over each expert's rows, in float32 and always in the same order; rows of no token do not count.

    Args:
      name: what profiles call the kernel.
      rows: `(T, width)` if `gathered`, else `(R, width)`; a multiple of 8 columns.
      groups: the rows by expert.
      num_tokens: T.
      dtype: that of the sums.
      weights: factors of the rows, float32.
      gathered: whether rows are read by token index.
    """
    width, num_rows = rows.shape[1], groups.num_rows
    column_blocks = -(-width // _COLUMNS)

    def body(offsets, token_indices, rows, weights, out, shared):
        expert, column_block = simt.block() // column_blocks, simt.block() % column_blocks
        thread = simt.thread()
        lane, warp, own = thread % WARP, thread // WARP, thread // _LANES
        first_row, end = offsets[expert], offsets[expert + 1]
        column = column_block * _COLUMNS + thread % _LANES * _NEIGHBOURS
        mine = rows.at(minimum(column, width - _NEIGHBOURS))

        def add_rows(first, *sums):
            numbers = [first + own + i * _ROWS for i in range(_IN_FLIGHT)]
            known_rows = [minimum(row, num_rows - 1) for row in numbers]
            tokens = [token_indices[row] for row in known_rows]
            counts = [
                (row < end) & (token >= 0) & (token < num_tokens) for row, token in zip(numbers, tokens, strict=True)
            ]
            sources = [select(c, r, 0) for c, r in zip(counts, tokens if gathered else known_rows, strict=True)]
            loaded = [mine.load_vector(Long(source) * width, _NEIGHBOURS) for source in sources]
            factors = [None if weights is None else weights[row] for row in known_rows]
            for values, factor, count in zip(loaded, factors, counts, strict=True):
                values = values.wide().elements()
                values = values if factor is None else [v * factor for v in values]
                sums = [s + select(count, v, 0.0) for s, v in zip(sums, values, strict=True)]
            return sums

        sums = loop(first_row, end, _ROWS * _IN_FLIGHT, add_rows, [Float(0.0)] * _NEIGHBOURS)
        sums = [combine_lanes(add, s, WARP, _LANES) for s in sums]
        with when(lane < _LANES):
            for i, s in enumerate(sums):
                shared[warp * _COLUMNS + (lane * _NEIGHBOURS + i)] = s.bits()
        block_barrier()
        column = column_block * _COLUMNS + thread
        with when((thread < _COLUMNS) & (column < width)):
            values = [shared[thread + i * _COLUMNS].as_float() for i in range(_WARPS)]
            out[expert * width + column] = total(values)

    (sums,) = simt.kernel(
        body,
        name=name,
        outputs=[jax.ShapeDtypeStruct((groups.num_experts, width), dtype)],
        blocks=groups.num_experts * column_blocks,
        warpgroups=_WARPGROUPS,
        shared=[_WARPS * _COLUMNS],
    )(groups.expert_token_offsets, groups.expert_token_indices, rows, weights)
    return sums
