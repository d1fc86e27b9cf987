"""How the machine that is a GPU copies and multiplies; see `matrices`."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false

import jax.experimental.mosaic.gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

_PTX = {"bfloat16": "bf16", "float16": "f16"}
_PRODUCT = {
    "bfloat16": "m16n8k16.row.col.f32.bf16.bf16",
    "float16": "m16n8k16.row.col.f32.f16.f16",
    "float32": "m16n8k8.row.col.f32.tf32.tf32",
}


def _int32():
    return ir.IntegerType.get_signless(32)


def _ptx(text, operands, constraints, results=()):
    """Results of an instruction; without any, it has side effects."""
    if not results:
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, constraints, has_side_effects=True)
        return []
    struct = llvm.inline_asm(llvm.StructType.get_literal(results), operands, text, constraints)
    return [llvm.extractvalue(of, struct, [i]) for i, of in enumerate(results)]


def _word(pointer, index):
    address = mgpu.utils.getelementptr(pointer.value, [index], _int32())
    return llvm.ptrtoint(_int32(), address)


class CodeOfMatrices:
    """The methods that `matrices` calls."""

    def start_copy(self, target, word, source, index, wanted, when):
        size = arith.select(wanted, arith.constant(_int32(), 16), arith.constant(_int32(), 0))
        operands = [_word(target, word), self.offset(source, index).value, size]
        copy = "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;"
        if when is None:
            _ptx(copy, operands, "r,l,r,~{memory}")
        else:
            _ptx(f"@$3 {copy}", [*operands, when], "r,l,r,b,~{memory}")

    def commit_copies(self):
        _ptx("cp.async.commit_group;", [], "~{memory}")

    def wait_for_copies(self, pending):
        _ptx(f"cp.async.wait_group {pending};", [], "~{memory}")

    def load_matrices(self, pointer, word, transposed):
        text = f"ldmatrix.sync.aligned.m8n8.x4{'.trans' * transposed}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
        struct = llvm.inline_asm(
            llvm.StructType.get_literal([_int32()] * 4),
            [_word(pointer, word)],
            text,
            "=r,=r,=r,=r,r,~{memory}",
            has_side_effects=True,
        )
        return [llvm.extractvalue(_int32(), struct, [i]) for i in range(4)]

    def to_tf32(self, x):
        return llvm.inline_asm(_int32(), [x], "cvt.rna.tf32.f32 $0, $1;", "=r,r")

    def multiply(self, sums, a, b, kind):
        text = f"mma.sync.aligned.{_PRODUCT[kind]}.f32"
        registers = "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        constraints = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
        return _ptx(f"{text} {registers}", [*a, *b, *sums], constraints, [x.type for x in sums])

    def pack(self, low, high, kind):
        text = f"cvt.rn.{_PTX[kind]}x2.f32 $0, $1, $2;"
        return llvm.inline_asm(_int32(), [high, low], text, "=r,f,f")

    def unpack(self, word, kind):
        elements = {"bfloat16": ir.BF16Type, "float16": ir.F16Type}[kind].get()
        pair = llvm.bitcast(ir.VectorType.get((2,), elements), word)
        pair = arith.extf(ir.VectorType.get((2,), ir.F32Type.get()), pair)
        return [llvm.extractelement(pair, arith.constant(_int32(), i)) for i in range(2)]

    def store_words(self, pointer, index, words):
        vector = llvm.mlir_undef(ir.VectorType.get((len(words),), _int32()))
        for i, word in enumerate(words):
            vector = llvm.insertelement(vector, word, arith.constant(_int32(), i))
        llvm.store(vector, self.offset(pointer, index).value, alignment=4 * len(words))
