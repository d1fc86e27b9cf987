"""Code with one value per CUDA thread, for kernels that are about single integers and not about tiles.

A small layer over MLIR for bodies of `plgpu.inline_mgpu`: scalars with operators, typed pointers, loops, and the warp
operations that Pallas has no words for.
"""

# pyright: reportCallIssue=false, reportAbstractUsage=false, reportArgumentType=false

from collections.abc import Callable, Sequence

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf

WARP = 32
_ALL_LANES = 0xFFFFFFFF
_GLOBAL, _SHARED = 1, 3


def simt_kernel(
    body: Callable,
    *,
    name: str,
    outputs: Sequence[jax.ShapeDtypeStruct],
    blocks: int,
    warpgroups: int,
    shared: Sequence[int],
) -> Callable:
    """A kernel whose body `body(*inputs, *outputs, *shared)` runs in every thread; int32 pointers throughout.

    Args:
      body: what a thread does.
      name: of the kernel in profiles.
      outputs: int32 results.
      blocks: of the grid.
      warpgroups: of 128 threads per block.
      shared: sizes of int32 arrays in shared memory.
    """

    def call(*inputs):
        num_refs = len(inputs) + len(outputs)

        def kernel(*refs):
            @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
            def run(ctx, *refs):
                body(*(Pointer(r, _GLOBAL) for r in refs[:num_refs]), *(Pointer(r, _SHARED) for r in refs[num_refs:]))

            run(*refs)

        kernel.__name__ = name
        return plgpu.kernel(
            kernel,
            out_type=list(outputs),
            grid=(blocks,),
            grid_names=("block",),
            num_threads=warpgroups,
            thread_name="wg",
            scratch_types=[plgpu.SMEM((size,), jnp.int32) for size in shared],
            compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        )(*inputs)

    return call


def _i32():
    return ir.IntegerType.get_signless(32)


def _value(x) -> ir.Value:
    if isinstance(x, Int):
        return x.value
    if isinstance(x, ir.Value):
        return x
    x = int(x) & 0xFFFFFFFF
    return arith.constant(_i32(), x - (1 << 32) if x >> 31 else x)


class Int:
    """A thread's 32-bit integer (comparisons are signed) or the outcome of a comparison."""

    def __init__(self, value):
        self.value = _value(value)

    def __add__(self, other):
        return Int(arith.addi(self.value, _value(other)))

    def __sub__(self, other):
        return Int(arith.subi(self.value, _value(other)))

    def __mul__(self, other):
        return Int(arith.muli(self.value, _value(other)))

    def __floordiv__(self, other):
        return Int(arith.divui(self.value, _value(other)))

    def __mod__(self, other):
        return Int(arith.remui(self.value, _value(other)))

    def __and__(self, other):
        return Int(arith.andi(self.value, _value(other)))

    def __lshift__(self, other):
        return Int(arith.shli(self.value, _value(other)))

    def __lt__(self, other):
        return self._compare("slt", other)

    def __le__(self, other):
        return self._compare("sle", other)

    def __ge__(self, other):
        return self._compare("sge", other)

    def equals(self, other):
        return self._compare("eq", other)

    def _compare(self, predicate, other):
        return Int(arith.cmpi(getattr(arith.CmpIPredicate, predicate), self.value, _value(other)))


def minimum(a: Int, b) -> Int:
    return Int(arith.minsi(_value(a), _value(b)))


def select(condition: Int, a, b) -> Int:
    return Int(arith.select(condition.value, _value(a), _value(b)))


class Pointer:
    """An int32 array in device or shared memory; `p[i]` loads, `p[i] = v` stores."""

    def __init__(self, ref, space):
        pointer = mgpu.utils.memref_ptr(ref)
        wanted = llvm.PointerType.get(address_space=space)
        self.pointer = pointer if pointer.type == wanted else llvm.addrspacecast(wanted, pointer)
        self.space = space

    def _at(self, index):
        index = _value(index)
        if self.space == _GLOBAL:
            index = arith.extui(ir.IntegerType.get_signless(64), index)
        return mgpu.utils.getelementptr(self.pointer, [index], _i32())

    def __getitem__(self, index) -> Int:
        return Int(llvm.load(_i32(), self._at(index)))

    def __setitem__(self, index, value):
        llvm.store(_value(value), self._at(index))

    def add(self, index, value):
        """Atomic add; integer sums do not depend on their order."""
        space = {_GLOBAL: "global", _SHARED: "shared"}[self.space]
        mgpu.utils.inline_ptx(f"red.{space}.add.u32 [$0], $1;", self._at(index), _value(value), has_side_effects=True)


def when(condition: Int):
    """Decorator: runs the function, in the threads where the condition holds."""

    def run(body):
        branch = scf.IfOp(condition.value)
        with ir.InsertionPoint(branch.then_block):
            body()
            scf.yield_([])

    return run


def loop(start, stop, step, body: Callable, carry: Sequence = ()) -> list[Int]:
    """`carry = body(i, *carry)` for i from `start` below `stop`; the body of an empty carry returns nothing."""
    for_loop = scf.ForOp(_value(start), _value(stop), _value(step), [_value(c) for c in carry])
    with ir.InsertionPoint(for_loop.body):
        out = body(Int(for_loop.induction_variable), *(Int(a) for a in for_loop.inner_iter_args))
        scf.yield_([_value(o) for o in (out or ())])
    return [Int(r) for r in for_loop.results]


def thread() -> Int:
    """Index of the thread in its block."""
    return Int(mgpu.utils.thread_idx())


def warp() -> Int:
    """Index of the warp in its block, known to the compiler to be the same for the whole warp."""
    return Int(mgpu.utils.warp_idx(sync=True))


def block() -> Int:
    return Int(mgpu.utils.block_idx())


def block_barrier() -> None:
    nvvm.barrier()


def warp_barrier() -> None:
    nvvm.bar_warp_sync(_value(_ALL_LANES))


def lanes_equal_to_mine(x: Int) -> Int:
    """Bit mask of the warp's lanes that hold the same value."""
    text = "match.any.sync.b32 $0, $1, 0xffffffff;"  # nvvm.match_sync loses its kind when serialised
    return Int(mgpu.utils.inline_ptx(text, x.value, result_types=_i32(), has_side_effects=True, convergent=True))


def count_bits(x: Int) -> Int:
    return Int(llvm.intr_ctpop(x.value))


def exclusive_warp_sum(x: Int, lane: Int) -> tuple[Int, Int]:
    """Sum of `x` over the lanes before this one, and over all lanes."""
    total = x
    for distance in (1, 2, 4, 8, 16):
        neighbour = nvvm.shfl_sync(_value(_ALL_LANES), total.value, _value(distance), _value(0), nvvm.ShflKind.up)
        total = total + select(lane >= distance, neighbour, 0)
    last = nvvm.shfl_sync(_value(_ALL_LANES), total.value, _value(WARP - 1), _value(0x1F), nvvm.ShflKind.idx)
    return total - x, Int(last)
