"""Programs lowered for GPUs on any machine: which kernels they hold, and each once, however many layers call it."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import P

from blaze_jax import RESIDUAL_NAMES, MoEConfig, expert_ffn, moe
from blaze_jax.benchmark.sizes import forward_and_backward
from blaze_jax.implementation import demanded_family
from pallas_kernels.compile_only import compile_for_gpu, kernel_hashes
from tests.expert_problems import KERNELS, apply, lowered, make_problem
from tests.over_devices import make_mesh
from tests.routings import ROUTINGS

BY_NAME = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)
PROBLEM = {"d": 320, "n": 256, "dtype": "bfloat16", "biases": False}
T, D = 512, 256
OF_A_LAYER = 10  # router, dispatch, two of combine (weighted or not), and six with products
CONFIG = MoEConfig(num_experts=8, experts_per_token=2, expert_width=128, implementation="mosaic_gpu")


def test_the_portable_form_is_that_of_the_platform_compiled_for():
    """Three experts and 1034 rows: a CPU takes 128 of one expert a turn, accelerators more."""
    problem = make_problem(*ROUTINGS["many_tiles"])
    programs = (lowered(platform, problem, implementation="xla") for platform in ("cpu", "cuda", "rocm", "tpu"))
    assert ["tensor<1x128x20xf32>" in program for program in programs] == [True, False, False, False]


@pytest.mark.parametrize(
    ("family", "mesh", "options"),
    [
        ("ampere", nullcontext, {"dtype": "float32"}),
        ("ampere", lambda: jax.set_mesh(make_mesh({"data": 1})), {}),
        ("hopper", nullcontext, {"param_dtype": "float32", "biases": True}),  # others in test_experts_compiled.py
        ("hopper", nullcontext, {"activation": "reglu"}),
        ("hopper", nullcontext, {"activation": "gelu"}),
        ("hopper", nullcontext, {"activation": "relu", "param_dtype": "float32", "biases": True}),
    ],
)
@pytest.mark.default_cases("ampere-<lambda>-options1")
@pytest.mark.ci_cases("ampere-*")
def test_forward_and_backward_lower_for_cuda(family, mesh, options):
    problem = make_problem(*ROUTINGS["random"], **PROBLEM | options)
    with demanded_family(family), mesh():
        jax.clear_caches()
        activation = options.get("activation", "swiglu")
        text = lowered("cuda", problem, implementation="mosaic_gpu", activation=activation)
    assert [kernel for kernel in KERNELS if kernel not in text] == []


on_kernels = partial(apply, partial(expert_ffn, implementation="mosaic_gpu"))


def mapped(*arguments):
    return jax.vmap(on_kernels)(*jax.tree.map(lambda a: jnp.stack([a] * 3), arguments))


def scanned(x, *rest):
    layer = jax.checkpoint(lambda y, _: (y + on_kernels(y, *rest), None))
    return jax.lax.scan(layer, x, None, length=2)[0]


def traced_gradient(function):
    x, params, weights, experts, _ = make_problem(*ROUTINGS["random"], **PROBLEM)
    gradient = jax.grad(lambda *a: function(*a, experts).astype(jnp.float32).sum(), (0, 1, 2))
    return jax.jit(gradient).trace(x, params, weights)


@pytest.mark.parametrize("function", [scanned, mapped])
@pytest.mark.slow
def test_transformations_lower_for_cuda(function):
    assert "moe_down_backward" in traced_gradient(function).lower(lowering_platforms=("cuda",)).as_text()


def test_no_kernel_writes_through_the_pointer_of_an_operand():
    """XLA may take the result from elsewhere; see `launches.py`, and the scan over layers on a GPU."""
    assert "new_ref" not in str(traced_gradient(on_kernels).jaxpr)


def plain(layer):
    return layer


def step_of(*configs, wrap=plain):
    """Forward and backward pass of layers, each with parameters of its own, and the types of its arguments."""

    def model(x, *params):
        for config, own in zip(configs, params, strict=True):
            x = wrap(lambda x, own, config=config: x + moe(x, own, config)[0])(x, own)
        return x

    x = jax.ShapeDtypeStruct((T, D), jnp.bfloat16)
    params = [
        {name: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16) for name, p in config.parameters(D).items()}
        for config in configs
    ]
    return forward_and_backward(model), (x, *params, x)


def sharded(layer):
    """The layer on tokens that are sharded over four devices, with replicated parameters."""
    mesh = make_mesh({"data": 4})
    return jax.shard_map(layer, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=False)


@pytest.mark.parametrize(
    ("configs", "wrap", "count"),
    [
        ([CONFIG], plain, OF_A_LAYER),
        ([CONFIG] * 3, plain, OF_A_LAYER),
        ([CONFIG] * 3, jax.checkpoint, OF_A_LAYER + 1),  # the first pass has an up projection that keeps nothing
        ([CONFIG] * 3, partial(jax.checkpoint, policy=BY_NAME), OF_A_LAYER),
        ([CONFIG] * 3, sharded, OF_A_LAYER),
        ([CONFIG, replace(CONFIG, activation="geglu")], plain, OF_A_LAYER + 2),  # up projection and down backward
    ],
    ids=["one", "three", "checkpoint", "checkpoint_by_name", "shard_map", "another_activation"],
)
@pytest.mark.slow
def test_layers_share_kernels(configs, wrap, count):
    function, arguments = step_of(*configs, wrap=wrap)
    found = kernel_hashes(jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)))
    assert len(found) == len(set(found)) == count


@pytest.mark.compile_only
def test_three_layers_compile_each_kernel_once():
    function, arguments = step_of(*[CONFIG] * 3)
    assert len(compile_for_gpu(function, *arguments).kernels) == OF_A_LAYER
