"""Kernels that use no tensor core serve every NVIDIA GPU since Ampere: they compile for each, and spill nothing."""

import multiprocessing

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import hopper
from pallas_kernels.compile_only import compile_for_gpu
from pallas_kernels.compile_only.gpus import GPUS
from pallas_kernels.contract import Rule

TOKENS, EXPERTS, SLOTS, WIDTH, CHOSEN = 4096, 64, 4, 512, 1 << 30


def routed_and_combined(logits, rows, y):
    """The router, whose kernels count and place pairs as well, and its pairs' rows added up."""
    routed = hopper.router(logits, None, Rule(SLOTS, "sigmoid", normalize=True))
    return hopper.combine(rows, routed.dispatch.token_index_map, routed.weights, y, 0), routed


def selected(keys, wanted):
    cutoffs = hopper.token_cutoffs(keys, wanted)
    return hopper.dispatch(hopper.experts_added(keys, cutoffs, CHOSEN, SLOTS)[0], EXPERTS)


def array(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def compiled(gpu):
    """Names of the kernels, in two programs, and what they spill."""
    rows = array((TOKENS * SLOTS + 8 * EXPERTS + 128, WIDTH), jnp.bfloat16)
    routing = (array((TOKENS, EXPERTS), jnp.float32), rows, array((TOKENS, WIDTH), jnp.bfloat16))
    choosing = (array((EXPERTS, TOKENS), jnp.int32), array((EXPERTS,), jnp.int32))
    both = compile_for_gpu(routed_and_combined, *routing, gpu=gpu), compile_for_gpu(selected, *choosing, gpu=gpu)
    return [(sorted(kernel.name for kernel in program.kernels), program.spill_bytes) for program in both]


@pytest.mark.compile_only
@pytest.mark.default_sets(8)
@pytest.mark.parametrize("gpu", GPUS)
def test_compiles_for_every_gpu_without_spills(gpu):
    with multiprocessing.get_context("spawn").Pool(1) as process:
        assert process.apply(compiled, (gpu,)) == [
            (["moe_combine", "moe_dispatch_place", "moe_router"], {}),
            (["moe_dispatch_count", "moe_dispatch_place", "moe_experts_added", "moe_token_cutoffs"], {}),
        ]
