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


def windows_of(sizes: Sizes, kernels=hopper) -> int:
    return count_windows(kernels, sizes.pairs, sizes.num_experts, sizes.expert_width, sizes.model_width, 2)


def test_windows_where_many_rows_of_few_experts_meet_narrow_tokens():
    assert [windows_of(Sizes(tokens, 512, 2048, 4, 1)) for tokens in (8192, 32768, 65536, 131072)] == [1, 2, 4, 4]
    assert [windows_of(sizes) for sizes in GPU_SIZES if sizes.model_width > 512] == [1] * 5
    assert jax.vmap(lambda _: windows_of(Sizes(32768, 512, 2048, 4, 1)))(jnp.zeros(2)).tolist() == [1, 1]
    assert jax.lax.scan(lambda *_: (windows_of(Sizes(32768, 512, 2048, 4, 1)), None), 0, length=2)[0] == 1
    assert windows_of(Sizes(32768, 512, 1792, 4, 1)) == 1  # halves of its columns are no whole tiles
    assert windows_of(Sizes(131072, 512, 2048, 32, 1)) == 1
    assert [windows_of(Sizes(131072, 512, 2048, 4, 1), family) for family in (xla, ampere)] == [1, 1]


@on("hopper", ON_GPUS[0])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("save", ["pre_activations", "inputs"])
@pytest.mark.parametrize(
    ("routing", "count"), [("single_expert", 2), ("two_experts_of_six", 2), ("many_tiles", 4), ("all_slots_empty", 2)]
)
@pytest.mark.default_cases("single_expert-2-pre_activations-swiglu-hopper")
def test_results_are_those_of_one_window(kernels, monkeypatch, traced_anew, routing, count, save, activation):
    problem = kernels.problem(routing, n=512, dtype="bfloat16", param_dtype="float32", activation=activation)
    expected = kernels.results(problem, save=save, activation=activation)
    monkeypatch.setattr(experts, "count_windows", lambda *_: count)
    ours = results(partial(expert_ffn, implementation="mosaic_gpu"), problem, save=save, activation=activation)
    for name in ours.keys() - {"weights", "w_down"}:
        assert_same_bits(ours[name], expected[name])
    for name in ("weights", "w_down"):
        assert ours[name].dtype == jnp.float32
        assert_close(ours[name], expected[name], 1e-6)
