"""The whole layer as a function: router to output."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from blaze_jax.activations import get_activation
from blaze_jax.config import MoEConfig, Parameter
from blaze_jax.experts import expert_ffn
from blaze_jax.routing import Routing, route


def moe(
    x: Float[Array, "... d"],
    params: Mapping[str, Array],
    config: MoEConfig,
    *,
    selection_bias: Float[Array, " E"] | None = None,
    train: bool = False,
    experts: Callable[..., Array] = expert_ffn,
) -> tuple[Float[Array, "... d"], Routing]:
    """Routes every token, applies its experts and the shared experts, and adds them up.

    Args:
      x: tokens with any leading shape; the arithmetic runs in their dtype, the router in float32.
      params: arrays named and shaped as `config.parameters(d)` says, with biases if there is a "b_down".
      config: the layer.
      selection_bias: added to the scores for selection only.
      train: whether token rounding applies; evaluation uses the plain choice.
      experts: what computes the experts, called as `expert_ffn` is here.

    Returns:
      `(y, routing)`: the output in the shape and dtype of `x`, and what the router decided, over the leading dimensions
      flattened into T.

    Raises:
      ValueError: `params` does not match the configuration, or `x` is not a floating array.
    """
    if x.ndim < 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x must be a floating array (..., d), got {x.dtype} of shape {x.shape}")
    _check_parameters(params, config, x.shape[-1])
    tokens = x.reshape(-1, x.shape[-1])
    wide = jnp.promote_types(tokens.dtype, jnp.float32)
    logits = jnp.dot(tokens.astype(wide), params["w_router"].astype(wide), precision=jax.lax.Precision.HIGHEST)
    routing = route(
        logits,
        config.experts_per_token,
        router=config.router.for_phase(train),
        selection_bias=selection_bias,
        implementation=config.implementation,
    )
    y = experts(
        tokens,
        params.get("w_gate"),
        params["w_up"],
        params["w_down"],
        routing.weights,
        routing.experts,
        b_gate=params.get("b_gate"),
        b_up=params.get("b_up"),
        b_down=params.get("b_down"),
        activation=config.activation,
        save=config.save,
        implementation=config.implementation,
        dispatched=routing.dispatched,
    )
    if config.shared_width:
        y = y + _shared_experts(tokens, params, config)
    return y.reshape(x.shape), routing._replace(dispatched=None)  # the caller need not keep it alive


def auxiliary_losses(routing: Routing, config: MoEConfig) -> dict[str, Float[Array, ""]]:
    """The losses to add to the training loss, already weighted, by name."""
    losses = {}
    if config.load_balancing_weight:
        losses["load_balancing_loss"] = config.load_balancing_weight * routing.load_balancing_loss
    if config.z_loss_weight:
        losses["z_loss"] = config.z_loss_weight * routing.z_loss
    return losses


def statistics(routing: Routing) -> dict[str, Array]:
    """What is worth watching in training, by name."""
    return {name: getattr(routing, name) for name in ("tokens_per_expert", "dropped_share", "entropy")}


def initial_value(initializer: Callable, key: Array, parameter: Parameter, dtype) -> Array:
    """`initializer(key, shape, dtype)`, called for each expert of a stack, so that its fan-in is that of one expert."""
    if parameter.kind != "kernel" or len(parameter.shape) == 2:
        return initializer(key, parameter.shape, dtype)
    keys = jax.random.split(key, parameter.shape[0])
    return jax.vmap(lambda k: initializer(k, parameter.shape[1:], dtype))(keys)


def _shared_experts(tokens: Float[Array, "T d"], params: Mapping[str, Array], config: MoEConfig) -> Float[Array, "T d"]:
    """The dense FFN that every token passes through."""
    activation = get_activation(config.activation)
    wide = jnp.promote_types(tokens.dtype, jnp.float32)
    names = ("shared_w_gate", "shared_w_up") if activation.gated else ("shared_w_up",)
    pre = [jnp.dot(tokens, params[name].astype(tokens.dtype), preferred_element_type=wide) for name in names]
    hidden = activation.function(*pre).astype(tokens.dtype)
    return jnp.dot(hidden, params["shared_w_down"].astype(tokens.dtype))


def _check_parameters(params: Mapping[str, Array], config: MoEConfig, model_width: int) -> None:
    expected = config.parameters(model_width, use_bias="b_down" in params)
    if missing := expected.keys() - params.keys():
        raise ValueError(f"params lacks {', '.join(sorted(missing))}, which {config} asks for")
    if unknown := params.keys() - expected.keys():
        raise ValueError(f"params has {', '.join(sorted(unknown))}, which {config} has no use for")
    for name, parameter in expected.items():
        if params[name].shape != parameter.shape:
            raise ValueError(f"params[{name!r}] has shape {params[name].shape}, must be {parameter.shape}")
