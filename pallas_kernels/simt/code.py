"""The machine of `simt` that is a GPU: every operation emits MLIR into a body of `plgpu.inline_mgpu`."""

# pyright: reportCallIssue=false, reportAbstractUsage=false, reportArgumentType=false

from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, nvvm, scf, vector

from pallas_kernels.mosaic import launches

_ALL_LANES = -1
_GLOBAL, _SHARED = 1, 3
_KINDS = {"i32": "int32", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}
_KINDS |= {"i8": "uint8", "f8E4M3FN": "uint8"}  # bytes, which threads take as words
_NEGATIVE_ZEROS = -0x7FFF8000
"""Two of them, of 16 bits: what changes no product, not even in its sign, when it is added."""
_PTX_NAMES = {"bfloat16": "bf16", "float16": "f16"}
_PRODUCTS = {
    "bfloat16": "m16n8k16.row.col.f32.bf16.bf16",
    "float16": "m16n8k16.row.col.f32.f16.f16",
    "float32": "m16n8k8.row.col.f32.tf32.tf32",
}
_Is = arith.CmpIPredicate


def launch(run, inputs, *, name, results, blocks, warpgroups, shared, updated):
    """Results of a kernel whose threads do `run(machine, pointers)`; see `threads.kernel`."""
    num_global = len(inputs) + len(results)

    def body(*refs):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        def emit(ctx, *refs):
            run(Code(), [_pointer(r, _GLOBAL if i < num_global else _SHARED) for i, r in enumerate(refs)])

        emit(*refs)

    body.__name__ = name
    return launches.kernel(
        body,
        in_place={len(inputs) - updated + i: i for i in range(updated)},
        out_type=results,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((size,), jnp.int32) for size in shared],
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(*inputs)


class _Pointer(NamedTuple):
    value: ir.Value
    space: int
    kind: str


def _pointer(ref, space) -> _Pointer:
    pointer = mgpu.utils.memref_ptr(ref)
    wanted = llvm.PointerType.get(address_space=space)
    pointer = pointer if pointer.type == wanted else llvm.addrspacecast(wanted, pointer)
    return _Pointer(pointer, space, _KINDS[str(ir.MemRefType(ref.type).element_type)])


def _type(kind: str):
    return mgpu.utils.dtype_to_ir_type(jnp.dtype(kind))


def _vector(kind: str, size: int):
    return ir.VectorType.get((size,), _type(kind))


def _address(pointer: _Pointer, index):
    if pointer.space == _GLOBAL and index.type == _type("int32"):
        index = arith.extui(_type("int64"), index)
    return mgpu.utils.getelementptr(pointer.value, [index], _type(pointer.kind))


class Integers:
    """Operations on two integers of one width. Comparisons and `shift_right` are signed, division is not."""

    add, subtract, multiply, divide, remainder = arith.addi, arith.subi, arith.muli, arith.divui, arith.remui
    bit_and, bit_or, bit_xor, shift_left, shift_right = arith.andi, arith.ori, arith.xori, arith.shli, arith.shrsi
    minimum, maximum = arith.minsi, arith.maxsi
    equal, less, less_or_equal, greater, greater_or_equal = (
        partial(arith.cmpi, predicate) for predicate in (_Is.eq, _Is.slt, _Is.sle, _Is.sgt, _Is.sge)
    )


class Floats:
    """Operations on two floats or vectors of them."""

    add, subtract, multiply, maximum = arith.addf, arith.subf, arith.mulf, arith.maximumf
    equal, greater = partial(arith.cmpf, arith.CmpFPredicate.OEQ), partial(arith.cmpf, arith.CmpFPredicate.OGT)


def _ptx(text, x):
    return mgpu.utils.inline_ptx(text, x, result_types=x.type)


def _assembly(text, operands, constraints, results=(), **options):
    """Results of an instruction of the assembler; one without any has side effects."""
    if not results:
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, constraints, has_side_effects=True)
        return []
    struct = llvm.inline_asm(llvm.StructType.get_literal(results), operands, text, constraints, **options)
    return [llvm.extractvalue(kind, struct, [i]) for i, kind in enumerate(results)]


def _shared_address(pointer, word):
    return llvm.ptrtoint(_type("int32"), mgpu.utils.getelementptr(pointer.value, [word], _type("int32")))


def _shuffle(kind, clamp, x, by):
    clamp, lanes = arith.constant(_type("int32"), clamp), arith.constant(_type("int32"), -1)
    return nvvm.shfl_sync(lanes, x, by, clamp, kind)


class Code:
    """Emits; a value is an `ir.Value`."""

    integers, floats = Integers, Floats
    select, multiply_add, count_bits = map(staticmethod, (arith.select, math.fma, llvm.intr_ctpop))
    thread, block, block_barrier = map(staticmethod, (mgpu.utils.thread_idx, mgpu.utils.block_idx, nvvm.barrier))
    warp = staticmethod(partial(mgpu.utils.warp_idx, sync=True))
    exp2 = staticmethod(partial(_ptx, "ex2.approx.ftz.f32 $0, $1;"))
    log2 = staticmethod(partial(_ptx, "lg2.approx.ftz.f32 $0, $1;"))
    reciprocal = staticmethod(partial(_ptx, "rcp.approx.ftz.f32 $0, $1;"))
    shuffle = staticmethod(partial(_shuffle, nvvm.ShflKind.idx, 0x1F))
    shuffle_up = staticmethod(partial(_shuffle, nvvm.ShflKind.up, 0))
    shuffle_xor = staticmethod(partial(_shuffle, nvvm.ShflKind.bfly, 0x1F))

    def function(self, name, x):
        return getattr(math, name)(x)

    def constant(self, kind, x):
        return arith.constant(_type(kind), x)

    def bits_as(self, kind, x):
        return arith.bitcast(_type(kind), x)

    def to_float(self, x):
        return arith.sitofp(_type("float32"), x)

    def to_long(self, x):
        return arith.extui(_type("int64"), x)

    def convert_vector(self, kind, x):
        return (arith.extf if kind == "float32" else arith.truncf)(_vector(kind, ir.VectorType(x.type).shape[0]), x)

    def zero_vector(self, kind, size):
        of = _vector(kind, size)
        zero = ir.IntegerAttr if kind == "int32" else ir.FloatAttr
        return arith.constant(of, ir.DenseElementsAttr.get_splat(of, zero.get(_type(kind), 0)))

    def broadcast(self, x, size):
        return vector.broadcast(ir.VectorType.get((size,), x.type), x)

    def element(self, x, i):
        return llvm.extractelement(x, self.constant("int32", i))

    def is_same(self, pointer, other):
        addresses = [llvm.ptrtoint(_type("int64"), p.value) for p in (pointer, other)]
        return arith.cmpi(_Is.eq, *addresses)

    def either_pointer(self, condition, pointer, otherwise):
        return pointer._replace(value=arith.select(condition, pointer.value, otherwise.value))

    def offset(self, pointer, index):
        return pointer._replace(value=_address(pointer, index))

    def load(self, pointer, index):
        return llvm.load(_type(pointer.kind), _address(pointer, index))

    def store(self, pointer, index, x):
        x = x if x.type == _type(pointer.kind) else arith.truncf(_type(pointer.kind), x)
        llvm.store(x, _address(pointer, index))

    def load_vector(self, pointer, index, size):
        alignment = size * jnp.dtype(pointer.kind).itemsize
        return llvm.load(_vector(pointer.kind, size), _address(pointer, index), alignment=alignment)

    def load_word(self, pointer, index):
        return llvm.load(_type("int32"), _address(pointer, index), alignment=4)

    def store_vector(self, pointer, index, x, size):
        llvm.store(x, _address(pointer, index), alignment=size * jnp.dtype(pointer.kind).itemsize)

    def atomic_add(self, pointer, index, x):
        space = {_GLOBAL: "global", _SHARED: "shared"}[pointer.space]
        mgpu.utils.inline_ptx(f"red.{space}.add.u32 [$0], $1;", _address(pointer, index), x, has_side_effects=True)

    @contextmanager
    def where(self, condition):
        with ir.InsertionPoint(scf.IfOp(condition).then_block):
            yield
            scf.yield_([])

    def branch(self, condition, body, otherwise):
        op = scf.IfOp(condition, [v.type for v in otherwise], has_else=True)
        with ir.InsertionPoint(op.then_block):
            scf.yield_(body())
        with ir.InsertionPoint(op.else_block):
            scf.yield_(otherwise)
        return list(op.results)

    def indices(self, start, stop, step):
        op = scf.ForOp(start, stop, step)
        with ir.InsertionPoint(op.body):
            yield op.induction_variable
            scf.yield_([])

    def loop(self, start, stop, step, body, carry):
        op = scf.ForOp(start, stop, step, carry)
        with ir.InsertionPoint(op.body):
            scf.yield_(body(op.induction_variable, *op.inner_iter_args))
        return list(op.results)

    def warp_barrier(self):
        nvvm.bar_warp_sync(self.constant("int32", _ALL_LANES))

    def ballot(self, x):
        return nvvm.vote_sync(self.constant("int32", _ALL_LANES), x, nvvm.VoteSyncKind.ballot)

    def warp_maximum(self, x):
        return nvvm.redux_sync(x, nvvm.ReductionKind.MAX, self.constant("int32", _ALL_LANES))

    def permute_bytes(self, x, order):
        return _ptx(f"prmt.b32 $0, $1, $1, {sum(o << (4 * i) for i, o in enumerate(order))};", x)

    def start_copy(self, target, word, source, index, wanted, when):
        size = arith.select(wanted, self.constant("int32", 16), self.constant("int32", 0))
        operands = [_shared_address(target, word), self.offset(source, index).value, size]
        copy = "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;"
        if when is None:
            _assembly(copy, operands, "r,l,r,~{memory}")
        else:
            _assembly(f"@$3 {copy}", [*operands, when], "r,l,r,b,~{memory}")

    def commit_copies(self):
        _assembly("cp.async.commit_group;", [], "~{memory}")

    def wait_for_copies(self, pending):
        _assembly(f"cp.async.wait_group {pending};", [], "~{memory}")

    def load_matrices(self, pointer, word, transposed):
        text = f"ldmatrix.sync.aligned.m8n8.x4{'.trans' * transposed}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
        operands, constraints = [_shared_address(pointer, word)], "=r,=r,=r,=r,r,~{memory}"
        return _assembly(text, operands, constraints, [_type("int32")] * 4, has_side_effects=True)

    def to_tf32(self, x):
        return llvm.inline_asm(_type("int32"), [x], "cvt.rna.tf32.f32 $0, $1;", "=r,r")

    def multiply(self, sums, a, b, kind):
        text = f"mma.sync.aligned.{_PRODUCTS[kind]}.f32"
        registers = "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        constraints = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
        return _assembly(f"{text} {registers}", [*a, *b, *sums], constraints, [x.type for x in sums])

    def multiply_pairs(self, a, b, kind):
        text = f"fma.rn.{_PTX_NAMES[kind]}x2 $0, $1, $2, $3;"  # a product by itself exists since Hopper
        return llvm.inline_asm(_type("int32"), [a, b, self.constant("int32", _NEGATIVE_ZEROS)], text, "=r,r,r,r")

    def pack(self, low, high, kind):
        text = f"cvt.rn.{_PTX_NAMES[kind]}x2.f32 $0, $1, $2;"
        return llvm.inline_asm(_type("int32"), [high, low], text, "=r,f,f")

    def pack_e4m3(self, numbers):
        pairs = "".join(
            f"cvt.rn.satfinite.e4m3x2.f32 {name}, ${i + 2}, ${i + 1}; " for name, i in (("low", 0), ("high", 2))
        )
        text = f"{{ .reg .b16 low, high; {pairs}mov.b32 $0, {{low, high}}; }}"
        return llvm.inline_asm(_type("int32"), numbers, text, "=r,f,f,f,f")

    def unpack(self, word, kind):
        pair = self.convert_vector("float32", llvm.bitcast(_vector(kind, 2), word))
        return [self.element(pair, i) for i in range(2)]

    def store_words(self, pointer, index, words):
        values = llvm.mlir_undef(_vector("int32", len(words)))
        for i, word in enumerate(words):
            values = llvm.insertelement(values, word, self.constant("int32", i))
        llvm.store(values, self.offset(pointer, index).value, alignment=4 * len(words))
