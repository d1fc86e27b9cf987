"""Configurations, parameters and tokens of whole layers, and the doors to a layer: a function and two modules."""

from dataclasses import fields
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import blaze_jax
from blaze_jax import MoE, MoEConfig, Router, moe
from blaze_jax.nnx import AuxiliaryLoss

WIDTH = 10

CONFIGS = {
    "plain": MoEConfig(num_experts=6, experts_per_token=2, expert_width=8),
    "everything": MoEConfig(
        num_experts=6,
        experts_per_token=2,
        expert_width=8,
        activation="gelu",
        shared_width=5,
        shared_gate=True,
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


def created(module: str, config: MoEConfig, **options) -> dict:
    """The parameters that a module of flax.linen or flax.nnx initialises, in their boxes."""
    if module == "linen":
        return MoE(config, **options).init(jax.random.key(0), random_tokens(2))["params"]
    state = nnx.state(blaze_jax.nnx.MoE(WIDTH, config, rngs=nnx.Rngs(0), **options), nnx.Param)
    return {path[0]: variable for path, variable in nnx.to_flat_state(state)}


def unboxed(params: dict) -> dict:
    return {name: jax.tree.leaves(box)[0] for name, box in params.items()}


def of_function(params, x, config: MoEConfig, dtype=None):
    """Output of `moe` in training, computed in `dtype`, and its weighted losses."""
    y, routing = layer(x if dtype is None else x.astype(dtype), params, config, train=True)
    return y, routing.weighted_losses


def of_linen(params, x, config: MoEConfig, dtype=None):
    """The same of the module of flax.linen that is given these parameters."""
    module = MoE(config, dtype=dtype, use_bias="b_down" in params)
    y, sown = module.apply({"params": params}, x, train=True, mutable=["losses", "router_state"])
    return y, {name: loss for name, (loss,) in sown["losses"].items()}


def nnx_module(params, config: MoEConfig, **options) -> blaze_jax.nnx.MoE:
    """A module of flax.nnx that holds these parameters, instead of those that it initialises."""
    width, use_bias = len(params["w_router"]), "b_down" in params
    module = blaze_jax.nnx.MoE(width, config, use_bias=use_bias, rngs=nnx.Rngs(0), **options)
    for name, value in params.items():
        getattr(module, name).set_value(value)
    return module


def of_nnx(params, x, config: MoEConfig, dtype=None):
    """The same of the module of flax.nnx that holds these parameters."""
    y, losses = nnx.capture(nnx_module(params, config, dtype=dtype), AuxiliaryLoss)(x, train=True)
    return y, {name: jax.tree.leaves(loss)[0] for name, loss in losses.items()}


DOORS = {"function": of_function, "linen": of_linen, "nnx": of_nnx}


def losses_of_nnx_adapters(model: blaze_jax.nnx.MoE, x, steps: int = 8) -> list:
    """The losses of that many steps that train the adapters of an nnx module alone."""
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer):
        wanted = nnx.DiffState(0, nnx.LoRAParam)
        value, gradients = nnx.value_and_grad(lambda model: jnp.square(model(x) - 1).mean(), argnums=wanted)(model)
        optimizer.update(model, gradients)
        return value

    return [step(model, optimizer) for _ in range(steps)]


@partial(jax.jit, static_argnums=(0, 3, 4))
def gradients_through(door, params, x, config: MoEConfig, dtype=None):
    """Loss of a layer behind a door, its output, and the gradients to parameters and tokens."""

    def loss(params, x):
        y, losses = DOORS[door](params, x, config, dtype)
        return sum(leaf.astype(jnp.float32) for leaf in (jnp.square(y).sum(), *losses.values())), (y, losses)

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)


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


def random_parameters(config: MoEConfig, *, use_bias: bool = False, dtype="float32", width: int = WIDTH) -> dict:
    """Values of order one for every parameter of tokens of that width."""
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.standard_normal(parameter.shape) / np.sqrt(([1, *parameter.shape])[-2]), dtype)
        for name, parameter in config.parameters(width, use_bias=use_bias).items()
    }


def random_tokens(*leading: int, dtype="float32", width: int = WIDTH):
    return jnp.asarray(np.random.default_rng(1).standard_normal((*leading, width)), dtype)
