"""Kernels that decode their weights: the bits that they give with numbers, whatever the form and routing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax import quantize
from pallas_kernels import hopper
from pallas_kernels.codings import CODINGS, NORMAL_FLOAT4
from pallas_kernels.compile_only import compile_for_gpu
from pallas_kernels.tuning.parameters import TileTuning
from tests.numerics import assert_same_bits
from tests.pallas_kernels.programs import array
from tests.pallas_kernels.rows import ACTIVATIONS, Rows, needs_interpreter

FORMS = list(CODINGS)
KERNELS = ("up_projection", "down_projection", "down_backward", "up_backward")
of_forms = pytest.mark.parametrize("form", FORMS)
of_sizes = pytest.mark.parametrize(
    "sizes", [(37, 2, 3, 192, 64), (300, 2, 5, 320, 192), (3000, 4, 16, 1024, 512)], ids=str
)


def call(kernel, groups, x, rows, ups, w_down, columns, family=hopper, **options):
    """What a kernel gives for rows that stand for a pair. Biases are numbers of columns, and of experts."""
    first, number = columns
    biases = [jnp.linspace(-1, 1, w.shape[0] * w.shape[2]).reshape(w.shape[0], -1) for w in (*ups, w_down)]
    row_weights = jnp.linspace(0.5, 2, groups.num_rows)
    arguments = {
        "up_projection": (x, ups, tuple(biases[:-1]), groups),
        "down_projection": (rows, w_down, biases[-1], groups, first, number),
        "down_backward": (x, w_down, None, (rows, rows), row_weights, groups),
        "up_backward": ((rows, rows), ups, groups, first, number),
    }[kernel]
    if kernel in ("up_projection", "down_backward"):
        options["activation"] = ACTIVATIONS[2]
    results = getattr(family, kernel)(*arguments, **options)
    owned = groups.expert_token_indices < x.shape[0]
    return jax.tree.map(lambda r: jnp.where(owned.reshape(-1, *(1 for _ in r.shape[1:])), r, 0), results)


def operands(rng, num_experts, num_rows, num_tokens, d, n):
    """Tokens and rows, and weights of float32, of which one has a tile of zeros, as no number of its scale may be."""

    def normal(*shape, dtype="bfloat16", fan_in=1):
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(fan_in), dtype)

    weights = [normal(num_experts, *shape, dtype="float32", fan_in=shape[0]) for shape in ((d, n), (d, n), (n, d))]
    weights[0] = weights[0].at[0, :64].set(0)
    return normal(num_tokens, d), normal(num_rows, n), weights


def kernels_of_qwen3(family, form):
    """A program of all kernels for Qwen3-30B-A3B's experts, and its arguments."""

    def program(ids, x, rows, ups, w_down):
        groups = family.dispatch(ids, 128)
        rows = jnp.zeros((groups.num_rows, rows.shape[1]), rows.dtype)
        return [call(kernel, groups, x, rows, ups, w_down, (0, 512), family=family) for kernel in KERNELS]

    up, down = (
        jax.eval_shape(lambda w: quantize(w, form), array(128, *shape, dtype="float32"))
        for shape in ((2048, 768), (768, 2048))
    )
    return program, array(4096, 8, dtype="int32"), array(4096, 2048), array(8, 768), (up, up), down


def compressed_and_not(weights, form):
    codes = [quantize(weight, form) for weight in weights]
    for ups_and_down in codes, [weight.astype(jnp.bfloat16) for weight in codes]:
        yield tuple(ups_and_down[:2]), ups_and_down[2]


def assert_same(found, expected):
    """The same bits, but for sums over a row, the third result of down backward: their terms' order differs."""
    if isinstance(found, tuple) and len(found) == 3:
        (*found, of_rows), (*expected, expected_of_rows) = found, expected
        np.testing.assert_allclose(of_rows, expected_of_rows, rtol=1e-4, atol=1e-5)
    assert_same_bits(found, expected)


@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize("kernel", KERNELS)
@of_forms
@pytest.mark.parametrize("shares", ["fixed", "dynamic"])
@pytest.mark.ci_cases("fixed-nf4-up_projection", "dynamic-mxfp4-down_backward")
def test_the_bits_of_decoded_weights(kernel, form, shares):
    """Of more k steps than slots."""
    tuning = TileTuning(stages=4, shares=shares)
    with hopper.interpreted():
        rows = Rows(hopper, "whole_tiles_and_a_tail")
        x, of_rows, weights = operands(rows.rng, rows.num_experts, rows.num_rows, rows.num_tokens, 320, 320)
        found, expected = (
            call(kernel, rows.groups, x, of_rows, *both, (64, 64), tuning=tuning)
            for both in compressed_and_not(weights, form)
        )
    assert_same(found, expected)


@needs_interpreter
@pytest.mark.parametrize("given", ["ungated", "activations alone", "quantized"])
@pytest.mark.default_cases("activations alone")
def test_the_bits_of_other_up_projections(given):
    options = {
        "ungated": {"activation": ACTIVATIONS[1]},
        "activations alone": {"activation": ACTIVATIONS[2], "keep_pre_activations": False},
        "quantized": {"activation": ACTIVATIONS[2], "quantize": True},
    }[given]
    with hopper.interpreted():
        rows = Rows(hopper, "whole_tiles_and_a_tail")
        x, _, weights = operands(rows.rng, rows.num_experts, rows.num_rows, rows.num_tokens, 128, 192)
        owned = rows.groups.expert_token_indices < rows.num_tokens
        found, expected = (
            hopper.up_projection(x, ups[: 1 if given == "ungated" else 2], (), rows.groups, **options)[1][owned]
            for ups, _ in compressed_and_not(weights, "nf4")
        )
    assert_same_bits(found, expected)


def on_a_gpu(family, sizes, form):
    """Results of all kernels with compressed weights, and with their numbers."""
    num_tokens, slots, num_experts, d, n = sizes
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, num_experts, (num_tokens, slots)), jnp.int32)
    groups = jax.jit(family.dispatch, static_argnums=1)(ids, num_experts)
    x, of_rows, weights = operands(rng, num_experts, groups.num_rows, num_tokens, d, n)
    run = jax.jit(lambda *given: [call(kernel, *given, columns=(64, 128), family=family) for kernel in KERNELS])
    return [run(groups, x, of_rows, *both) for both in compressed_and_not(weights, form)]


@pytest.mark.gpu
@of_forms
@of_sizes
def test_the_bits_of_decoded_weights_on_a_gpu(sizes, form):
    for result, number in zip(*on_a_gpu(hopper, sizes, form), strict=True):
        assert_same(result, number)


@pytest.mark.compile_only
@of_forms
@pytest.mark.default_cases("nf4")
def test_decoding_spills_nothing(form):
    """For Qwen3-30B-A3B's experts."""
    program = compile_for_gpu(*kernels_of_qwen3(hopper, form))
    assert {f"moe_{kernel}" for kernel in KERNELS} <= {kernel.name for kernel in program.kernels}
    assert program.spill_bytes == {}


def test_what_is_decoded_before():
    """Weights of several forms, tokens of another type than bfloat16, and outputs that no thread can share out."""
    nf4, mxfp4, narrow = (quantize(jnp.ones((2, 64, n)), form) for n, form in ((32, "nf4"), (32, "mxfp4"), (24, "nf4")))
    assert hopper.decodes((nf4, nf4), jnp.bfloat16)
    for weights in ((nf4, mxfp4), (nf4, nf4.astype("bfloat16")), (narrow,)):
        assert not hopper.decodes(weights, jnp.bfloat16)
    assert not hopper.decodes((nf4,), jnp.float16)
    assert not hopper.in_fp8().decodes((nf4,), jnp.bfloat16)


def test_codes_of_nf4_are_as_kernels_look_them_up():
    """Codes c and c + 8 have the sign and the last bit of the exponent in common."""
    bits = np.asarray(NORMAL_FLOAT4, jnp.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(bits[:8] & 0x8080, bits[8:] & 0x8080)
