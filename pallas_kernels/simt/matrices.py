"""Tensor cores, and copies to shared memory that go on while a thread computes: what Ampere and all after it have."""

from collections.abc import Sequence

from pallas_kernels.simt.values import Bool, Float, Int, Pointer, machine

CHUNK = 8  # 16-bit elements of 16 bytes: what one copy moves, and a row of a matrix


def chunk_size(kind: str) -> int:
    """Elements of 16 bytes."""
    return CHUNK // 2 if kind == "float32" else CHUNK


def start_copy(target: Pointer, word, source: Pointer, index, wanted: Bool, when: Bool | None = None) -> None:
    """Starts a copy of 16 bytes from `source[index]` on, or of zeros where not `wanted`, to 4 shared words.

    Nobody may touch those words until the thread has waited. Where nothing is wanted, `index` does not matter. Where
    `when` does not hold, nothing happens, as in a branch; but the assembler mixes a copy with what comes before and
    after, which it does with no branch.
    """
    condition = None if when is None else when.value
    machine().start_copy(target.pointer, Int(word).value, source.pointer, index.value, wanted.value, condition)


def commit_copies() -> None:
    """Makes a group, perhaps empty, of the copies that the thread has started since the last one."""
    machine().commit_copies()


def wait_for_copies(pending: int) -> None:
    """Waits for the thread's groups of copies, all but the last `pending`. Other threads' need a barrier as well."""
    machine().wait_for_copies(pending)


def load_matrices(array: Pointer, word, *, transposed: bool = False) -> list[Int]:
    """Four 8 x 8 matrices of 16 bits from shared memory, a register each; or four 8 x 4 matrices of 32 bits.

    Lane i names the first of the 4 words of row `i % 8` of matrix `i // 8`. It gets columns `2 (i % 4)` and the next of
    row `i // 4`, or those rows of that column if `transposed`. Of 32 bits it gets column `i % 4`; they are not
    transposed.
    """
    return [Int(x) for x in machine().load_matrices(array.pointer, Int(word).value, transposed)]


def tensor_operand(registers: Sequence[Int], kind: str) -> list[Int]:
    """Registers of matrices as `multiply` takes them: float32 becomes tf32, which has 10 bits of mantissa.

    To the nearest, and a number in the middle away from zero (`cvt.rna.tf32`). Without it the tensor cores would drop
    the other 13 bits, and sums of many products would come out too small.
    """
    return [Int(machine().to_tf32(r.value)) for r in registers] if kind == "float32" else list(registers)


def multiply(sums: Sequence[Float], a: Sequence[Int], b: Sequence[Int], kind: str) -> list[Float]:
    """`sums + a · b` of a warp, summed in float32: (16, 8) += (16, k) · (k, 8) of `kind`.

    k is two chunks: 16 of bfloat16 or float16, 8 of float32, of which `tensor_operand` made tf32. `a` has four matrices
    as `load_matrices` gives them: upper left, lower left, upper right, lower right; `b` has two, with columns for rows:
    upper, lower. Of the sums, lane i has columns `2 (i % 4)` and the next of rows `i // 4` and `i // 4 + 8`.
    """
    return [Float(x) for x in machine().multiply(*([v.value for v in values] for values in (sums, a, b)), kind)]


def multiply_pairs(a: Int, b: Int, kind: str) -> Int:
    """The products of the two numbers of a 16-bit `kind` in each register, each rounded once."""
    return Int(machine().multiply_pairs(a.value, b.value, kind))


def unpack(word: Int, kind: str) -> list[Float]:
    """The two numbers of a 16-bit `kind` in a register."""
    return [Float(x) for x in machine().unpack(word.value, kind)]


def pack_e4m3(numbers: Sequence[Float]) -> Int:
    """Four numbers, none above 448, rounded to float8_e4m3fn, in one register. GPUs since Hopper and Ada have it."""
    return Int(machine().pack_e4m3([number.value for number in numbers]))


def pack(low: Float, high: Float, kind: str) -> Int:
    """Two numbers, rounded to a 16-bit `kind`, in one register."""
    return Int(machine().pack(low.value, high.value, kind))
