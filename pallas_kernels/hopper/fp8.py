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


@traced_once()
def quantize_rows(arrays: tuple[Float[Array, "R k"], ...]) -> list[Scaled]:
    """What `fp8.quantize` gives for 16-bit rows, a multiple of 16 wide, two values in each 16-bit number.

    A thread block takes a row of all arrays at a time, holds it in registers, and finds its largest number.
    """
    (num_rows, width), dtype = arrays[0].shape, arrays[0].dtype
    blocks = BLOCKS_PER_SM * num_sms()

    def body(arrays, outputs, scales, largest):
        thread, warp = simt.thread(), simt.warp()
        columns = [(thread + first) * COLUMNS for first in range(0, -(-width // COLUMNS), THREADS)]

        def load(row):
            """The thread's part of a row; past the end the last numbers once more, which change nothing."""
            start = Long(minimum(row, num_rows - 1)) * width
            return [a.load_vector(start + minimum(c, width - COLUMNS), COLUMNS) for a in arrays for c in columns]

        def quantize_row(row, *loaded):
            following = load(row + blocks)  # under way while this one is worked on
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
                    output.store_words(Long(row) * (width // 2) + column // 2, words)
            with when(thread.equals(0)):
                scales[row] = select(most >= INFINITY_BITS, float("nan"), scale)
            return following

        loop(simt.block(), num_rows, blocks, quantize_row, load(simt.block()))

    packed = (jax.ShapeDtypeStruct((num_rows, width // 2), dtype),) * len(arrays)
    results = [packed, jax.ShapeDtypeStruct((num_rows,), jnp.float32)]
    options = {"blocks": blocks, "warpgroups": 1, "outputs": results, "shared": [2 * WARPS]}
    values, scales = simt.kernel(body, name="moe_quantize", **options)(arrays)
    return [Scaled(value, scales) for value in values]


def quantize(*arrays: Float[Array, "... k"]) -> list[Scaled]:
    """`quantize_rows` of arrays with any axes before the last."""
    shape = arrays[0].shape
    scaled = quantize_rows(tuple(array.reshape(-1, shape[-1]) for array in arrays))
    return [Scaled(s.values.reshape(*shape[:-1], -1), s.scales.reshape(shape[:-1])) for s in scaled]


def quantize_tokens(tokens: Float[Array, "T k"], groups: Dispatch) -> tuple[Array, Float[Array, " R"]]:
    """Tokens in 8 bits, for rows to gather, and the scale of each row's token; 0 for rows without one."""
    (scaled,) = quantize(tokens)
    return scaled.values, scaled.scales.at[groups.expert_token_indices].get(mode="fill", fill_value=0)


def down_operands(hidden: Float[Array, "R n"], weights: Sequence[Float[Array, "E n d"]]) -> tuple[Scaled, list[Scaled]]:
    """The operands of `down_projection` in 8 bits."""
    return quantize(hidden)[0], [quantize_weights(w, axis=1, dtype=hidden.dtype)[0] for w in weights]


def up_operands(
    d_pre_activations: tuple[Float[Array, "R n"], ...], weights: Sequence[tuple[Float[Array, "E d n"], ...]]
) -> tuple[tuple[Scaled, ...], list[tuple[Scaled, ...]]]:
    """The operands of `up_backward` in 8 bits; projections share their scales, since one accumulator sums them."""
    dtype = d_pre_activations[0].dtype
    return tuple(quantize(*d_pre_activations)), [tuple(quantize_weights(*w, axis=2, dtype=dtype)) for w in weights]


def quantize_weights(*weights: Float[Array, "E a b"], axis: int, dtype) -> list[Scaled]:
    """Weights in 8 bits, with the contracted `axis` last."""
    return quantize(*((w.swapaxes(1, 2) if axis == 1 else w).astype(dtype) for w in weights))
