"""Experts choose tokens: cut-offs and what they add, by the portable form and by the kernels for Hopper."""

import contextlib

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hopper, simt, xla
from tests.numerics import assert_same_bits

CHOSEN = 1 << 30
KEYS = {
    "of_scores": lambda rng, shape: rng.random(shape, np.float32).view(np.int32),
    "over_all_bits": lambda rng, shape: rng.integers(0, 2**31 - 1, shape, np.int32),
    "with_ties": lambda rng, shape: rng.integers(5, 8, shape, np.int32) << 20,
    "equal": lambda rng, shape: np.full(shape, 7, np.int32),
    "zero": lambda rng, shape: np.zeros(shape, np.int32),
}
RUNS = [
    pytest.param(xla, contextlib.nullcontext, id="xla"),
    pytest.param(hopper, simt.interpreted, id="interpreter"),
    pytest.param(hopper, contextlib.nullcontext, id="gpu", marks=pytest.mark.gpu),
]
over_runs = pytest.mark.parametrize(("kernels", "running"), RUNS)
over_keys = pytest.mark.parametrize("kind", KEYS)


def problem(kind, num_experts, num_tokens, seed=0):
    """Keys, some of them chosen, and how many tokens each expert wants: none, all, or something between."""
    rng = np.random.default_rng(seed)
    keys = KEYS[kind](rng, (num_experts, num_tokens))
    if kind != "over_all_bits":
        keys = np.where(rng.random(keys.shape) < 0.2, keys | CHOSEN, keys)
    wanted = rng.integers(0, num_tokens + 1, num_experts, np.int32)
    wanted[:2] = (num_tokens, 0)[: len(wanted)]
    return keys, wanted


def taken_by_sorting(keys, wanted):
    out = np.zeros(keys.shape, bool)
    for expert, (row, count) in enumerate(zip(keys, wanted, strict=True)):
        out[expert, np.argsort(-row.astype(np.int64), kind="stable")[:count]] = True
    return out


def take(cutoffs, keys):
    expert, token = np.indices(keys.shape)
    return np.asarray(cutoffs.take(jnp.asarray(keys), jnp.asarray(expert), jnp.asarray(token)))


@over_runs
@over_keys
@pytest.mark.parametrize(("num_experts", "num_tokens"), [(1, 1), (3, 2), (5, 45), (2, 5000)])
@pytest.mark.default_cases("1-1-equal-*", "3-2-with_ties-xla", "5-45-*", "2-5000-with_ties-interpreter")
def test_cutoffs_take_the_best(kernels, running, kind, num_experts, num_tokens):
    keys, wanted = problem(kind, num_experts, num_tokens)
    with running():
        cutoffs = kernels.token_cutoffs(jnp.asarray(keys), jnp.asarray(wanted))
    assert cutoffs.keys.dtype == cutoffs.tokens.dtype == jnp.int32
    assert_same_bits(take(cutoffs, keys), taken_by_sorting(keys, wanted))


@over_runs
@over_keys
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize(("num_experts", "num_tokens"), [(1, 1), (5, 45), (19, 300)])
@pytest.mark.default_cases("1-1-3-equal-*", "5-45-3-over_all_bits-*", "19-300-1-equal-xla", "19-300-3-with_ties-*")
def test_added_experts(kernels, running, kind, num_experts, num_tokens, slots):
    keys, wanted = problem(kind, num_experts, num_tokens)
    cutoffs = xla.token_cutoffs(jnp.asarray(keys), jnp.asarray(wanted))
    with running():
        experts, crowded = kernels.experts_added(jnp.asarray(keys), cutoffs, CHOSEN, slots)
    added = taken_by_sorting(keys, wanted) & (keys < CHOSEN)
    expected, too_many = np.full((num_tokens, slots), -1, np.int32), np.zeros(num_experts, bool)
    for token in range(num_tokens):
        ids = np.flatnonzero(added[:, token])
        expected[token, : len(ids)] = ids[:slots]
        too_many[ids[slots:]] = True
    assert_same_bits(experts, expected)
    assert_same_bits(crowded, too_many)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["of_scores", "with_ties"])
@pytest.mark.parametrize(("num_experts", "num_tokens"), [(512, 16384), (128, 24576), (4, 2**21)])
def test_sizes_on_the_gpu(kind, num_experts, num_tokens):
    keys, wanted = (jnp.asarray(a) for a in problem(kind, num_experts, num_tokens))
    cutoffs = hopper.token_cutoffs(keys, wanted)
    expected = xla.token_cutoffs(keys, wanted)
    assert_same_bits(take(cutoffs, keys), take(expected, keys))
    few = hopper.token_cutoffs(keys, jnp.minimum(wanted, num_tokens // 8 + 50))
    assert_same_bits(hopper.experts_added(keys, few, CHOSEN, 8), xla.experts_added(keys, few, CHOSEN, 8))


@pytest.mark.compile_only
def test_compiles_for_the_h200_without_spills():
    from pallas_kernels.compile_only import compile_for_gpu

    def both(keys, wanted):
        cutoffs = hopper.token_cutoffs(keys, wanted)
        return cutoffs, hopper.experts_added(keys, cutoffs, CHOSEN, 8)

    keys, wanted = (jnp.zeros(shape, jnp.int32) for shape in ((512, 16384), (512,)))
    compiled = compile_for_gpu(both, keys, wanted)
    assert {k.name for k in compiled.kernels} == {"moe_token_cutoffs", "moe_experts_added"}
    assert compiled.spill_bytes == {}
