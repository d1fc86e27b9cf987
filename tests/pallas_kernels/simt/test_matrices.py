"""Copies that go on while a thread computes, and the tensor cores, in the interpreter."""

import jax.numpy as jnp
import numpy as np
import pytest

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
from tests.pallas_kernels.simt.launch import INDEX, THREADS, run


def copy_all(x, shared, wanted=None):
    start_copy(shared, thread() * 4, x, thread() * 8, thread() >= 0 if wanted is None else wanted)
    commit_copies()


X = np.arange(8 * THREADS, dtype=np.float32).astype(jnp.bfloat16)
WORDS = X.view(np.int32)


def test_copies_arrive_and_are_zero_where_not_wanted():
    def body(x, out, shared):
        copy_all(x, shared, thread() < 64)
        wait_for_copies(0)
        block_barrier()
        out[thread()] = shared[(thread() ^ 127) * 4]

    assert_same_bits(run(body, X, shared=512)[::-1].copy(), np.where(INDEX < 64, WORDS[::4], 0))


def read_before_it_has_arrived(x, shared):
    wait_for_copies(1)
    shared[thread() * 4] + 0


def read_what_others_copied(x, shared):
    wait_for_copies(0)
    shared[(thread() ^ 127) * 4] + 0


def copy_over_what_others_read(x, shared):
    wait_for_copies(0)
    block_barrier()
    shared[(thread() ^ 127) * 4] + 0
    copy_all(x, shared)


@pytest.mark.parametrize(
    ("after_a_copy", "message"),
    [
        (read_before_it_has_arrived, "nobody has written it"),
        (read_what_others_copied, "with no barrier"),
        (copy_over_what_others_read, "with no barrier"),
    ],
)
def test_copies_take_part_in_races(after_a_copy, message):
    def body(x, out, shared):
        copy_all(x, shared)
        after_a_copy(x, shared)

    with pytest.raises(RaceError, match=message):
        run(body, X, shared=512)


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
            run(body, X, shared=512)
    else:
        assert_same_bits(run(body, X, shared=512)[:64], WORDS[: 4 * 64 : 4].copy())


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

    return run(body, a, b, dtype="float32", shared=512).reshape(16, 8)


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
    assert_same_bits(run(body, x, size=256, dtype="bfloat16"), x.astype(jnp.bfloat16))
