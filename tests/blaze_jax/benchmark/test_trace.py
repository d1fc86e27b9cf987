"""Reading of profiles, with ones written by hand in place of a GPU's."""

import jax
import jax.numpy as jnp
import pytest

from blaze_jax.benchmark.trace import Kernel, TraceError, busy_ns, kernels_of, split, trace
from tests.blaze_jax.benchmark.profiles import profile


def test_kernels_of_the_streams_once_and_in_order():
    found = kernels_of(profile([("b", 30, 5, "jit_g"), ("a", 10, 2, "jit_f")]))
    assert [(k.name, k.module, k.duration_ns) for k in found] == [("a", "jit_f", 2000.0), ("b", "jit_g", 5000.0)]
    assert found[1].start_ns - found[0].start_ns == 20000.0


def test_lines_of_unknown_names_count_but_not_the_summaries():
    found = kernels_of(profile([("a", 10, 2, "")], line="Compute #1"))
    assert [k.name for k in found] == ["a"]


def test_the_first_gpu_of_several():
    other = 'planes { name: "/device:GPU:1" } planes { name: "/host:CPU" }'
    assert len(kernels_of(profile([("a", 0, 1, "")], extra_planes=other))) == 1


def test_says_what_planes_there_are_when_none_is_a_gpu():
    with pytest.raises(TraceError, match=r"no plane of a GPU, only: /host:CPU, /device:TPU:0"):
        kernels_of(profile([("a", 0, 1, "")], plane="/device:TPU:0", extra_planes='planes { name: "/host:CPU" }'))


def test_says_what_lines_there_are_when_no_kernel_ran():
    with pytest.raises(TraceError, match=r"/device:GPU:0 has no kernel on its streams; its lines are: Stream #13"):
        kernels_of(profile([]))


def test_a_trace_on_a_cpu_has_no_gpu_in_it():
    if jax.default_backend() == "gpu":
        assert trace(lambda: jax.block_until_ready(jnp.ones(8) + 1))
        return
    with pytest.raises(TraceError, match=r"no plane of a GPU, only: .*host:CPU"):
        trace(lambda: jax.block_until_ready(jnp.ones(8) + 1))


def kernel(name, start, length):
    return Kernel(name, "", start, length)


def test_gaps_do_not_count_and_overlaps_count_once():
    assert busy_ns([kernel("a", 0, 10), kernel("b", 5, 10), kernel("c", 6, 2), kernel("d", 20, 3)]) == 18
    assert busy_ns([]) == 0


def test_pieces_between_marks():
    kernels = [kernel(name, i, 1) for i, name in enumerate("xMabMMcM")]
    pieces = split(kernels, lambda k: k.name == "M")
    assert ["".join(k.name for k in piece) for piece in pieces] == ["ab", "c", ""]
