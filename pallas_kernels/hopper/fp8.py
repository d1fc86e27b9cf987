"""Rows in 8 bits, in one pass over device memory: XLA reads them twice, and converts by arithmetic on bits."""

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from functools import reduce
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import fp8, simt
from pallas_kernels.contract import INFINITY_BITS, MAGNITUDE_BITS, Dispatch
from pallas_kernels.fp8 import CastWeight, Scaled, column_norms, is_float8, norms, scale_field, to_round
from pallas_kernels.hopper.quantization import packed_width, unpaired_column
from pallas_kernels.mosaic.device import num_sms
from pallas_kernels.simt.matrices import commit_copies, pack_e4m3, start_copy, unpack, wait_for_copies
from pallas_kernels.simt.threads import combine_lanes, indices, loop, warp_barrier, warp_maximum, when
from pallas_kernels.simt.values import WARP, Long, maximum, minimum, multiply_add, select, total
from pallas_kernels.traced_once import traced_once
from pallas_kernels.tuning.parameters import SHARED_MEMORY

WIDTH_MULTIPLE = 16
"""Rows of 8-bit numbers must begin at multiples of 16 bytes, for bulk copies."""

THREADS, WARPS = 128, 4
BLOCKS_PER_SM = 16
COLUMNS = 8  # that a thread loads at once: 16 bytes
UNIT = 8  # rows of a thread in a unit of `quantize_columns`
SLAB_BYTES, RING_BYTES = 144 * 1024, 208 * 1024  # of `quantize_columns`, in shared memory


@traced_once("together", "in_place")
def quantize_rows(
    arrays: tuple[Float[Array, "R k"], ...], *, together: bool = False, in_place: bool = False
) -> tuple[tuple[Float[Array, "R columns"], ...], Float[Array, " R"]]:
    """What `fp8.quantize` gives for 16-bit rows, a multiple of 16 wide, two values in each 16-bit number.

    A thread block takes a row of all arrays at a time, holds it in registers, and finds its largest number.

    Args:
      arrays: the rows.
      together: whether a row's numbers lie side by side in one result.
      in_place: whether that takes the memory of the last array and is as wide: what is not used there holds anything.

    Returns:
      The results, one or as many as there are arrays, and the scales, which all share.
    """
    (num_rows, width), dtype, count = arrays[0].shape, arrays[0].dtype, len(arrays)
    blocks = min(BLOCKS_PER_SM * num_sms(), num_rows)
    packed = width // 2
    pitch = width if in_place else packed * (count if together else 1)

    def body(*refs):
        arrays, outputs, (scales, largest) = refs[:count], refs[count:-2], refs[-2:]
        thread, warp = simt.thread(), simt.warp()
        columns = [(thread + first) * COLUMNS for first in range(0, -(-width // COLUMNS), THREADS)]
        parts = [(outputs[0], i * packed) for i in range(count)] if together else [(output, 0) for output in outputs]

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
            targets = [(*part, column) for part in parts for column in columns]
            for (output, first, column), own in zip(targets, numbers, strict=True):
                scaled = [number * inverse for number in own]
                with when(column < width) if width % (THREADS * COLUMNS) else nullcontext():
                    words = [pack_e4m3(scaled[:4]), pack_e4m3(scaled[4:])]
                    output.store_words(Long(row) * pitch + first + column // 2, words)
            with when(thread.equals(0)):
                scales[row] = select(most >= INFINITY_BITS, float("nan"), scale)
            return following

        loop(simt.block(), num_rows, blocks, quantize_row, load(simt.block()))

    made = [] if in_place else [jax.ShapeDtypeStruct((num_rows, pitch), dtype)] * (1 if together else count)
    outputs = [*made, jax.ShapeDtypeStruct((num_rows,), jnp.float32)]
    options = {"blocks": blocks, "warpgroups": 1, "outputs": outputs, "shared": [2 * WARPS]}
    *values, scales = simt.kernel(body, name="moe_quantize", updated=int(in_place), **options)(*arrays)
    return tuple(values), scales


def quantize(*arrays: Float[Array, "... k"]) -> list[Scaled]:
    """`quantize_rows` of arrays with any axes before the last, each by itself, with the scales that they share."""
    shape = arrays[0].shape
    values, scales = quantize_rows(tuple(array.reshape(-1, shape[-1]) for array in arrays))
    return [Scaled(v.reshape(*shape[:-1], -1), scales.reshape(shape[:-1])) for v in values]


def quantize_together(*arrays: Float[Array, "R k"], in_place: bool) -> Scaled:
    """`quantize_rows` of one or two arrays side by side, in the memory of the last, if `in_place`, where it can be.

    Of one array half is not used then. What reads 128 numbers at a time must find none of it beside the row's own.
    """
    in_place = in_place and (len(arrays) == 2 or arrays[0].shape[1] % 128 == 0)
    (values,), scales = quantize_rows(arrays, together=True, in_place=in_place)
    return Scaled(values, scales)


def quantize_tokens(tokens: Float[Array, "T k"], groups: Dispatch) -> tuple[Array, Float[Array, " R"]]:
    """Tokens in 8 bits, for rows to gather, and the scale of each row's token; 0 for rows without one."""
    (scaled,) = quantize(tokens)
    return scaled.values, scaled.scales.at[groups.expert_token_indices].get(mode="fill", fill_value=0)


def down_operands(
    hidden: Float[Array, "R n"] | Scaled, weights: Sequence[Float[Array, "E n d"] | CastWeight]
) -> tuple[Scaled, list[Scaled]]:
    """The operands of `down_projection` in 8 bits; the rows take the memory of `hidden`, or are there already."""
    bounded = isinstance(hidden, Scaled)
    rows, dtype = (hidden, hidden.values.dtype) if bounded else (quantize_together(hidden, in_place=True), hidden.dtype)
    return rows, [down_weights(weight, dtype, bounded) for weight in weights]


def up_operands(
    d_pre_activations: tuple[Float[Array, "R n"], ...],
    weights: Sequence[tuple[Float[Array, "E d n"] | CastWeight, ...]],
    in_place: bool = False,
) -> tuple[tuple[Scaled, ...], list[tuple[Scaled, ...]]]:
    """The operands of `up_backward` in 8 bits; projections share their scales, since one accumulator sums them.

    All rows lie side by side in one array, which each of them is given with. With `in_place` it takes the memory of the
    last of `d_pre_activations`.
    """
    rows, dtype = quantize_together(*d_pre_activations, in_place=in_place), d_pre_activations[0].dtype
    return (rows,) * len(d_pre_activations), [backward_weights(of, dtype) for of in weights]


def cast_weights(
    ups: Sequence[Float[Array, "E d n"]], down: Float[Array, "E n d"], dtype, bounded: bool
) -> tuple[tuple[CastWeight, ...], CastWeight]:
    """Weights as the products of both passes take them in 8 bits, for rows of `dtype`."""

    def cast(weight, backward, forward, of_columns=None):
        return CastWeight(weight, forward, backward, of_columns, jnp.dtype(dtype), bounded)

    backward, (of_down,) = backward_weights(ups, dtype), backward_weights([down], dtype)
    cast_ups = (cast(w, b, *up_weights(w, dtype, bounded)) for w, b in zip(ups, backward, strict=True))
    return tuple(cast_ups), cast(down, of_down, down_weights(down, dtype, bounded))


def up_weights(weight: Any, dtype, bounded: bool) -> tuple[Scaled, Float[Array, "E n"] | None]:
    """Weights `(E, d, n)` of an up projection with d last, and their columns' norms if activations are `bounded`."""
    if isinstance(weight, CastWeight):
        return weight.forward, weight.norms
    if not bounded:
        return _columns(weight, dtype), None
    if not is_float8(weight) and (columns := slab_columns(weight.shape[1])):
        scaled, squares = quantize_columns(weight.astype(dtype), columns=columns, squares=True)
        return scaled, norms(squares, weight.shape[1])
    return _columns(weight, dtype), column_norms(weight, dtype)


def down_weights(weight: Any, dtype, bounded: bool) -> Scaled:
    """Weights `(E, n, d)` of the down projection with n last, for activations that are `bounded` in their pairs."""
    if isinstance(weight, CastWeight):
        return weight.forward
    return _columns(weight, dtype, paired=bounded)


def backward_weights(weights: Sequence[Any], dtype) -> tuple[Scaled, ...]:
    """Weights `(E, a, b)` as they lie, which share their scales, for rows with b columns."""
    if isinstance(weights[0], CastWeight):
        return tuple(weight.backward for weight in weights)
    if is_float8(weights[0]):
        return tuple(_packed(s, dtype) for s in fp8.quantize(*(to_round(weight, dtype) for weight in weights)))
    return tuple(quantize(*(weight.astype(dtype) for weight in weights)))


def _columns(weight: Any, dtype, *, paired: bool = False) -> Scaled:
    """Weights `(E, a, b)` with a scale for each column, and a last; if `paired`, in the pairs of `quantization`."""
    places = 2 * packed_width(weight.shape[1]) if paired else weight.shape[1]
    if not is_float8(weight) and (columns := slab_columns(places)):
        return quantize_columns(weight.astype(dtype), columns=columns, paired=paired)
    numbers = to_round(weight, dtype).swapaxes(1, 2)
    if paired:
        numbers = numbers.at[..., unpaired_column(np.arange(places))].get(mode="fill", fill_value=0)
    return _packed(fp8.quantize(numbers)[0], dtype) if is_float8(weight) else quantize(numbers)[0]


def _packed(scaled: Scaled, dtype) -> Scaled:
    """The same, two numbers in one of a 16-bit type."""
    values = scaled.values.reshape(*scaled.values.shape[:-1], -1, 2)
    return scaled._replace(values=lax.bitcast_convert_type(values, dtype))


def slab_columns(num_rows: int) -> int | None:
    """Columns that a block takes at once: the most whose slab leaves room for the next one; None if none does."""
    return next((c for c in (32, 16, 8) if 2 * c * num_rows <= SLAB_BYTES), None)


@traced_once("columns", "paired", "squares", "warpgroups", "most_bytes")
def quantize_columns(
    weights: Float[Array, "E a b"],
    *,
    columns: int,
    paired: bool = False,
    squares: bool = False,
    warpgroups: int = 2,
    most_bytes: int = RING_BYTES,
) -> Any:
    """What `fp8.quantize` gives for 16-bit weights along `a`, with `a` last: `(E, b, a / 2)`, and scales `(E, b)`.

    A thread block takes all rows of a few columns, a slab, which stays in shared memory while its columns' largest
    numbers are found, so that device memory is read once. Each warp has a ring of units of rows there. A thread reads
    8 columns of 8 rows of a unit, starts the copies of a unit to come in their place, and writes 8 bytes a column.

    Args:
      weights: bfloat16 or float16; `a` and `b` are multiples of 16.
      columns: of a slab, 8, 16 or 32.
      paired: whether the rows come in the pairs of `quantization`, with zeros where one is missing.
      squares: whether the sum of the squares of each column's numbers is wanted as well, `(E, b)`, in second place.
      warpgroups: of a block.
      most_bytes: of the ring, in shared memory; a slab must fit in.
    """
    (num_experts, num_rows, b), dtype = weights.shape, weights.dtype
    a = 2 * packed_width(num_rows) if paired else num_rows  # that come, of so many
    warps, pieces = 4 * warpgroups, columns // COLUMNS  # of 16 bytes in a row of a slab
    copied_rows = WARP // pieces  # by a copy of each lane
    unit_rows = UNIT * copied_rows
    units = -(-a // (unit_rows * warps))  # of a warp in a slab
    unit_words = 4 * WARP * UNIT
    slots = min(most_bytes // (4 * unit_words * warps), 2 * units)
    if slots < units:
        raise ValueError(f"{most_bytes=} must hold {2 * columns * a} bytes, a slab of {columns} columns")
    per_expert = -(-b // columns)
    slabs = num_experts * per_expert
    found_words = 2 * warps * columns * (1 + squares)
    resident = max(1, SHARED_MEMORY // (4 * (slots * unit_words * warps + found_words) + 1024))
    blocks = min(min(resident, 2048 // (warps * WARP)) * num_sms(), slabs)

    def body(weights, values, scales, *others):
        *sums, ring, largest = others
        thread, warp = simt.thread(), simt.warp()
        lane = thread % WARP
        piece, group = lane % pieces, lane // pieces
        kind = weights.kind
        spread = COLUMNS // pieces  # rows apart that would be in the same banks are not

        def place(slot, row):
            """The first word of the lane's piece of a row of a unit."""
            row = row ^ (row // UNIT % spread)
            return (warp * slots + slot) * unit_words + (row * pieces + piece) * 4

        def first_row(unit):
            return (warp + unit * warps) * unit_rows

        def source(row):
            return unpaired_column(row) if paired else row

        def start(slab, unit, slot):
            column = slab % per_expert * columns + piece * COLUMNS
            first = source(first_row(unit) + group)
            index = (Long(slab // per_expert) * num_rows + Long(first)) * b + Long(column)
            inside = (slab < slabs) & (column < b)
            for i in range(UNIT):
                further = source(i * copied_rows)  # the pairs of a unit, or of each block in it, follow each other
                wanted = inside & (first + further < num_rows)
                start_copy(ring, place(slot, group + i * copied_rows), weights, index + further * b, wanted)
            commit_copies()

        def read(slot, row):
            words = ring.load_vector(place(slot, row), 4).elements()
            return [number for word in words for number in unpack(word, kind)]

        for q in range(slots):
            start(simt.block() + q // units * blocks, q % units, q)
        for slab in indices(simt.block(), slabs, blocks):
            turn = slab // blocks
            first_slot = turn * units
            most, squared = [simt.Int(0)] * COLUMNS, [simt.Float(0)] * COLUMNS
            for unit in range(units):
                wait_for_copies(slots - 1 - unit)
                for i in range(UNIT):  # what this lane has copied itself
                    numbers = read((first_slot + unit) % slots, group + i * copied_rows)
                    most = [maximum(m, n.bits() & MAGNITUDE_BITS) for m, n in zip(most, numbers, strict=True)]
                    if squares:
                        squared = [multiply_add(n, n, s) for n, s in zip(numbers, squared, strict=True)]
            most = [combine_lanes(maximum, m, WARP, start=pieces) for m in most]
            known = turn % 2 * (warps * columns)  # words of the turn before may still be read
            with when(lane < pieces):
                for i, m in enumerate(most):
                    largest[known + warp * columns + piece * COLUMNS + i] = m
            if squares:
                squared = [combine_lanes(operator.add, s, WARP, start=pieces) for s in squared]
                with when(lane < pieces):
                    for i, s in enumerate(squared):
                        largest[known + 2 * warps * columns + warp * columns + piece * COLUMNS + i] = s.bits()
            simt.block_barrier()
            for other in range(warps):
                there = known + other * columns + piece * COLUMNS
                words = [w for i in (0, 4) for w in largest.load_vector(there + i, 4).elements()]
                most = [maximum(m, w) for m, w in zip(most, words, strict=True)]
            fields = [[bits.as_float() for bits in scale_field(m, maximum)] for m in most]
            column = slab % per_expert * columns + piece * COLUMNS
            of_expert = slab // per_expert * b + column
            with when((thread < pieces) & (column < b)):
                for i, (m, (scale, _)) in enumerate(zip(most, fields, strict=True)):
                    scales[of_expert + i] = select(m >= INFINITY_BITS, float("nan"), scale)
                    if squares:
                        there = known + 2 * warps * columns + piece * COLUMNS + i
                        sums[0][of_expert + i] = total(
                            [largest[there + other * columns].as_float() for other in range(warps)]
                        )
            for unit in range(units):
                slot = (first_slot + unit) % slots
                rows = [read(slot, group * UNIT + i) for i in range(UNIT)]
                warp_barrier()  # all lanes have read what the next copies overwrite
                start(slab + (unit + slots) // units * blocks, (unit + slots) % units, slot)
                row = first_row(unit) + group * UNIT
                with when((row < a) & (column < b)):
                    for i, (_, inverse) in enumerate(fields):
                        scaled = [numbers[i] * inverse for numbers in rows]
                        words = [pack_e4m3(scaled[:4]), pack_e4m3(scaled[4:])]
                        values.store_words(Long(of_expert + i) * (a // 2) + Long(row // 2), words)

    outputs = [
        jax.ShapeDtypeStruct((num_experts, b, a // 2), dtype),
        *[jax.ShapeDtypeStruct((num_experts, b), jnp.float32)] * (1 + squares),
    ]
    shared = [slots * unit_words * warps, found_words]
    options = {"blocks": blocks, "warpgroups": warpgroups, "outputs": outputs, "shared": shared}
    values, scales, *sums = simt.kernel(body, name="moe_quantize_columns", **options)(weights)
    return (Scaled(values, scales), *sums) if squares else Scaled(values, scales)
