"""The interpreter of per-thread kernels: what it computes, and the races and slips it finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import simt
from pallas_kernels.simt.interpreter import RaceError
from pallas_kernels.simt.threads import (
    block_barrier,
    branch,
    combine_lanes,
    exclusive_warp_sum,
    indices,
    lanes_where,
    lanes_with_equal_bits,
    loop,
    shuffle,
    shuffle_xor,
    thread,
    warp,
    warp_barrier,
    warp_maximum,
    when,
)
from pallas_kernels.simt.values import Float, Int, count_bits, exp2, maximum, permute_bytes, reciprocal, select
from tests.numerics import assert_close, assert_same_bits
from tests.pallas_kernels.simt.launch import INDEX, THREADS, run


def of_threads(function, *inputs, dtype="int32"):
    """`function(*inputs)` of every thread, where an input is one element per thread."""

    def body(arrays, out, _):
        out[thread()] = function(*(a[thread()] for a in arrays))

    return run(body, inputs, dtype=dtype)


def test_integers_wrap_and_divide_like_the_gpus():
    x = np.array([5, -7, 2**31 - 1, -(2**31)] * 32, np.int32)
    assert_same_bits(of_threads(lambda x: x * 3 - 1, x), x * np.int32(3) - np.int32(1))
    assert_same_bits(of_threads(lambda x: x // 3, x), (x.view(np.uint32) // 3).astype(np.int32))
    assert_same_bits(of_threads(lambda x: x >> 1, x), x >> 1)
    assert (of_threads(lambda x: count_bits(x ^ 1), x) == np.bitwise_count((x ^ 1).view(np.uint32))).all()
    assert_same_bits(of_threads(lambda x: permute_bytes(x, [3, 2, 1, 0]), x), x.byteswap())


def test_floats():
    x = np.linspace(-3, 3, THREADS).astype(np.float32)
    assert_close(of_threads(lambda x: exp2(x) * reciprocal(x) + 1, x, dtype="float32"), 2**x / x + 1)
    assert_same_bits(of_threads(lambda x: x.bits(), x), x.view(np.int32))
    assert_same_bits(of_threads(lambda x: select(x > 0, x, 0.5), x, dtype="float32"), np.where(x > 0, x, 0.5))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_vectors(dtype):
    x = jnp.arange(4 * THREADS, dtype=dtype) / 8

    def body(x, out, _):
        vector = x.load_vector(thread() * 4, 4)
        out.store_vector(thread() * 4, (vector.wide() * Float(2.0) + vector.wide()).to(out.kind))

    assert_same_bits(run(body, x, size=4 * THREADS, dtype=dtype), np.asarray((x.astype("float32") * 3).astype(dtype)))


def test_loops_and_branches_of_different_lengths():
    def triangle(n):
        (total,) = loop(0, n, 1, lambda i, total: [total + i], [0])
        (out,) = branch(n % 2 > 0, lambda: [total], [Int(-1)])
        return out

    assert_same_bits(of_threads(triangle, INDEX), np.where(INDEX % 2, INDEX * (INDEX - 1) // 2, -1).astype(np.int32))


def test_operations_of_a_warp():
    lane = INDEX % 32
    x = (INDEX * 7 % 5).astype(np.int32)
    warps = x.reshape(4, 32)
    before, everything = (
        of_threads(lambda x, i=i: exclusive_warp_sum(x, thread() % 32)[i], x).reshape(4, 32) for i in range(2)
    )
    assert_same_bits(before, np.cumsum(warps, 1, dtype=np.int32) - warps)
    assert (everything == warps.sum(1, keepdims=True)).all()
    assert_same_bits(of_threads(lambda x: shuffle_xor(x, 1), INDEX), INDEX ^ 1)
    assert_same_bits(of_threads(lambda x: shuffle(x, 5), INDEX), INDEX - lane + 5)
    assert (of_threads(warp_maximum, x).reshape(4, 32) == warps.max(1, keepdims=True)).all()
    assert (of_threads(lambda x: lanes_where(x % 2 > 0), INDEX) == np.int32(-0x55555556)).all()
    assert_same_bits(of_threads(lambda x: count_bits(lanes_with_equal_bits(x, 3)), lane // 4), INDEX * 0 + 4)
    groups = of_threads(lambda x: combine_lanes(maximum, x, 4), lane)
    assert_same_bits(groups, lane // 4 * 4 + 3)


def test_shared_memory_is_each_blocks_own_and_atomics_add_up():
    def body(out, shared):
        write(shared)
        shared.add(thread() // 64, simt.block() + 1)
        block_barrier()
        out[simt.block() * THREADS + thread()] = shared[thread() // 64]

    out = run(body, blocks=3, size=3 * THREADS)
    assert_same_bits(out, np.repeat(np.array([64, 128, 192], np.int32), THREADS))


def test_inside_jit_and_updated():
    def body(x, counts, before, changed, out):
        out[thread()] = x[thread()] + 1
        with when(~changed.is_same(before) & (thread() < 2)):
            changed[thread()] = before[thread()]
        block_barrier()
        changed.add(0, counts[0])

    @jax.jit
    def call(*inputs):
        return simt.kernel(body, name="test", outputs=[inputs[0]], blocks=1, warpgroups=1, updated=1)(*inputs)

    with simt.interpreted():
        changed, out = call(jnp.asarray(INDEX), jnp.array([2]), jnp.array([5, 6]))
    assert_same_bits(out, INDEX + 1)
    assert changed.tolist() == [5 + 2 * THREADS, 6]


def write(shared, value=0):
    """Every thread writes its word, and waits for the others."""
    shared[thread()] = value
    block_barrier()


def write_then_read_next(out, shared, barrier=lambda: None):
    shared[thread()] = thread()
    barrier()
    out[simt.block() * THREADS + thread()] = shared[thread() // 32 * 32 + (thread() + 1) % 32]


@pytest.mark.parametrize("barrier", [warp_barrier, block_barrier])
def test_barriers_order_a_warp(barrier):
    out = run(lambda out, shared: write_then_read_next(out, shared, barrier))
    assert_same_bits(out, INDEX // 32 * 32 + (INDEX + 1) % 32)


def warp_barrier_between_warps(out, shared):
    shared[thread()] = thread()
    warp_barrier()
    shared[(thread() + 32) % THREADS] + 0


def read_then_write(out, shared):
    write(shared)
    shared[thread() ^ (THREADS - 1)] + 0
    shared[thread()] = 0


def all_read_then_one_writes(out, shared):
    write(shared)
    shared[7] + 0
    with when(thread().equals(7)):
        shared[7] = 0


def two_write(out, shared):
    shared[thread() // 2] = thread()


def two_warps_write(out, shared):
    with when(warp() < 2):
        shared[thread() % 32] = 1


def add_and_read(out, shared):
    write(shared)
    shared.add(0, 1)
    shared[0] + 0


def write_and_add(out, shared):
    shared[thread()] = 0
    shared.add((thread() + 1) % THREADS, 1)


def across_iterations(out, shared):
    write(shared)
    for i in indices(0, 2, 1):
        shared[(thread() + i) % THREADS] + 0
        warp_barrier()
        shared[thread()] = i
        warp_barrier()


def blocks_share_output(out, shared):
    out[thread()] = 1


def block_reads_what_another_writes(out, shared):
    with when(simt.block().equals(0)):
        out[thread()] = 1
    block_barrier()
    with when(simt.block().equals(1)):
        out[thread()] + 0


def nobody_wrote(out, shared):
    shared[thread()] + 0


def divergent_barrier(out, shared):
    with when(thread() < 64):
        block_barrier()


def divergent_warp(out, shared):
    with when(thread() % 2 > 0):
        warp_maximum(thread())


def divergent_warp_index(out, shared):
    with when((thread() % 32).equals(0)):
        warp()


def past_the_end(out, shared):
    out[thread() + (THREADS + 1)] = 0


def before_the_start(out, shared):
    shared[thread() - 1] = 0


def unaligned_vector(out, shared):
    out.load_vector(thread(), 2)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (write_then_read_next, "shared array 0, word .*: write by thread .* and read by thread"),
        (warp_barrier_between_warps, "write by thread .* and read by"),
        (read_then_write, "read by thread .* and write by"),
        (all_read_then_one_writes, "word 7: read by thread .* and write by thread 7 of block 0"),
        (two_write, "word 0: write by thread 0 of block 0 .* and write by thread 1 of block 0"),
        (two_warps_write, "word 0: write by thread 0 of block 0 .* and write by thread 32 of block 0"),
        (add_and_read, "word 0: add by thread .* and read by"),
        (write_and_add, "write by thread .* and add by"),
        (across_iterations, "word 32: write by thread 32 of block 0 .* and read by thread 31"),
        (blocks_share_output, "output 0, word 0: write by thread 0 of block 0 .* and write by thread 0 of block 1"),
        (block_reads_what_another_writes, "output 0, word 0: write by thread 0 of block 0 .* and read by"),
        (nobody_wrote, "shared array 0, word 0 is read, but nobody has written it"),
        (divergent_barrier, "a block's barrier that thread 64 of block 0 does not reach"),
        (divergent_warp, "an operation of a warp that thread 0 of block 0 does not reach"),
        (divergent_warp_index, "an operation of a warp that thread 1 of block 0 does not reach"),
        (past_the_end, "output 0, word 256, 1 at a time of 256, touched by thread 127 of block 0"),
        (before_the_start, "shared array 0, word -1, 1 at a time of 128, touched by thread 0 of block 0"),
        (unaligned_vector, "output 0, word 1, 2 at a time of 256, touched by thread 1 of block 0"),
    ],
)
def test_races_and_wrong_addresses_are_found(body, message):
    with pytest.raises(IndexError if "touched" in message else RaceError, match=message):
        run(body, blocks=2, size=2 * THREADS)


@pytest.mark.parametrize("apart", [0, 1])
@pytest.mark.default_cases("*")
def test_an_updated_input_may_be_the_memory_of_its_output(apart):
    def body(before, changed):
        changed[thread()] = before[thread() ^ apart]

    kernel = simt.kernel(body, name="test", blocks=1, warpgroups=1, updated=1)
    with simt.interpreted():
        if apart:
            with pytest.raises(RaceError, match=r"read by .* and write by"):
                kernel(jnp.asarray(INDEX))
        else:
            assert_same_bits(kernel(jnp.asarray(INDEX))[0], INDEX)
