"""The router kernel against the portable form, in the interpreter anywhere and on a Hopper GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hopper, simt, xla
from pallas_kernels.compile_only import compile_for_gpu
from pallas_kernels.contract import Rule
from tests.numerics import assert_close, assert_same_bits
from tests.pallas_kernels.rows import assert_same_as_portable

SCORINGS = ("softmax", "softmax_selected", "sigmoid")
# The GPU's exponential and reciprocal are good to 2 units in the last place each.
TOLERANCE = 1e-5


SIZES = [
    *((1, 1, 1), (9, 1, 1), (70, 3, 2), (19, 4, 4), (300, 5, 1), (13, 8, 8), (50, 16, 4), (5, 31, 31), (3, 33, 32)),
    *((300, 64, 2), (1, 128, 8), (7, 200, 32), (7, 384, 8), (20, 1024, 32)),
]


def interpret(logits, bias, rule, *, blocks=2):
    with simt.interpreted():
        return hopper.router(logits, bias, rule, blocks=blocks)


RUNS = [pytest.param(interpret, id="interpreter"), pytest.param(hopper.router, id="gpu", marks=pytest.mark.gpu)]
over_runs = pytest.mark.parametrize("run", RUNS)


portable = jax.jit(xla.router, static_argnums=2)


def random_logits(*shape, dtype="float32", seed=0):
    return jnp.asarray(2 * np.random.default_rng(seed).standard_normal(shape), dtype)


def assert_matches(run, logits, bias, rule):
    """Equal experts, demand and rows; close weights, losses and probability, NaN where the twin has NaN."""
    out, expected = run(logits, bias, rule), portable(logits, bias, rule)
    assert_same_bits(out.experts, expected.experts)
    assert_same_bits(out.demand, expected.demand)
    assert_same_as_portable(expected.experts, logits.shape[1], out.dispatch)
    # A mean may cancel to zero: it is as close as numbers near one can be.
    means = [(np.append(a, 1), np.append(b, 1)) for a, b in zip(out.losses, expected.losses, strict=True)]
    for ours, theirs in [(out.weights, expected.weights), (out.probability, expected.probability), *means]:
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        assert_same_bits(np.isnan(ours), np.isnan(theirs))
        assert_close(np.nan_to_num(ours), np.nan_to_num(theirs), TOLERANCE)
    return out


@over_runs
@pytest.mark.parametrize(("biased", "num_groups"), [(False, 1), (True, 1), (False, 4), (True, 4)])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize(("num_experts", "slots"), [(60, 4), (256, 6)])
def test_every_mode(run, num_experts, slots, scoring, biased, num_groups):
    bias = 0.1 * random_logits(num_experts, seed=1) if biased else None
    # Each size and each scoring meets both.
    plain = (num_experts == 60) == (biased == (num_groups == 1))
    normalize, scale, dtype = (True, 1.0, "float32") if plain else (False, 2.5, "bfloat16")
    rule = Rule(slots, scoring, normalize, scale, num_groups, max(num_groups // 2, 1))
    assert_matches(run, random_logits(41, num_experts, dtype=dtype), bias, rule)


@over_runs
@pytest.mark.parametrize("num_experts", [60, 160])
def test_groups_count_by_their_best_alone(run, num_experts):
    logits = np.array(random_logits(41, num_experts))
    logits[:7, : num_experts // 4] = -np.inf  # a group of which nothing is left
    rule = Rule(6, "softmax", False, 16.0, num_groups=4, groups_per_token=2, scores_per_group=1)
    found = assert_matches(run, jnp.asarray(logits), None, rule)
    assert (found.experts != run(jnp.asarray(logits), None, rule._replace(scores_per_group=2)).experts).any()


@over_runs
@pytest.mark.parametrize(
    ("tokens", "num_experts", "slots", "dtype"),
    [(*size, ("float32", "float16")[i % 2]) for i, size in enumerate(SIZES)],
)
def test_every_size(run, tokens, num_experts, slots, dtype):
    logits = random_logits(tokens, num_experts, dtype=dtype)
    if SIZES.index((tokens, num_experts, slots)) // 2 % 2:
        assert_matches(run, logits, jnp.linspace(0, 1, num_experts), Rule(slots, "sigmoid"))
    else:
        assert_matches(run, logits, None, Rule(slots, "softmax"))


@over_runs
@pytest.mark.parametrize(("num_experts", "slots"), [(4, 2), (12, 5), (128, 8), (300, 32)])
@pytest.mark.parametrize("levels", [1, 2, 5])
def test_ties_go_to_the_lower_id(run, num_experts, slots, levels):
    logits = jnp.asarray(np.random.default_rng(0).integers(0, levels, (23, num_experts)) - levels // 2, jnp.float32)
    assert_matches(run, logits, None, Rule(slots, "softmax"))


@over_runs
def test_logits_that_differ_in_the_last_bit_only(run):
    one = np.float32(1).view(np.int32)
    steps = np.random.default_rng(0).integers(-2, 3, (64, 256)).astype(np.int32)
    assert_matches(run, jnp.asarray((one + steps).view(np.float32)), None, Rule(8, "softmax"))


@over_runs
def test_negative_zero_ties_with_zero(run):
    logits = jnp.asarray(np.where(np.arange(64) % 2, 0.0, -0.0)[None], jnp.float32)
    assert run(logits, None, Rule(4, "softmax")).experts.tolist() == [[0, 1, 2, 3]]


@over_runs
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("num_experts", [4, 60, 256])
@pytest.mark.default_cases("4-softmax-interpreter")
def test_infinite_logits(run, scoring, num_experts):
    logits = np.array(random_logits(24, num_experts))
    logits[:, 1 : num_experts - 1] = -np.inf  # two remain to be chosen
    logits[3] = -np.inf
    logits[4] = random_logits(num_experts)
    bias = 9 * random_logits(num_experts, seed=1)
    rule = Rule(3, scoring, normalize=num_experts != 60)
    out = assert_matches(run, jnp.asarray(logits), None, rule)
    assert (out.experts[:, 2] == -1).sum() == 23
    assert out.experts[3].tolist() == [-1] * 3
    assert np.isfinite(out.weights).all()
    assert (out.weights[out.experts == -1] == 0).all()
    biased = assert_matches(run, jnp.asarray(logits), bias, rule._replace(num_groups=2, groups_per_token=2))
    assert biased.experts[3].tolist() == [-1] * 3
    logits[5, 2] = np.inf
    if scoring != "sigmoid":
        assert np.isnan(run(jnp.asarray(logits), None, rule).weights[5, 0])


@over_runs
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("num_experts", [4, 60])
def test_logits_of_any_level(run, scoring, num_experts):
    levels = np.float32([-1e4, -300, -60, -45, 0, 60, 1e4])
    logits = levels.repeat(3)[:, None] + np.asarray(random_logits(21, num_experts))
    bias = 0.1 * random_logits(num_experts, seed=1)
    for normalize in (True, False):
        out = assert_matches(run, jnp.asarray(logits), None, Rule(3, scoring, normalize))
        assert np.isfinite(out.weights).all()
    # Scores that tie at 0 or 1 in one form need not in the other, so the bias decides alone.
    assert_matches(run, jnp.asarray(logits), bias + 10 * jnp.arange(num_experts), Rule(3, scoring))


@over_runs
@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_nan_stays_in_its_row(run, scoring, num_groups):
    logits = np.array(random_logits(20, 60))
    rule = Rule(5, scoring, num_groups=num_groups, groups_per_token=max(num_groups // 2, 1))
    clean = run(jnp.asarray(logits), None, rule)
    logits[3, 7], logits[8] = np.nan, -np.nan
    out = run(jnp.asarray(logits), None, rule)
    others = np.isin(np.arange(20), [3, 8], invert=True)
    assert_same_bits((out.experts[others], out.weights[others]), (clean.experts[others], clean.weights[others]))
    assert np.isnan(out.weights[8]).all()
    if num_groups == 1:
        assert np.isnan(out.weights[3]).all()
    for row in np.asarray(out.experts):
        assert len(set(row)) == 5
        assert set(row) <= set(range(60))


@over_runs
def test_large_and_small_logits(run):
    rows = np.float32([[1e15, 2e15, -1e15, 0], [-1e15, -2e15, -3e15, -3.1e15], [80, 79, 1, 0]])
    out = assert_matches(run, jnp.asarray(rows), None, Rule(2, "softmax", normalize=False))
    assert_same_bits(out.weights[:2], jnp.array([[1.0, 0.0]] * 2))


@over_runs
def test_two_runs_give_the_same_bits(run):
    logits = random_logits(500, 64)
    assert_same_bits(*(run(logits, None, Rule(4, "softmax")) for _ in range(2)))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.default_cases("softmax-False", "sigmoid-True")
@pytest.mark.ci_cases("*")
def test_backward_is_the_derivative_of_the_portable_form(scoring, normalize):
    logits, rule = random_logits(30, 12), Rule(4, scoring, normalize, 1.7)
    logits = jnp.where(jnp.arange(12) < jnp.arange(30)[:, None], logits, -jnp.inf)  # none are possible, one, and so on
    out, vjp = jax.vjp(lambda l: (lambda r: (r.weights, r.losses, r.probability))(portable(l, None, rule)), logits)
    names = ("d_weights", "d_losses", "d_probability")
    cotangents = jax.tree.map(lambda a: random_logits(*a.shape, seed=a.size), out)
    chosen = portable(logits, None, rule)
    backward = partial(
        jax.jit(xla.router_backward, static_argnames="rule"),
        experts=chosen.experts,
        demand=chosen.demand,
        rule=rule,
        **dict(zip(names, cotangents, strict=True)),
    )
    assert_close(backward(logits), jax.jit(vjp)(cotangents)[0])
    assert np.isfinite(backward(logits)).all()
    assert backward(logits.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize(("num_experts", "slots"), [(1, 1), (4, 1), (16, 4), (128, 8), (256, 8), (1024, 32)])
@pytest.mark.parametrize("biased", [False, True])
def test_lowers_for_cuda(num_experts, slots, biased):
    rule = Rule(slots, "sigmoid" if biased else "softmax", num_groups=2 if biased and num_experts > 1 else 1)
    logits = jax.ShapeDtypeStruct((1000, num_experts), jnp.float32)
    bias = jax.ShapeDtypeStruct((num_experts,), jnp.float32) if biased else None
    lowered = jax.jit(partial(hopper.router, rule=rule)).trace(logits, bias).lower(lowering_platforms=("cuda",))
    assert "moe_router" in lowered.as_text()
    assert "moe_dispatch_place" in lowered.as_text()
    assert "moe_dispatch_count" not in lowered.as_text()  # two launches, and no third


@pytest.mark.compile_only
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "slots"),
    [(24576, 128, 8), (65536, 16, 4), (262144, 256, 8), (2**21, 4, 1), (16384, 512, 8), (5000, 1024, 32)],
)
def test_compiles_without_spills(num_tokens, num_experts, slots):
    rule = Rule(slots, "softmax")
    logits = jax.ShapeDtypeStruct((num_tokens, num_experts), jnp.float32)
    compiled = compile_for_gpu(lambda x: hopper.router(x, None, rule), logits)
    assert [kernel.name for kernel in compiled.kernels] == ["moe_router", "moe_dispatch_place"]
    assert compiled.spill_bytes == {}


@pytest.mark.parametrize(
    ("shape", "dtype", "slots", "reason"),
    [
        ((5, 2000), "float32", 2, "num_experts=2000 must be at most 1024"),
        ((5, 64), "float32", 33, "experts_per_token=33 must be at most 32"),
        ((2**31, 64), "float32", 2, "num_tokens=2147483648"),
        ((5, 64), "float64", 2, "logits have dtype float64"),
    ],
)
def test_says_what_it_cannot_do(shape, dtype, slots, reason):
    with jax.enable_x64(True):
        logits = jax.ShapeDtypeStruct(shape, dtype)
    assert hopper.router_unsupported(logits, slots).startswith(reason)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "num_experts", "slots"),
    [(24576, 128, 8), (32768, 128, 8), (65536, 16, 4), (262144, 256, 8), (2**21, 4, 1), (16384, 512, 8)],
)
def test_sizes_on_the_gpu(tokens, num_experts, slots):
    logits, rule = random_logits(tokens, num_experts), Rule(slots, "softmax")
    out = assert_matches(hopper.router, logits, None, rule)
    assert_same_bits(hopper.router(logits, None, rule), out)
    assert_same_bits(out.dispatch, hopper.dispatch(out.experts, num_experts))
