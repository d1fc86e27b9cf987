"""Compressed weights of experts, decoded on their way to the tensor cores, by the producer's threads.

A thread copies codes of `UNIT` columns, and what they need of the scales, by `cp.async` to memory of its own, some
steps before it reads them and writes their numbers to a slot: no thread waits for another's. It decodes with a few
instructions for four numbers, whose bytes it looks up in tables that registers hold.
"""

# pyright: reportCallIssue=false, reportAbstractUsage=false, reportArgumentType=false

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import batched
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.codings import (
    E2M1,
    FLOAT8_BLOCK,
    MXFP4_BLOCK,
    NF4_GROUP,
    NORMAL_FLOAT4,
    is_quantized,
)
from pallas_kernels.hopper import inline_interpreter as forms
from pallas_kernels.hopper.gather import arrive
from pallas_kernels.hopper.inline import (
    CHUNK_BYTES,
    K_STEP,
    PANEL,
    PANEL_BYTES,
    SCALAR,
    SWIZZLED,
    WARPGROUP,
    c32,
    global_pointer,
    int_type,
    permuted_bytes,
    ptx,
    scalar,
    shared_address,
    thread_index,
)
from pallas_kernels.mosaic.interpreter import in_interpreter
from pallas_kernels.tuning.parameters import TileTuning, most_stages

LINES_TOGETHER = 2
"""Chunks of codes that a thread loads before it decodes them: more would take registers that it does not have."""

REGISTERS = (88, 208)
"""Of a producer's thread, and of a consumer's."""

STAGED_BYTES = 48 * 1024
"""Of codes and scales that are under way, at most; with so many, wide tiles still have three slots."""

MOST_AHEAD = 4
"""Steps between a copy and its use, at most: narrow tiles take as long for them as memory does."""

UNIT = 16
"""Columns of the weights that a thread decodes together: 16 bytes of codes, and two chunks of each row of numbers."""


def decodes(weights: tuple[Any, ...], dtype) -> bool:
    """Whether the kernels take these compressed weights of one product as they are."""
    first = weights[0]
    return dtype == jnp.bfloat16 and all(
        is_quantized(weight) and weight.form == first.form and weight.shape[-1] % UNIT == 0 for weight in weights
    )


class TileDecoder:
    """Copies and decodes compressed weights `(E, in, out)`, a k step at a time: (in, out) in panels of 64 columns.

    Of such a part, thread t has `rows` rows of `UNIT` columns.

    Args:
      weight: one of the weights, a `QuantizedWeight`; they are of one form and shape.
      find: `(refs, tile, k, copy)`, calls `copy(weights, row, column)` for what a k step has of them.
      columns: of the products' tiles.
      transposed: whether those are inputs, in one panel (columns, 64); otherwise outputs, in panels (64, 64).
      side_by_side: how many weights share the outputs of a tile.
    """

    def __init__(self, weight: Any, find: Callable, *, columns: int, transposed: bool, side_by_side: int = 1):
        self.weight, self.form, self.find = weight, weight.form, find
        self.columns, self.side_by_side = columns, side_by_side
        self.inputs, self.outputs = weight.shape[-2:]
        self.tile_rows, self.tile_columns = (columns, K_STEP) if transposed else (K_STEP, columns)
        self.across = self.tile_columns // UNIT  # threads side by side
        self.rows = self.tile_rows * self.across // WARPGROUP
        self.rows_of_codes = 1 if weight.form == "float8" else 2  # rows of numbers in one of codes
        self.code_bytes = self.rows // self.rows_of_codes * WARPGROUP * CHUNK_BYTES
        self.bytes = self.code_bytes + SCALE_BYTES[self.form] * WARPGROUP
        self.depth = min(STAGED_BYTES // self.bytes, MOST_AHEAD)

    @in_interpreter(forms.staged)
    def memory(self):
        """Scratch for the codes and scales of `depth` k steps."""
        return plgpu.SMEM((self.depth, self.bytes // 4), jnp.int32)

    def fitting(self, tuning: TileTuning) -> TileTuning:
        """The parameters, with as many slots at most as fit beside that."""
        stages = most_stages(self.columns, spare=self.depth * self.bytes)
        return replace(tuning, stages=min(tuning.stages, stages))

    def of_tile(self, refs, tile, steps: int) -> "TileCodes":
        """The weights of a tile, which has so many k steps if it has rows."""
        return TileCodes(self, refs, tile, jnp.where(tile.rows > 0, steps, 0))

    def row_and_column(self):
        """Of this thread's first number in the tile."""
        t = thread_index()
        return (
            arith.muli(arith.divui(t, c32(self.across)), c32(self.rows)),
            arith.muli(arith.remui(t, c32(self.across)), c32(UNIT)),
        )

    def begins(self):
        """Which half of its columns this thread begins with, 0 or 1.

        Eight threads store 16 bytes at a time, and sixteen load 8: so those of either are in different banks.
        """
        low, high = (arith.andi(arith.shrui(thread_index(), c32(2 + bit)), c32(1)) for bit in range(2))
        return arith.xori(low, high)

    def own_memory(self, staged):
        """Addresses of this thread's codes, by number of the chunk, and of its scales."""

        def at(first: int, size: int):
            return shared_address(staged, arith.addi(c32(first), arith.muli(thread_index(), c32(size))))

        codes = at(0, CHUNK_BYTES)
        size = min(SCALE_BYTES[self.form], CHUNK_BYTES)
        return lambda number: arith.addi(codes, c32(number * WARPGROUP * CHUNK_BYTES)), at(self.code_bytes, size)

    @in_interpreter(forms.copy_codes)
    def copy(self, staged, expert, weights: tuple[Any, ...], row, column) -> None:
        """Starts the copies of what stands for the tile at `row` and `column` of an expert's weights.

        Of weights side by side, each has its columns from `column` on. Rows and columns past the end become zeros.
        """
        scalars = (expert, row, column)
        arrays = [array for weight in weights for array in (weight.values, weight.scales)]

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), (SCALAR,) * 3, *[plgpu.RefType()] * len(arrays)))
        def run(ctx, staged, scalars, *arrays):
            expert, first_row, first_column = map(scalar, scalars)
            own_row, own_column = self.row_and_column()
            each = c32(self.tile_columns // self.side_by_side)
            which, own_column = arith.divui(own_column, each), arith.remui(own_column, each)
            row, column = arith.addi(first_row, own_row), arith.addi(first_column, own_column)
            known = arith.andi(
                arith.cmpi(arith.CmpIPredicate.slt, row, c32(self.inputs)),
                arith.cmpi(arith.CmpIPredicate.slt, column, c32(self.outputs)),
            )
            known = arith.extui(int_type(32), known)
            codes, scales = (picked(list(map(global_pointer, arrays[i::2])), which) for i in range(2))

            def source(pointer, shape, row, column, number_bytes):
                """The address of a number of an array (E, *shape)."""
                line = arith.addi(arith.muli(expert, c32(shape[0])), row)
                return moved(moved(pointer, line, shape[1] * number_bytes), column, number_bytes)

            own_codes, own_scales = self.own_memory(staged)
            row_of_codes = arith.divui(row, c32(self.rows_of_codes))
            first = source(codes, self.weight.values.shape[-2:], row_of_codes, column, 1)
            for number in range(self.rows // self.rows_of_codes):
                copy_chunk(own_codes(number), first, known, offset=number * self.outputs)
            of_scales = self.weight.scales.shape[-2:]
            if self.form == "float8":
                blocks = (arith.divui(i, c32(FLOAT8_BLOCK)) for i in (row, column))
                copy_chunk(own_scales, source(scales, of_scales, *blocks, 4), known, size=4)
            elif self.form == "mxfp4":
                copy_chunk(own_scales, source(scales, of_scales, arith.divui(row, c32(MXFP4_BLOCK)), column, 1), known)
            else:
                of_group = source(scales, of_scales, arith.divui(row, c32(NF4_GROUP)), column, 2)
                for half in range(2):  # that of the columns that the thread begins with first
                    own = arith.muli(arith.xori(self.begins(), c32(half)), c32(CHUNK_BYTES))
                    place = arith.addi(own_scales, c32(half * WARPGROUP * CHUNK_BYTES))
                    copy_chunk(place, moved(of_group, own, 1), known)

        run(staged, tuple(jnp.asarray(s, jnp.int32) for s in scalars), *arrays)

    @in_interpreter(forms.nothing)
    def commit(self) -> None:
        """Ends a k step's copies."""

        @plgpu.inline_mgpu(arg_types=())
        def run(ctx):
            ptx("cp.async.commit_group;")

        run()

    @in_interpreter(forms.decode)
    def decode(self, staged, slot, landed) -> None:
        """Writes the numbers of a k step's codes to a slot, when they are there, and arrives on its `landed`.

        Those are the first of `depth` steps' whose copies were ended, and not waited for.
        """

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(SWIZZLED)))
        def run(ctx, staged, rhs):
            ptx(f"cp.async.wait_group {self.depth - 1};")
            row, column = self.row_and_column()
            panel, chunk = arith.divui(column, c32(PANEL)), arith.divui(arith.remui(column, c32(PANEL)), c32(8))
            base = shared_address(rhs, arith.addi(arith.muli(panel, c32(PANEL_BYTES)), arith.muli(row, c32(128))))
            first = arith.muli(arith.xori(arith.xori(chunk, arith.andi(row, c32(7))), self.begins()), c32(CHUNK_BYTES))

            def number(row, half):
                """The address of a chunk of numbers."""
                chunk = arith.xori(first, c32((row ^ half) * CHUNK_BYTES))
                return arith.addi(chunk, arith.addi(base, c32(row * 128)))

            own_codes, own_scales = self.own_memory(staged)
            begin = arith.muli(self.begins(), c32(CHUNK_BYTES // 2))
            scales = self.loaded_scales(own_scales, begin)
            decode = DECODE[self.form](scales, value("shr.u32 $0, $1, 31;", base, constraints="=r,r"))
            for lines in batched(range(self.rows // self.rows_of_codes), LINES_TOGETHER):
                codes = [load_halves(own_codes(line), begin) for line in lines]
                for line, halves in zip(lines, codes, strict=True):
                    for half, words in enumerate(halves):
                        decoded = [decode(word, 4 * half + 2 * i) for i, word in enumerate(words)]
                        for i in range(self.rows_of_codes):
                            numbers = [pair for of_word in decoded for pair in of_word[i]]
                            store_words(number(line * self.rows_of_codes + i, half), numbers)

        run(staged, slot.rhs)
        arrive(WARP_ARRIVES, landed, slot.number)

    @in_interpreter(forms.nothing)
    def pass_by(self, slot, landed) -> None:
        """Arrives for a step without weights, which nobody waits for there."""
        arrive(WARP_ARRIVES, landed, slot.number)

    def loaded_scales(self, own, begin) -> list:
        """Of this thread's columns, two scales of bfloat16 in each register; or one of float32 for all."""
        if self.form == "float8":
            return load_words(own, 1)
        if self.form == "nf4":
            halves = (arith.addi(own, c32(half * WARPGROUP * CHUNK_BYTES)) for half in range(2))
            return [word for half in halves for word in load_words(half, 4)]
        words = [word for half in load_halves(own, begin) for word in half]
        return [power_of_two(word, pair) for word in words for pair in range(2)]


class TileCodes(NamedTuple):
    """The compressed weights of a `tile`, which has so many k `steps`."""

    decoder: TileDecoder
    refs: Any
    tile: Any
    steps: Any

    def begin(self) -> None:
        """Starts the copies for the first k steps."""
        lax.fori_loop(0, self.decoder.depth, lambda k, _: self.copy(k), None)

    def decode(self, k, slot) -> None:
        """Fills the slot for a k step, and starts the copies of those that come to lie where its codes were."""
        self.decoder.decode(self.staged(k), slot, self.refs.landed)
        self.copy(k + self.decoder.depth)

    def copy(self, k) -> None:
        """Starts the copies for a k step, if there is one."""
        copy = partial(self.decoder.copy, self.staged(k), self.tile.expert)
        pl.when(k < self.steps)(lambda: self.decoder.find(self.refs, self.tile, k, copy))
        self.decoder.commit()

    def staged(self, k):
        return self.refs.staged.at[lax.rem(k, self.decoder.depth)]

    def pass_by(self, slot) -> None:
        """Does what every step must do in one without weights."""
        self.decoder.pass_by(slot, self.refs.landed)


WARP_ARRIVES = (
    "{ .reg .pred one; bar.warp.sync 0xffffffff; elect.sync _|one, 0xffffffff; "
    "@one mbarrier.arrive.shared::cta.b64 _, [$0]; }"
)
"""One thread arrives, for all that the warp has written."""

SCALE_BYTES = {"nf4": 2 * UNIT, "mxfp4": UNIT, "float8": 4}
"""Of a thread's scales."""


def picked(pointers: list, which):
    """The pointer of that number."""
    pointer = pointers[0]
    for number, other in enumerate(pointers[1:], 1):
        pointer = arith.select(arith.cmpi(arith.CmpIPredicate.eq, which, c32(number)), other, pointer)
    return pointer


def moved(pointer, count, size: int):
    """The pointer `count * size` bytes on."""
    count = arith.extui(int_type(64), count)
    return utils.getelementptr(pointer, [arith.muli(count, arith.constant(int_type(64), size))], int_type(8))


def copy_chunk(target, source, known, *, offset: int = 0, size: int = CHUNK_BYTES) -> None:
    """Starts the copy of 16 bytes, or 4, from `offset` bytes past the source; zeros unless it is `known`."""
    cache = "cg" if size == CHUNK_BYTES else "ca"
    ptx(
        "{ .reg .pred none; setp.eq.b32 none, $2, 0; "
        f"cp.async.{cache}.shared.global [$0], [$1 + {offset}], {size}, none; }}",
        target,
        source,
        known,
        constraints="r,l,r",
    )


def load_words(address, count: int) -> list:
    """So many words of shared memory, 1, 2 or 4."""
    if count == 1:
        return [value("ld.shared.b32 $0, [$1];", address, constraints="=r,r", has_side_effects=True)]
    names = ", ".join(f"${i}" for i in range(count))
    text = f"ld.shared.v{count}.b32 {{{names}}}, [${count}];"
    words = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>")
    found = llvm.inline_asm(words, [address], text, ",".join(["=r"] * count + ["r"]), has_side_effects=True)
    return [llvm.extractvalue(int_type(32), found, [i]) for i in range(count)]


def load_halves(chunk, begin) -> list[list]:
    """The words of a chunk's halves, of which the first begins at that byte."""
    first = arith.addi(chunk, begin)
    return [load_words(arith.xori(first, c32(8 * half)), 2) for half in range(2)]


def store_words(address, words: list) -> None:
    """Writes four words to shared memory."""
    ptx("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", address, *words, constraints="r,r,r,r,r")


def value(text: str, *operands, constraints: str, has_side_effects: bool = False):
    """The register that an instruction gives."""
    return llvm.inline_asm(int_type(32), list(operands), text, constraints, has_side_effects=has_side_effects)


def times(numbers, scales):
    """Two products of bfloat16."""
    return value("mul.rn.bf16x2 $0, $1, $2;", numbers, scales, constraints="=r,r,r")


def bytes_of(numbers) -> list[np.ndarray]:
    """The lower bytes of numbers of bfloat16, and the upper ones."""
    bits = np.asarray(numbers, np.float32).astype(jnp.bfloat16).view(np.uint8)
    return [bits[0::2], bits[1::2]]


def lookup(table: np.ndarray, zero):
    """A function that gives the bytes of a table of 8 for four codes, of the lower half of a register.

    Where the upper one of a code's four bits is set, it is the byte's sign, repeated. The `zero` is one of which the
    compiler does not know it: it would move a constant to a register anew for each use.
    """
    low, high = map(c32, np.ascontiguousarray(table).view(np.int32).tolist())
    low = arith.addi(low, zero)
    return lambda codes: value("prmt.b32 $0, $1, $2, $3;", low, high, codes, constraints="=r,r,r,r")


def two_by_two(word) -> list:
    """The codes of a word's first two columns in the lower half of a register, and those of the other two."""
    return [word, arith.shrui(word, c32(16))]


def paired(low: list, high: list, scales: list) -> tuple[list, list]:
    """Products of two numbers of bfloat16 with their scales, by the numbers' lower and upper bytes.

    Registers have the bytes of two columns' codes. First come the pairs of the codes' lower bits, then of the upper.
    """
    both = ([permuted_bytes(a, b, order) for a, b in zip(low, high, strict=True)] for order in (0x6240, 0x7351))
    lower, upper = ([times(pair, scale) for pair, scale in zip(pairs, scales, strict=True)] for pairs in both)
    return lower, upper


def nf4_decoder(scales: list, zero):
    """A function that gives the numbers of four columns, of the lower bits and of the upper, in pairs of bfloat16."""
    tables = []
    for table in bytes_of(NORMAL_FLOAT4):
        # Of the other table there comes a sign, repeated: those of the first are undone in the second, which has none.
        last_codes = table[8:] ^ np.where(table[:8] >> 7, 255, 0).astype(np.uint8)
        tables.append((lookup(table[:8], zero), lookup(last_codes, zero)))

    def decode(word, first: int):
        codes, flipped = two_by_two(word), two_by_two(arith.xori(word, c32(-0x77777778)))
        low, high = ([arith.xori(a(c), b(f)) for c, f in zip(codes, flipped, strict=True)] for a, b in tables)
        return paired(low, high, scales[first : first + 2])

    return decode


def mxfp4_decoder(scales: list, zero):
    """See `nf4_decoder`. Magnitudes are looked up, and each sign is moved to its place."""
    tables = [lookup(table, zero) for table in bytes_of(E2M1)]
    signs = c32(-0x7FFF8000)

    def decode(word, first: int):
        codes = two_by_two(arith.andi(word, c32(0x77777777)))
        lower, upper = paired(*(list(map(table, codes)) for table in tables), scales[first : first + 2])
        own = [permuted_bytes(word, c32(0), order) for order in UPPER_BYTES]
        lower = [arith.ori(pair, arith.andi(arith.shli(c, c32(4)), signs)) for pair, c in zip(lower, own, strict=True)]
        return lower, [arith.ori(pair, arith.andi(c, signs)) for pair, c in zip(upper, own, strict=True)]

    return decode


UPPER_BYTES = (0x1404, 0x3424)
"""Of a word's four columns, two each in the upper byte of a half of a register; zeros come second."""


def power_of_two(word, pair: int):
    """The scales of two of a word's four columns, from their exponents: 0 is 2^-127, and 255 is NaN."""
    exponents = permuted_bytes(word, c32(0), UPPER_BYTES[pair])
    text = (
        "{ .reg .b32 powers, least, zero; mov.b32 least, 0x00400040; mov.b32 zero, 0; shr.u32 powers, $1, 1; "
        "max.bf16x2 least, powers, least; fma.rn.bf16x2 $0, powers, zero, least; }"
    )
    return value(text, exponents, constraints="=r,r")


def float8_decoder(scales: list, zero):
    """A function that gives the numbers of four columns in pairs of bfloat16, each product rounded from float32."""
    del zero
    text = (
        "{{ .reg .b16 low, high; .reg .b32 both; .reg .f32 a, b; mov.b32 {{low, high}}, $1; "
        "cvt.rn.f16x2.e4m3x2 both, {half}; mov.b32 {{low, high}}, both; cvt.f32.f16 a, low; cvt.f32.f16 b, high; "
        "mul.rn.f32 a, a, $2; mul.rn.f32 b, b, $2; cvt.rn.bf16x2.f32 $0, b, a; }}"
    )

    def decode(word, first: int):
        del first
        return ([value(text.format(half=half), word, scales[0], constraints="=r,r,r") for half in ("low", "high")],)

    return decode


DECODE = {"nf4": nf4_decoder, "mxfp4": mxfp4_decoder, "float8": float8_decoder}
