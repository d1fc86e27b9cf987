"""Rows found by index, copied to shared memory by `cp.async`, and the barriers that they arrive at."""

# pyright: reportCallIssue=false, reportAbstractUsage=false, reportArgumentType=false

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels.hopper import inline_interpreter as forms
from pallas_kernels.hopper.inline import (
    CHUNK_BYTES,
    SCALAR,
    SWIZZLED,
    WARPGROUP,
    c32,
    global_pointer,
    int_type,
    ptx,
    scalar,
    shared_address,
    thread_index,
)
from pallas_kernels.mosaic.interpreter import in_interpreter


@in_interpreter(forms.landed_barriers)
def landed_barriers(stages):
    """Scratch for `stages` mbarriers of the gather, 8 bytes each: Pallas barriers cannot be named in inline code."""
    return plgpu.SMEM((2 * stages,), jnp.int32)


@in_interpreter(forms.init_landed)
def init_landed(landed, stages):
    """Makes the mbarriers of `landed_barriers`, each completed by the copies of one warpgroup.

    All threads of the block must call this.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(ctx, landed):
        first = utils.single_thread_predicate(scope=utils.ThreadSubset.BLOCK)
        for stage in range(stages):
            barrier = utils.getelementptr(utils.memref_ptr(landed), [stage], int_type(64))
            nvvm.mbarrier_init(barrier, c32(WARPGROUP), predicate=first)
        ptx("fence.mbarrier_init.release.cluster;")
        ptx("barrier.sync 0;")

    run(landed)


@in_interpreter(forms.wait_landed)
def wait_landed(landed, slot, parity):
    """Waits until the slot's gathered rows are in shared memory, and orders them before this thread's wgmma."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR))
    def run(ctx, landed, slot, parity):
        barrier = utils.getelementptr(utils.memref_ptr(landed), [scalar(slot)], int_type(64))
        nvvm.mbarrier_try_wait_parity(barrier, scalar(parity), c32(10000000))
        ptx("fence.proxy.async.shared::cta;")

    run(landed, slot, parity)


def row_chunks(token_indices: jax.Array, tokens: tuple[jax.Array, ...]) -> jax.Array:
    """Where each row begins in `tokens`, in units of 16 bytes; -1 for rows without a token, which read zeros.

    Kernels load these in the place of token ids, and have nothing left to compute for a row but its address.
    """
    of_source, width = tokens[0].shape
    known = (token_indices >= 0) & (token_indices < of_source * len(tokens))
    return jnp.where(known, token_indices * (width // 8), -1)


class RowGather:
    """Copies `rows` gathered rows, `columns` wide, into a swizzled tile, 16 bytes a thread at a time.

    Thread t copies chunk `t % c` of rows `t // c + i · (128 / c)`, c chunks to a row. The tile is made of panels
    (rows, 64) one after the other.

    Args:
      tokens: the array read from, or several of as many rows that follow each other; their width is a multiple of 8,
        and rows and columns past their end read zeros.
      rows: how many a tile has.
      columns: how many a tile has, 64 or 128, so that a thread's rows are swizzled alike.
    """

    def __init__(self, tokens: tuple[jax.Array, ...], *, rows: int, columns: int):
        self.rows, self.columns, (self.of_source, self.width) = rows, columns, tokens[0].shape
        self.chunks = columns // 8
        self.rows_apart = WARPGROUP // self.chunks
        self.per_thread = rows // self.rows_apart
        self.layout = plgpu.Layout.WG_STRIDED((self.per_thread * WARPGROUP,), vec_size=1)
        self.result = plgpu.ShapeDtypeStruct((self.per_thread * WARPGROUP,), jnp.int32, layout=self.layout)

    def _array(self, registers):
        vectors = [vector.broadcast(ir.VectorType.get((1,), int_type(32)), r) for r in registers]
        vectors = np.array(vectors, dtype=object)
        return mgpu.FragmentedArray(_registers=vectors, _layout=self.layout.to_mgpu(), _is_signed=True)

    @in_interpreter(forms.load_chunks)
    def load_chunks(self, chunks, first_row):
        """The entries of `row_chunks` of the rows that this thread copies."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=self.result)
        def run(ctx, chunks, first_row):
            row = arith.addi(scalar(first_row), arith.divui(thread_index(), c32(self.chunks)))
            first = utils.getelementptr(global_pointer(chunks), [row], int_type(32))
            apart = [utils.getelementptr(first, [self.rows_apart * i], int_type(32)) for i in range(self.per_thread)]
            return self._array([llvm.load(int_type(32), pointer) for pointer in apart])

        return run(chunks, first_row)

    def only_valid(self, chunks, valid_rows):
        """The chunks of the first `valid_rows` rows of a tile, and -1 for the others: only an expert's end has such."""
        return lax.cond(valid_rows < self.rows, lambda c: self._cut(c, valid_rows), lambda c: c, chunks)

    @in_interpreter(forms.cut)
    def _cut(self, chunks, valid_rows):
        @plgpu.inline_mgpu(arg_types=(self.layout, SCALAR), return_type=self.result)
        def run(ctx, chunks, valid_rows):
            row = arith.divui(thread_index(), c32(self.chunks))
            own = []
            for i, register in enumerate(chunks.registers):
                of_row = arith.addi(row, c32(self.rows_apart * i))
                mine = arith.cmpi(arith.CmpIPredicate.slt, of_row, scalar(valid_rows))
                own.append(arith.select(mine, llvm.extractelement(register, c32(0)), c32(-1)))
            return self._array(own)

        return run(chunks, valid_rows)

    @in_interpreter(forms.copy_rows)
    def copy(self, tokens, chunks, panel, landed, slot, first_column):
        """Starts the copies, to the tile whose first panel is `panel`; they arrive on `landed[slot]` as they land."""
        of_source = self.of_source * self.width  # numbers

        @plgpu.inline_mgpu(arg_types=(self.layout, plgpu.RefType(SWIZZLED), SCALAR, *[plgpu.RefType()] * len(tokens)))
        def run(ctx, chunks, panel_ref, first_column, *sources):
            chunk = arith.remui(thread_index(), c32(self.chunks))
            row = arith.divui(thread_index(), c32(self.chunks))
            column = arith.addi(scalar(first_column), arith.muli(chunk, c32(8)))
            panel = arith.shrui(chunk, c32(3))  # of 64 columns
            in_panel = arith.andi(chunk, c32(7))

            swizzled = arith.xori(in_panel, arith.andi(row, c32(7)))
            in_row = arith.addi(arith.muli(panel, c32(self.rows * 128)), arith.muli(swizzled, c32(CHUNK_BYTES)))
            target = shared_address(panel_ref, arith.addi(arith.muli(row, c32(128)), in_row))
            # Each source's, as if it began where its rows are counted from.
            pointers = [
                utils.getelementptr(
                    global_pointer(source), [arith.constant(int_type(64), -2 * i * of_source)], int_type(8)
                )
                for i, source in enumerate(sources)
            ]
            bases = [utils.getelementptr(p, [arith.muli(column, c32(2))], int_type(8)) for p in pointers]
            in_width = arith.cmpi(arith.CmpIPredicate.slt, column, c32(self.width))
            for i, register in enumerate(chunks.registers):
                offset = llvm.extractelement(register, c32(0))
                if self.width % self.columns:
                    offset = arith.select(in_width, offset, c32(-1))
                base = bases[0]
                for source, following in enumerate(bases[1:], 1):
                    beyond = arith.cmpi(arith.CmpIPredicate.uge, offset, c32(source * of_source // 8))
                    base = arith.select(beyond, following, base)
                # 64-bit bytes: tokens · width passes 2^31. LLVM would keep the product, and a pointer for each row.
                ptx(
                    "{ .reg .b64 from; .reg .pred none; setp.lt.s32 none, $1, 0; mad.wide.u32 from, $1, 16, $2;"
                    f" cp.async.cg.shared.global.L2::128B [$0 + {self.rows_apart * 128 * i}], [from], 16, none; }}",
                    target,
                    offset,
                    base,
                    constraints="r,r,l",
                )

        run(chunks, panel, first_column, *tokens)
        self.arrive(landed, slot)

    @in_interpreter(forms.arrive)
    def arrive(self, landed, slot):
        """Lets `landed[slot]` complete when the copies that were started have landed."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
        def run(ctx, landed, slot):
            barrier = shared_address(landed, arith.muli(scalar(slot), c32(8)))
            ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", barrier, constraints="r")

        run(landed, slot)
