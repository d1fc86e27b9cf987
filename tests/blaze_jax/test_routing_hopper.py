"""`route` on the kernel: what it decides, its gradients and vmap, against the portable form."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax import route
from pallas_kernels import simt
from pallas_kernels.compile_only import compile_for_gpu
from tests import layers
from tests import routing_reference as reference
from tests.numerics import assert_close, assert_same_bits
from tests.over_devices import make_mesh
from tests.routing_reference import random_logits

T, E, K = 40, 12, 3
LOGITS = random_logits(T, E)
TOLERANCE = 1e-5
OPTIONS = [
    {},
    {"scoring": "softmax_selected", "weight_scale": 1.5},
    {"scoring": "sigmoid", "normalize_weights": False, "num_groups": 4, "groups_per_token": 2},
    {"expert_capacity": 7},
    {"token_rounding": "nearest", "rounding_tile": 8, "rounding_slots": 2},
]
BIAS = {"selection_bias": random_logits(E, seed=1, scale=0.2)}


def on_kernel(logits, **options):
    """`route` on the kernel in the interpreter."""
    with simt.interpreted():
        return layers.route(logits, K, implementation="mosaic_gpu", **options)


def on_xla(logits, **options):
    return layers.route(logits, K, implementation="xla", **options)


def assert_matches(out, expected):
    for name, value in expected._asdict().items():
        if not isinstance(value, jax.Array):  # what the portable form leaves to others
            continue
        if jnp.issubdtype(value.dtype, jnp.integer):
            assert_same_bits(getattr(out, name), value)
        else:
            assert_close(getattr(out, name), value, TOLERANCE)


def total(run, logits, **options):
    """Losses are means over tokens, so they weigh by those: their gradient is then as large as the weights' is.

    For K = 1 that of normalized weights is zero up to rounding, and would otherwise drown the losses'.
    """
    return reference.total(run, logits, len(logits), **options)


def gradient_of(function, *arguments):
    """Compiled where kernels are interpreted: the forward rule is traced after `on_kernel` has returned."""
    with simt.interpreted():
        return jax.jit(jax.grad(function))(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "vmapped"),
    [*((o, False) for o in (*OPTIONS, OPTIONS[2] | BIAS, OPTIONS[4] | BIAS)), ({}, True), (OPTIONS[4] | BIAS, True)],
)
def test_decisions_and_gradients(options, vmapped):
    logits, mapped = (random_logits(3, T, E), jax.vmap) if vmapped else (LOGITS, lambda run: run)
    assert_matches(*(mapped(partial(run, **options))(logits) for run in (on_kernel, on_xla)))
    gradient, expected = (
        gradient_of(lambda l, run=run: mapped(partial(total, run, **options))(l).sum(), logits)
        for run in (on_kernel, on_xla)
    )
    assert_close(gradient, expected, TOLERANCE)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    mesh, split = make_mesh({"data": 4}), jax.P("data")

    def sharded(implementation):
        def weights(logits):
            return route(logits, K, implementation=implementation).weights

        return jax.jit(jax.shard_map(weights, mesh=mesh, in_specs=split, out_specs=split, check_vma=check_vma))

    assert "moe_router" in sharded("mosaic_gpu").trace(LOGITS).lower(lowering_platforms=("cuda",)).as_text()
    assert_same_bits(sharded(None)(LOGITS), on_xla(LOGITS).weights)


def test_forward_and_backward_lower_for_cuda():
    run = partial(route, experts_per_token=K, implementation="mosaic_gpu")
    step = jax.jit(jax.value_and_grad(partial(total, run)))
    text = step.trace(LOGITS).lower(lowering_platforms=("cuda",)).as_text()
    assert "moe_router" in text
    # No choice is left to XLA, and the gradient of the weights is spread by comparisons.
    assert [word for word in ("top_k", "stablehlo.sort", "scatter") if word in text] == []


@pytest.mark.parametrize(
    ("shape", "dtype", "slots", "reason"),
    [
        ((3, 1025), "float32", 2, "num_experts=1025 must be at most 1024"),
        ((3, 64), "float32", 33, "experts_per_token=33 must be at most 32"),
        ((3, 64), "float64", 2, "logits have dtype float64"),
    ],
)
def test_what_the_kernel_cannot_do_is_named(shape, dtype, slots, reason):
    with jax.enable_x64(True):
        logits = jnp.zeros(shape, dtype)
        with pytest.raises(NotImplementedError, match=f"implementation='mosaic_gpu' cannot run this: {reason}"):
            route(logits, slots, implementation="mosaic_gpu")
        assert route(logits, slots).experts.shape == (shape[0], slots)


def test_no_tokens():
    assert_matches(on_kernel(jnp.zeros((0, E))), on_xla(jnp.zeros((0, E))))


@pytest.mark.compile_only
@pytest.mark.parametrize("mode", ["nearest", "down"])
def test_rounding_writes_the_scores_of_all_experts_once(mode):
    """Left to itself, XLA writes them without their sum, transposed, and then with it."""
    call = partial(route, experts_per_token=8, implementation="mosaic_gpu", token_rounding=mode)
    compiled = compile_for_gpu(call, jax.ShapeDtypeStruct((16384, 512), jnp.float32))
    assert compiled.spill_bytes == {}
    keys = 16384 * 512 * 4
    assert keys <= compiled.memory.temp_size_in_bytes < 1.1 * keys


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("tokens", "num_experts", "slots"), [(24576, 128, 8), (65536, 16, 4), (2**20, 4, 1)])
def test_on_the_gpu(tokens, num_experts, slots, options):
    if options.get("num_groups"):
        options = options | {"groups_per_token": 4}
    if slots == 1 and options.get("scoring") == "softmax_selected":
        options = options | {"scoring": "softmax"}  # the weight of one selected expert would be a constant
    logits = random_logits(tokens, num_experts)
    results = []
    for implementation in ("mosaic_gpu", "xla"):
        run = jax.jit(partial(route, experts_per_token=slots, implementation=implementation, **options))
        results.append((run(logits), jax.grad(lambda l, run=run: total(run, l))(logits)))
    (out, gradient), (expected, expected_gradient) = results
    different = (np.asarray(out.experts) != np.asarray(expected.experts)).mean()
    assert different < (1e-4 if options.get("num_groups") or options.get("token_rounding") else 1e-9)
    if not different:
        assert_matches(out, expected)
        assert_close(gradient, expected_gradient, TOLERANCE)
