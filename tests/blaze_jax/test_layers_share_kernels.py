"""Layers written one after the other: the program that is lowered for them holds each kernel once."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from blaze_jax import RESIDUAL_NAMES, MoEConfig, moe
from blaze_jax.benchmark.sizes import forward_and_backward
from pallas_kernels.compile_only import compile_for_gpu, kernel_hashes

T, D = 512, 256
KERNELS = 10  # router, dispatch, two of combine (weighted or not), and six with products
CONFIG = MoEConfig(num_experts=8, experts_per_token=2, expert_width=128, implementation="mosaic_gpu")


def program(layers, config=CONFIG, wrap=lambda layer: layer):
    """Forward and backward pass of so many layers with parameters of their own, and the types of its arguments."""
    shapes = [p.shape for p in config.parameters(D).values()]
    layer = wrap(lambda x, *values: x + moe(x, dict(zip(config.parameters(D), values, strict=True)), config)[0])

    def model(x, *values):
        for i in range(layers):
            x = layer(x, *values[i * len(shapes) : (i + 1) * len(shapes)])
        return x

    x, *values = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((T, D), *shapes * layers))
    return forward_and_backward(model), (x, *values, x)


def hashes(*options):
    function, arguments = program(*options)
    return kernel_hashes(jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)))


def sharded(layer):
    """The layer on tokens that are sharded over four devices, with replicated parameters."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    tokens, replicated = PartitionSpec("data"), (PartitionSpec(),) * len(CONFIG.parameters(D))
    return jax.shard_map(layer, mesh=mesh, in_specs=(tokens, *replicated), out_specs=tokens, check_vma=False)


@pytest.mark.parametrize(
    ("wrap", "count"),
    [
        (lambda layer: layer, KERNELS),
        (jax.checkpoint, KERNELS + 1),  # the first pass has an up projection that keeps no pre-activations
        (partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)), KERNELS),
        (sharded, KERNELS),
    ],
    ids=["plain", "checkpoint", "checkpoint_by_name", "shard_map"],
)
@pytest.mark.slow
def test_three_layers_have_the_kernels_of_one(wrap, count):
    found = hashes(3, CONFIG, wrap)
    assert len(found) == len(set(found)) == count


@pytest.mark.slow
def test_one_layer_has_no_fewer():
    assert len(hashes(1)) == KERNELS


@pytest.mark.slow
def test_layers_of_another_activation_have_two_kernels_of_their_own():
    programs = [program(1, config) for config in (CONFIG, replace(CONFIG, activation="geglu"))]

    def run(*arguments):
        return [function(*own) for (function, _), own in zip(programs, arguments, strict=True)]

    traced = jax.jit(run).trace(*(arguments for _, arguments in programs))
    found = kernel_hashes(traced.lower(lowering_platforms=("cuda",)))
    assert len(found) == len(set(found)) == KERNELS + 2  # up projection and down backward


@pytest.mark.compile_only
def test_three_layers_compile_each_kernel_once():
    function, arguments = program(3)
    kernels = compile_for_gpu(function, *arguments).kernels
    assert len(kernels) == KERNELS
