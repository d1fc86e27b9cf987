"""Rows in 8 bits, in one pass over device memory: XLA reads them twice, and converts by arithmetic on bits."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import reduce
from itertools import chain

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import simt
from pallas_kernels.contract import INFINITY_BITS, MAGNITUDE_BITS, Dispatch
from pallas_kernels.fp8 import Scaled, scale_field
from pallas_kernels.mosaic.device import num_sms
from pallas_kernels.simt.matrices import pack_e4m3
from pallas_kernels.simt.threads import loop, warp_maximum, when
from pallas_kernels.simt.values import WARP, Long, maximum, minimum, select
from pallas_kernels.traced_once import traced_once

WIDTH_MULTIPLE = 16
"""Rows of 8-bit numbers must begin at multiples of 16 bytes, for bulk copies."""

THREADS, WARPS = 128, 4
BLOCKS_PER_SM = 16
COLUMNS = 8  # that a thread loads at once: 16 bytes


@traced_once("in_place")
def quantize_rows(arrays: tuple[Float[Array, "R k"], ...], *, in_place: bool = False) -> list[Scaled]:
    """What `fp8.quantize` gives for 16-bit rows, a multiple of 16 wide, two values in each 16-bit number.

    A thread block takes a row of all arrays at a time, holds it in registers, and finds its largest number.

    With `in_place`, for widths that are multiples of 128, the results take the memory of the arrays and are as wide:
    the first half of a row holds its numbers, the second anything.
    """
    (num_rows, width), dtype, count = arrays[0].shape, arrays[0].dtype, len(arrays)
    blocks = min(BLOCKS_PER_SM * num_sms(), num_rows)
    pitch = width if in_place else width // 2

    def body(*refs):
        arrays, outputs, (scales, largest) = refs[:count], refs[count:-2], refs[-2:]
        thread, warp = simt.thread(), simt.warp()
        columns = [(thread + first) * COLUMNS for first in range(0, -(-width // COLUMNS), THREADS)]

        def load(row):
            """The thread's part of a row; past its end the last numbers once more, which change nothing."""
            start = Long(row) * width
            return [a.load_vector(start + minimum(c, width - COLUMNS), COLUMNS) for a in arrays for c in columns]

        def quantize_row(row, *loaded):
            another = select(row + blocks < num_rows, row + blocks, row)
            following = load(another)  # under way while this one is worked on
            numbers = [vector.wide().elements() for vector in loaded]
            most = warp_maximum(reduce(maximum, (number.bits() & MAGNITUDE_BITS for number in chain(*numbers))))
            turn = row // blocks % 2 * WARPS  # words of the turn before may still be read
            with when((thread % WARP).equals(0)):
                largest[turn + warp] = most
            simt.block_barrier()
            most = reduce(maximum, (largest[turn + other] for other in range(WARPS)))
            scale, inverse = (bits.as_float() for bits in scale_field(most, maximum))
            targets = [(output, column) for output in outputs for column in columns]
            for (output, column), own in zip(targets, numbers, strict=True):
                scaled = [number * inverse for number in own]
                with when(column < width) if width % (THREADS * COLUMNS) else nullcontext():
                    words = [pack_e4m3(scaled[:4]), pack_e4m3(scaled[4:])]
                    output.store_words(Long(row) * pitch + column // 2, words)
            with when(thread.equals(0)):
                scales[row] = select(most >= INFINITY_BITS, float("nan"), scale)
            return following

        loop(simt.block(), num_rows, blocks, quantize_row, load(simt.block()))

    packed = [] if in_place else [jax.ShapeDtypeStruct((num_rows, pitch), dtype)] * count
    outputs = [*packed, jax.ShapeDtypeStruct((num_rows,), jnp.float32)]
    options = {"blocks": blocks, "warpgroups": 1, "outputs": outputs, "shared": [2 * WARPS]}
    *values, scales = simt.kernel(body, name="moe_quantize", updated=count * in_place, **options)(*arrays)
    return [Scaled(value, scales) for value in values]


def quantize(*arrays: Float[Array, "... k"], in_place: bool = False) -> list[Scaled]:
    """`quantize_rows` of arrays with any axes before the last; `in_place` where it can be."""
    shape = arrays[0].shape
    rows, in_place = tuple(array.reshape(-1, shape[-1]) for array in arrays), in_place and shape[-1] % 128 == 0
    scaled = quantize_rows(rows, in_place=in_place)
    return [Scaled(s.values.reshape(*shape[:-1], -1), s.scales.reshape(shape[:-1])) for s in scaled]


def quantize_tokens(tokens: Float[Array, "T k"], groups: Dispatch) -> tuple[Array, Float[Array, " R"]]:
    """Tokens in 8 bits, for rows to gather, and the scale of each row's token; 0 for rows without one."""
    (scaled,) = quantize(tokens)
    return scaled.values, scaled.scales.at[groups.expert_token_indices].get(mode="fill", fill_value=0)


def down_operands(hidden: Float[Array, "R n"], weights: Sequence[Float[Array, "E n d"]]) -> tuple[Scaled, list[Scaled]]:
    """The operands of `down_projection` in 8 bits; the rows take the memory of `hidden`."""
    return quantize(hidden, in_place=True)[0], [quantize_weights(w, axis=1, dtype=hidden.dtype)[0] for w in weights]


def up_operands(
    d_pre_activations: tuple[Float[Array, "R n"], ...],
    weights: Sequence[tuple[Float[Array, "E d n"], ...]],
    in_place: bool = False,
) -> tuple[tuple[Scaled, ...], list[tuple[Scaled, ...]]]:
    """The operands of `up_backward` in 8 bits; projections share their scales, since one accumulator sums them.

    With `in_place` the rows take the memory of `d_pre_activations`.
    """
    dtype = d_pre_activations[0].dtype
    return tuple(quantize(*d_pre_activations, in_place=in_place)), [
        tuple(quantize_weights(*w, axis=2, dtype=dtype)) for w in weights
    ]


def quantize_weights(*weights: Float[Array, "E a b"], axis: int, dtype) -> list[Scaled]:
    """Weights in 8 bits, with the contracted `axis` last."""
    return quantize(*((w.swapaxes(1, 2) if axis == 1 else w).astype(dtype) for w in weights))
