"""Copies that go on while a thread computes, and the tensor cores, in the interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import simt
from pallas_kernels.simt.interpreter import RaceError
from pallas_kernels.simt.matrices import (
    chunk_size,
    commit_copies,
    load_matrices,
    multiply,
    pack,
    start_copy,
    tensor_operand,
    wait_for_copies,
)
from pallas_kernels.simt.threads import block_barrier, thread, warp_barrier, when
from pallas_kernels.simt.values import Float
from tests.numerics import assert_close, assert_same_bits

SIZE = 128 * 8


def run(body, *inputs, out):
    """The output of `body(*inputs, out, shared)` in 128 threads, with 512 shared words."""
    with simt.interpreted():
        kernel = simt.kernel(body, name="test", outputs=[out], blocks=1, warpgroups=1, shared=[SIZE // 2])
        return np.asarray(kernel(*map(jnp.asarray, inputs))[0])


def words(body, x):
    """The 128 words that `body(x, out, shared)` writes."""
    return run(body, x, out=jax.ShapeDtypeStruct((128,), jnp.int32))


def copy_all(x, shared, wanted=None):
    start_copy(shared, thread() * 4, x, thread() * 8, thread() >= 0 if wanted is None else wanted)
    commit_copies()


X = np.arange(SIZE, dtype=np.float32).astype(jnp.bfloat16)


def test_copies_arrive_and_are_zero_where_not_wanted():
    def body(x, out, shared):
        copy_all(x, shared, thread() < 64)
        wait_for_copies(0)
        block_barrier()
        out[thread()] = shared[(thread() ^ 127) * 4]

    expected = np.where(np.arange(128) < 64, X.view(np.int32)[::4], 0)[::-1]
    assert_same_bits(words(body, X), np.ascontiguousarray(expected))


@pytest.mark.parametrize("pending", [1, 0])
def test_what_is_read_before_it_has_arrived_is_an_error(pending):
    def body(x, out, shared):
        copy_all(x, shared)
        wait_for_copies(pending)
        out[thread()] = shared[thread() * 4]

    if pending:
        with pytest.raises(RaceError, match="nobody has written it"):
            words(body, X)
    else:
        assert_same_bits(words(body, X), X.view(np.int32)[::4].copy())


def test_what_others_copied_needs_a_barrier():
    def body(x, out, shared):
        copy_all(x, shared)
        wait_for_copies(0)
        out[thread()] = shared[(thread() ^ 127) * 4]

    with pytest.raises(RaceError, match="with no barrier"):
        words(body, X)


def test_what_others_read_is_not_copied_over():
    def body(x, out, shared):
        copy_all(x, shared)
        wait_for_copies(0)
        block_barrier()
        out[thread()] = shared[(thread() ^ 127) * 4]
        copy_all(x, shared)

    with pytest.raises(RaceError, match="with no barrier"):
        words(body, X)


@pytest.mark.parametrize("readers", [64, 128])
@pytest.mark.default_cases("*")
def test_threads_wait_for_their_own_copies(readers):
    """One group may be pending: of half of the threads an empty one, of the others the one that is read."""

    def body(x, out, shared):
        copy_all(x, shared)
        with when(thread() < 64):
            commit_copies()
        wait_for_copies(1)
        with when(thread() < readers):
            out[thread()] = shared[thread() * 4]

    if readers == 128:
        with pytest.raises(RaceError, match="nobody has written it"):
            words(body, X)
    else:
        assert_same_bits(words(body, X)[:64], X.view(np.int32)[: 4 * 64 : 4].copy())


def product(a, b, *, rounded=True):
    """(16, k) times (k, 8), where k is what a product of the dtype has; numbers of 32 bits are not transposed."""

    def body(a, b, out, shared):
        lane = thread() % 32
        with when(thread() < 32):
            start_copy(shared, lane * 4, a, lane * chunk_size(a.kind), lane >= 0)
            start_copy(shared, lane * 4 + 128, b, lane * chunk_size(b.kind), lane < 16)
            commit_copies()
            wait_for_copies(0)
            warp_barrier()
            left = load_matrices(shared, lane % 16 * 8 + lane // 16 * 4)
            if a.kind == "float32":
                right = [shared[(lane % 4 + upper) * 8 + lane // 4 + 128] for upper in (0, 4)]
            else:
                right = load_matrices(shared, lane % 16 * 4 + 128, transposed=True)[:2]
            if rounded:
                left, right = tensor_operand(left, a.kind), tensor_operand(right, a.kind)
            for i, x in enumerate(multiply([Float(0.0)] * 4, left, right, a.kind)):
                out[(lane // 4 + i // 2 * 8) * 8 + lane % 4 * 2 + i % 2] = x

    return run(body, a, b, out=jax.ShapeDtypeStruct((16, 8), jnp.float32))


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_product_of_matrices(kind):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(jnp.dtype(kind)) for shape in ((16, 16), (16, 8)))
    assert_close(product(a, b), a.astype(np.float64) @ b.astype(np.float64), 1e-6)


def test_product_of_numbers_that_tensor_cores_have():
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-1024, 1024, shape).astype(np.float32) for shape in ((16, 8), (8, 8)))
    assert_same_bits(product(a, b), a @ b)


def test_numbers_are_rounded_for_tensor_cores():
    step = 2.0**-10  # of their numbers from 1 to 2
    numbers = [1 + step / 2, 1 + step * 0.499, -1 - step * 1.5, np.inf, -np.inf, np.finfo(np.float32).max, 1.0, 0.0]
    a = np.zeros((16, 8), np.float32)
    a[:8, 0], a[8, 0] = numbers, np.nan
    for rounded, of_tensor_cores in (
        (True, [1 + step, 1, -1 - 2 * step, np.inf, -np.inf, np.inf, 1, 0, np.nan]),
        (False, [1, 1, -1 - step, np.inf, -np.inf, (2 - step) * 2.0**127, 1, 0, np.nan]),
    ):
        out = product(a, np.eye(8, dtype=np.float32), rounded=rounded)[:9, 0]
        np.testing.assert_array_equal(out, np.float32(of_tensor_cores))


def test_pairs_of_numbers():
    def body(x, out, shared):
        pair = pack(x[thread() * 2], x[thread() * 2 + 1], out.kind)
        shared[thread()] = pair
        warp_barrier()
        with when((thread() % 4).equals(0)):
            out.store_words(thread() * 2, [shared[thread() + i] for i in range(4)])

    x = np.linspace(-3, 3, 256, dtype=np.float32)
    out = run(body, x, out=jax.ShapeDtypeStruct((256,), jnp.bfloat16))
    assert_same_bits(out, x.astype(jnp.bfloat16))
