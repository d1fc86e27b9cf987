"""Kernels that use no more than Ampere has serve every NVIDIA GPU since: they compile for each, and spill nothing.

A process compiles for one compute capability, and starting one takes as long as ten kernels: it compiles all of them.
"""

import multiprocessing
from functools import partial

import jax
import pytest

from blaze_jax.activations import ACTIVATION_NAMES, get_activation
from pallas_kernels import ampere
from pallas_kernels.codings import CODINGS
from pallas_kernels.compile_only import compile_for_gpu
from pallas_kernels.compile_only.gpus import GPUS
from pallas_kernels.contract import Rule
from pallas_kernels.tuning.parameters import mma_heuristic
from tests.pallas_kernels.hopper.test_decoding import KERNELS as DECODING
from tests.pallas_kernels.hopper.test_decoding import kernels_of_qwen3
from tests.pallas_kernels.programs import array, down_and_gradients, up_and_back

T, D, N, E, K = 8192, 1024, 512, 64, 4

ONE_OF_EACH = list({gpu.capability: name for name, gpu in GPUS.items()}.values())
"""A GPU of each compute capability: the assembler goes by that alone."""

EVERYWHERE = [("swiglu", "bfloat16"), ("clamped_swiglu", "bfloat16"), ("swiglu", "float32")]
"""The usual one, and the one that takes most registers; the others are compiled for one GPU in each type."""

OTHERS = [name for name in ACTIVATION_NAMES if (name, "bfloat16") not in EVERYWHERE]


def activations_on(gpu: str) -> list[tuple[str, str]]:
    """Activations and types for which the kernels are compiled for this GPU."""
    turn = [(name, dtype) for name in OTHERS for dtype in ("bfloat16", "float32")]
    return EVERYWHERE + turn[ONE_OF_EACH.index(gpu) :: len(ONE_OF_EACH)]


def choice(keys, wanted):
    cutoffs = ampere.token_cutoffs(keys, wanted)
    return ampere.dispatch(ampere.experts_added(keys, cutoffs, 1 << 30, K)[0], E)


def routing(logits, rows, y):
    """The router, whose kernels count and place pairs as well, and its pairs' rows added up."""
    routed = ampere.router(logits, None, Rule(K, "sigmoid", normalize=True))
    return ampere.combine(rows, routed.dispatch.token_index_map, routed.weights, y, 0), routed


def compiled(gpu: str) -> dict[str, tuple[list[str], dict[str, int]]]:
    """For each program, names of its kernels and what they spill."""
    reports = {}

    def compile_(name, function, *arguments):
        program = compile_for_gpu(function, *arguments, gpu=gpu)
        reports[name] = sorted({kernel.name for kernel in program.kernels}), program.spill_bytes

    def experts(dtype):
        """The tile of a kernel, and what both halves take."""

        def tile_of(kernel):
            tile = mma_heuristic(kernel, dtype, ".".join(map(str, GPUS[gpu].capability)))
            assert tile.shared_bytes <= GPUS[gpu].block_kib * 1024
            return tile

        down = array(E, N, D, dtype=dtype), array(E, D, dtype=dtype)
        return tile_of, array(T, D, dtype=dtype), (*down, array(groups.num_rows, dtype="float32"), groups)

    choosing = array(E, T, dtype="int32"), array(E, dtype="int32")
    groups = jax.eval_shape(choice, *choosing)
    compile_("choice", choice, *choosing)
    rows = array(groups.num_rows, D, dtype="bfloat16")
    compile_("routing", routing, array(T, E, dtype="float32"), rows, array(T, D, dtype="bfloat16"))
    for dtype in ("bfloat16", "float32", *(["float16"] if gpu == "h200" else [])):
        tile_of, x, others = experts(dtype)
        rows = array(groups.num_rows, N, dtype=dtype)
        compile_(
            f"down_and_gradients {dtype}",
            partial(down_and_gradients, ampere, (dtype, "float32"), tile_of),
            x,
            rows,
            *others,
        )
    for name, dtype in activations_on(gpu):
        activation = get_activation(name)
        tile_of, x, others = experts(dtype)
        up = [(array(*shape, dtype=dtype),) * (1 + activation.gated) for shape in ((E, D, N), (E, N))]
        program = partial(up_and_back, ampere, activation.function, tile_of)
        compile_(f"up_and_back {name} {dtype}", program, x, *up, *others)
        if (name, dtype) in EVERYWHERE:
            compile_(f"up_and_back {name} {dtype} quantized", partial(program, quantize=True), x, *up, *others)
    for form in CODINGS:
        compile_(f"decoding {form}", *kernels_of_qwen3(ampere, form))
    return reports


KERNELS = {
    "choice": ["moe_dispatch_count", "moe_dispatch_place", "moe_experts_added", "moe_token_cutoffs"],
    "routing": ["moe_combine", "moe_dispatch_place", "moe_router"],
    "decoding": ["moe_dispatch_count", "moe_dispatch_place", *sorted(f"moe_{kernel}" for kernel in DECODING)],
    "up_and_back": ["moe_down_backward", "moe_up_backward", "moe_up_projection"],
    "down_and_gradients": [
        "moe_down_bias_gradients",
        "moe_down_projection",
        "moe_down_weight_gradients",
        "moe_up_bias_gradients",
        "moe_up_weight_gradients",
    ],
}


@pytest.mark.compile_only
@pytest.mark.default_cases("rtx3090", "rtx4090", "rtx5090")
@pytest.mark.parametrize("gpu", ONE_OF_EACH)
def test_compiles_without_spills(gpu):
    with multiprocessing.get_context("spawn").Pool(1) as process:
        reports = process.apply(compiled, (gpu,))
    assert reports == {name: (KERNELS[name.split()[0]], {}) for name in reports}
