"""Combine: the weighted sum of each token's rows, for a block of columns."""

# pyright: reportCallIssue=false, reportAbstractUsage=false, reportArgumentType=false

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic_gpu import simt
from pallas_kernels.mosaic_gpu.row_matmul import NUM_SMS

WARPGROUPS = 2
BLOCKS = 4 * NUM_SMS
COLUMNS = 8  # of a thread: 16 bytes
IN_FLIGHT = 8  # rows a thread loads before it adds them up


def combine(
    rows: Float[Array, "R columns"],
    token_index_map: Int[Array, "T K"],
    weights: Float[Array, "T K"] | None,
    out: Float[Array, "T d"],
    first_column: Int[Array, ""] | int,
) -> Float[Array, "T d"]:
    """Sums each token's rows in float32, in slot order, into columns of `out`, in place; see the portable twin.

    A thread owns 8 columns of a token at a time. Its loads of the token's rows are all under way before the first is
    added, which is what device memory needs.
    """
    (num_rows, width), (num_tokens, slots) = rows.shape, token_index_map.shape
    pieces = width // COLUMNS
    threads = BLOCKS * WARPGROUPS * 128

    def body(rows, positions, first_column, out, weights=None):
        element = ir.BF16Type.get() if out.type.element_type == ir.BF16Type.get() else ir.F16Type.get()
        f32 = ir.F32Type.get()
        narrow, wide = (ir.VectorType.get((COLUMNS,), t) for t in (element, f32))
        positions, first_column = simt.Pointer(positions, 1), simt.Pointer(first_column, 1)[0]

        def at(ref, row, row_length, column, element):
            i64 = ir.IntegerType.get_signless(64)
            start = arith.muli(arith.extui(i64, row.value), arith.constant(i64, row_length))
            pointer = llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu.utils.memref_ptr(ref))
            return mgpu.utils.getelementptr(pointer, [arith.addi(start, arith.extui(i64, column.value))], element)

        def work(item):
            token, column = item // pieces, item % pieces * COLUMNS
            total = arith.constant(wide, ir.DenseElementsAttr.get_splat(wide, ir.FloatAttr.get(f32, 0.0)))
            nothing = arith.constant(narrow, ir.DenseElementsAttr.get_splat(narrow, ir.FloatAttr.get(element, 0.0)))
            for start in range(0, slots, IN_FLIGHT):
                batch = range(start, min(start + IN_FLIGHT, slots))
                loaded = []
                for slot in batch:
                    position = positions[token * slots + slot]
                    known = position < num_rows
                    row = at(rows, simt.minimum(position, num_rows - 1), width, column, element)
                    loaded.append(arith.select(known.value, llvm.load(narrow, row, alignment=16), nothing))
                for slot, row in zip(batch, loaded, strict=True):
                    value = arith.extf(wide, row)
                    if weights is not None:
                        weight = llvm.load(f32, at(weights, token, slots, simt.Int(slot), f32))
                        value = arith.mulf(value, vector.broadcast(wide, weight))
                    total = arith.addf(total, value)
            target = at(out, token, out.type.shape[1], first_column + column, element)
            llvm.store(arith.truncf(narrow, total), target, alignment=16)

        me = simt.block() * (WARPGROUPS * 128) + simt.thread()
        simt.loop(me, num_tokens * pieces, threads, work)

    def kernel(*refs):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        def run(ctx, rows, positions, first_column, *rest):
            out, *weights = reversed(rest)
            body(rows, positions, first_column, out, *weights)

        run(*refs)

    kernel.__name__ = "moe_combine"
    in_place = jax.new_ref(out)
    inputs = (rows, token_index_map, jnp.asarray(first_column, jnp.int32).reshape(1))
    optional = () if weights is None else (weights.astype(jnp.float32),)
    plgpu.kernel(
        kernel,
        out_type=(),
        grid=(BLOCKS,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(*inputs, *optional, in_place)
    return jax.freeze(in_place)
