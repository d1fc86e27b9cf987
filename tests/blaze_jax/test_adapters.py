"""Adapters of low rank: against their definition, in every family and form, over devices, and what they cost."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax import LoRA, MoEConfig, Router, adapter_mask, join_adapters, merge, moe, split_adapters
from blaze_jax.adapters import added
from blaze_jax.experts import compute_experts
from blaze_jax.oracle import dense_expert_ffn
from tests.expert_problems import ON_GPUS, apply, make_problem, on
from tests.layers import WIDTH, random_parameters, random_tokens
from tests.numerics import assert_close
from tests.pallas_kernels.rows import needs_interpreter
from tests.routings import random_experts

BASE = MoEConfig(num_experts=6, experts_per_token=2, expert_width=8, shared_width=8, z_loss_weight=0.1)
CONFIGS = {
    "rank16": replace(BASE, adapter=LoRA(rank=16, alpha=8, targets=("gate", "up", "down", "router"))),
    "rank4_inputs": replace(BASE, adapter=LoRA(rank=4, alpha=2), save="inputs"),
    "shared": replace(BASE, adapter=LoRA(rank=8, alpha=4, shared=True)),
    "up": replace(BASE, adapter=LoRA(rank=8, alpha=4, targets=("up",))),
    "down_router": replace(BASE, adapter=LoRA(rank=8, alpha=4, targets=("down", "router"))),
    "router": replace(BASE, adapter=LoRA(rank=8, alpha=4, targets=["router"])),
    "ungated_latent": replace(BASE, activation="relu2", latent_width=4, adapter=LoRA(rank=128, alpha=64)),
    "dense": replace(BASE, router=Router(train="dense", threshold=0.5), adapter=LoRA(rank=8, alpha=4)),
}


def loss_of(adapters, x, others, config, train=True):
    return _loss(x, join_adapters(adapters, others), config, train)


def _loss(x, params, config, train=True):
    y, routing = moe(x, params, config, train=train)
    return jnp.sin(y).sum() + sum(routing.weighted_losses.values()), (y, routing.experts)


def definition(adapters, x, others, config):
    """The layer without adapters, whose weights are sums."""
    params = join_adapters(adapters, others)
    if config.adapter.shared:
        shared = [name for name in params if name.endswith("_lora_a") and "router" not in name]
        params |= {name: jnp.broadcast_to(params[name], (config.num_experts, *params[name].shape)) for name in shared}
    return _loss(x, added(params, config.adapter), replace(config, adapter=None))


step = jax.jit(jax.value_and_grad(loss_of, (0, 1), has_aux=True), static_argnums=(3, 4))
reference = jax.jit(jax.value_and_grad(definition, (0, 1), has_aux=True), static_argnums=3)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.default_cases("rank16", "shared", "ungated_latent")
def test_output_and_gradients_are_those_of_summed_weights(config):
    with jax.enable_x64(True):
        params = random_parameters(config, use_bias=True, dtype="float64")
        x = random_tokens(30, dtype="float64")
        adapters, others = split_adapters(params)
        ref = reference(adapters, x, others, config)
        assert_close(step(adapters, x, others, config), ref, 1e-11)
        out = step(*jax.tree.map(lambda a: a.astype("float32"), (adapters, x, others)), config)
    assert_close(out[1], ref[1], 1e-5)



@on("xla", "xla_batched", pytest.param("hopper", marks=needs_interpreter), "ampere", *ON_GPUS)
@pytest.mark.parametrize(("rank", "dtype"), [(8, "bfloat16"), (16, "float32"), (128, "bfloat16")])
@pytest.mark.default_cases("16-float32-xla_batched", "8-bfloat16-ampere", "8-bfloat16-hopper", "*-bfloat16-*_on_gpu")
def test_every_family_of_kernels_computes_them(kernels, rank, dtype):
    """Beside weights of its own dtype, adapters in float32. Rows of the experts are ragged, and one has none."""
    num_experts, sizes = 5, {"d": 24, "n": 40, "biases": True} | kernels.suits
    d, n = sizes["d"], sizes["n"]
    implementation = kernels.function.keywords["implementation"]
    problem = make_problem(random_experts(37, 2, range(4)), num_experts, **{**sizes, "dtype": dtype})
    rng = np.random.default_rng(3)
    widths = {"w_gate": (d, n), "w_up": (d, n), "w_down": (n, d)}
    adapters = {}
    for name, (inputs, outputs) in widths.items():
        for end, shape in (("_lora_a", (inputs, rank)), ("_lora_b", (rank, outputs))):
            values = rng.standard_normal((num_experts, *shape)) / np.sqrt(shape[0])
            adapters[name + end] = jnp.asarray(values, "float32")
    options = {"activation": "swiglu", "save": "pre_activations", "implementation": implementation, "frozen": True}

    @jax.jit
    def out(adapters, x, weights):
        return compute_experts(x, problem.params | adapters, weights, problem.experts, **options)

    def definition(adapters, x, weights):
        params = added(problem.cast(jnp.float32).params | adapters, LoRA(rank=rank, alpha=rank))
        return apply(dense_expert_ffn, x, params, weights, problem.experts, activation="swiglu")

    def both(function, problem):
        with jax.default_matmul_precision("highest"):
            y, vjp = jax.vjp(function, adapters, problem.x, problem.weights)
            return y, vjp(problem.dy)

    assert_close(both(out, problem), both(definition, problem.cast(jnp.float32)), kernels.tolerance[dtype])
