"""Configurations, parameters and tokens of whole layers."""

from dataclasses import fields
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import blaze_jax
from blaze_jax import MoEConfig, Router, moe

WIDTH = 10

CONFIGS = {
    "plain": MoEConfig(num_experts=6, experts_per_token=2, expert_width=8),
    "everything": MoEConfig(
        num_experts=6,
        experts_per_token=2,
        expert_width=8,
        activation="gelu",
        shared_width=5,
        router=Router(scoring="sigmoid", num_groups=3, groups_per_token=2, weight_scale=2.5),
        z_loss_weight=0.001,
        bias_update_rate=0.1,
        save="inputs",
    ),
    "rounded": MoEConfig(
        num_experts=6,
        experts_per_token=2,
        expert_width=8,
        router=Router(token_rounding="nearest", rounding_tile=4, rounding_slots=2),
    ),
    "limited": MoEConfig(num_experts=6, experts_per_token=2, expert_width=8, router=Router(capacity_factor=0.5)),
}


@partial(jax.jit, static_argnums=2, static_argnames="train")
def layer(x, params, config: MoEConfig, train: bool = False, selection_bias=None):
    """`moe`, compiled once for a configuration and shape; zeros take the place of a selection bias that is left out."""
    if config.has_selection_bias and selection_bias is None:
        selection_bias = jnp.zeros(config.num_experts)
    return moe(x, params, config, selection_bias=selection_bias, train=train)


def loss(params, x, config: MoEConfig, *, axis_name=None, parallel=None):
    """Mean square of the output and the weighted losses, in training, of all devices; output and routing beside."""
    bias = jnp.linspace(-0.1, 0.1, config.num_experts) if config.has_selection_bias else None
    y, routing = moe(x, params, config, selection_bias=bias, train=True, axis_name=axis_name, parallel=parallel)
    mean = jnp.square(y).mean()
    if axes := axis_name or (parallel and jax.sharding.get_abstract_mesh().manual_axes and parallel.axes):
        mean = jax.lax.pmean(mean, axes)
    return mean + sum(routing.weighted_losses.values()), (y, routing)


OPTIONS = ("router", "implementation", "axis_name", *(field.name for field in fields(Router)))
gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
"""`loss` and its gradients to parameters and tokens."""
step = jax.jit(gradients, static_argnums=2)

route = jax.jit(blaze_jax.route, static_argnums=1, static_argnames=OPTIONS)
"""`blaze_jax.route`, compiled once for its options and shape: one by one, its operations take longer to compile."""


def random_parameters(config: MoEConfig, *, use_bias: bool = False, dtype="float32") -> dict:
    """Values of order one for every parameter of tokens of `WIDTH`."""
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.standard_normal(parameter.shape) / np.sqrt(([1, *parameter.shape])[-2]), dtype)
        for name, parameter in config.parameters(WIDTH, use_bias=use_bias).items()
    }


def random_tokens(*leading: int, dtype="float32"):
    return jnp.asarray(np.random.default_rng(1).standard_normal((*leading, WIDTH)), dtype)
