"""Plans: by hand for round numbers, and the order in which memory is given."""

from dataclasses import replace

import jax
import pytest

from blaze_jax.offload.plan import GpuMemoryError, Rates, Sizes, make_plan, measure_rates

GB = 10**9
SIZES = Sizes(
    layers=32,
    layer_bytes=2 * GB,
    decoded_bytes=2 * GB,
    layer_flops=1e9,
    other_bytes=3 * GB,
    other_flops=0.0,
    cache_bytes=10 * GB,
    work_bytes=0,
    token_bytes=100_000,
    used=0.25,
)
RATES = Rates(50.0, 4.0, 500.0)


def test_by_hand():
    plan = make_plan(SIZES, RATES, 40 * GB, 1000, 10**6)
    assert plan.hiding_tokens == 20_000  # 40 ms of 500 TFLOP/s
    assert plan.pass_tokens == 40_000  # which take 4 GB
    assert len(plan.resident) == (40 - 3 - 10 - 6 - 4) // 2
    assert plan.streamed == 24
    assert len(set(plan.resident)) == len(plan.resident)
    assert max(plan.resident) < 32
    prefill, decode = plan.bounds(40_000), plan.bounds(1000, decode=True)
    assert prefill == pytest.approx((24 * 0.04, 67 / 4000, 40_000 * 32e9 / 500e12))
    assert prefill.limit == "arithmetic"
    assert plan.prefill_tokens_per_second == pytest.approx(500e12 / 32e9)
    assert decode.limit == "link"
    assert plan.decode_tokens_per_second == pytest.approx(1000 / 0.96)
    assert decode.memory == pytest.approx(77 / 4000)
    for told in ("8 of 32 layers", "a copy hides under 20,000 tokens", "arithmetic limits it", "link limits it"):
        assert told in str(plan)


def test_fewer_bytes_come_sooner():
    compressed = make_plan(replace(SIZES, layer_bytes=GB), RATES, 40 * GB, 1000, 10**6)
    assert compressed.decode_tokens_per_second > make_plan(SIZES, RATES, 40 * GB, 1000, 10**6).decode_tokens_per_second
    assert compressed.hiding_tokens == 10_000


def test_what_memory_goes_to():
    assert make_plan(SIZES, RATES, 90 * GB, 1000, 10**6).streamed == 0
    assert make_plan(SIZES, RATES, 23 * GB, 1000, 10**6).resident == ()
    less = make_plan(SIZES, RATES, 21 * GB, 1000, 10**6)
    assert (less.resident, less.pass_tokens) == ((), 20_000)
    with pytest.raises(GpuMemoryError, match=r"15\.0 GB of the GPU do not suffice, 20\.0 GB are needed: 3\.0 of other"):
        make_plan(SIZES, RATES, 15 * GB, 1000, 10**6)


def test_a_layer_of_which_three_do_not_fit_comes_in_chunks():
    """In the fewest that do: of 19.9 GB, 13 always stay and a pass takes 4, so that 2.9 are left for three of them."""
    plan = make_plan(replace(SIZES, experts=8), RATES, 19_900_000_000, 1000, 10**6)
    assert (plan.chunks, plan.pass_tokens) == (4, 40_000)
    assert (plan.resident, plan.streamed, plan.host_bytes) == ((0, 64), 126, 63 * GB)
    assert plan.bounds(1000).link == pytest.approx(63 / 50)
    assert "2 of 128 chunks of experts, 4 to a layer, stay; 126 of 0.50 GB each come from 63.0 GB" in str(plan)
    # Of four chunks, three take 0.75 GB, and one decoded, beside what its decoding keeps, as much again.
    compressed = replace(SIZES, experts=8, layer_bytes=GB)
    assert make_plan(compressed, RATES, 16_500_000_000, 1000, 10**6).chunks == 4
    whole = make_plan(replace(SIZES, experts=8), RATES, 40 * GB, 1000, 10**6)
    assert whole == replace(make_plan(SIZES, RATES, 40 * GB, 1000, 10**6), sizes=whole.sizes)
    with pytest.raises(GpuMemoryError, match=r"14\.0 GB of the GPU do not suffice, 14\.8 GB are needed"):
        make_plan(replace(SIZES, experts=8), RATES, 14 * GB, 1000, 10**6)


def test_rates_are_measured():
    assert min(measure_rates(jax.devices()[0], 2**16)) > 0
