"""The activation computed in windows of the rows, and half its columns at a time going back: results are the same."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from blaze_jax import expert_ffn, experts
from blaze_jax.benchmark.sizes import GPU_SIZES, Sizes
from blaze_jax.plan import count_windows
from pallas_kernels import ampere, hopper, xla
from tests.expert_problems import ON_GPUS, on, results
from tests.numerics import assert_close, assert_same_bits
from tests.pallas_kernels.rows import needs_interpreter

HOPPER = pytest.param("hopper", marks=needs_interpreter)


def windows_of(sizes: Sizes, kernels=hopper) -> int:
    return count_windows(kernels, sizes.pairs, sizes.num_experts, sizes.expert_width, sizes.model_width, 2)


def test_windows_where_many_rows_of_few_experts_meet_narrow_tokens():
    layer = Sizes(32768, 512, 2048, 4, 1)
    assert [windows_of(layer._replace(num_tokens=tokens)) for tokens in (8192, 32768, 65536, 131072)] == [1, 2, 4, 4]
    assert [windows_of(sizes) for sizes in GPU_SIZES if sizes.model_width > 512] == [1] * 5
    assert windows_of(layer._replace(num_experts=5)) == 1
    assert windows_of(layer._replace(expert_width=2304)) == 1  # half its columns are no whole tiles
    assert windows_of(layer, xla) == windows_of(layer, ampere) == 1


def test_no_windows_in_loops():
    """What several kernels write cannot be one layer's place in a loop's stack."""
    count = partial(windows_of, Sizes(32768, 512, 2048, 4, 1))
    assert jax.jit(lambda _: count())(0) == 2
    assert jax.vmap(lambda _: count())(jnp.zeros(2)).tolist() == [1, 1]
    assert jax.lax.scan(jax.checkpoint(lambda *_: (count(), None)), 0, length=2)[0] == 1
    assert jax.lax.fori_loop(0, 2, lambda *_: jax.jit(count)(), 0) == 1


@on(HOPPER)
def test_output_and_gradients_are_right(kernels, monkeypatch, traced_anew):
    monkeypatch.setattr(experts, "count_windows", lambda *_: 3)  # of two tiles, one and none
    kernels.assert_matches_oracle(kernels.problem("whole_tiles_and_a_tail", n=512, dtype="bfloat16"))


@pytest.mark.slow
@on(HOPPER, ON_GPUS[0])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(("routing", "count"), [("two_experts_of_six", 2), ("many_tiles", 4)])
def test_results_are_those_of_one_window(kernels, monkeypatch, traced_anew, routing, count, biases, activation):
    options = {"activation": activation}
    problem = kernels.problem(routing, n=512, dtype="bfloat16", param_dtype="float32", biases=biases, **options)
    expected = kernels.results(problem, **options)
    monkeypatch.setattr(experts, "count_windows", lambda *_: count)
    ours = results(partial(expert_ffn, implementation="mosaic_gpu"), problem, **options)
    for name in ours.keys() - {"weights", "w_down"}:
        assert_same_bits(ours[name], expected[name])
    for name in ("weights", "w_down"):
        assert_close(ours[name], expected[name], 1e-6)
