"""The Mixture-of-Experts layer of a block: blaze_jax's, or a conventional one for comparison."""

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from blaze_jax import MoE, route, update_selection_bias
from blaze_jax.benchmark.peers import UnavailableError, sorted_layer, tokamax_ragged_dot
from blaze_jax.layer import auxiliary_losses, initial_value, statistics
from train_example.errors import UserError

ExpertsLayer = Literal["blaze_jax", "sort+tokamax", "sort+ragged_dot"]
"""What computes the experts: this library; or a sort, a copy of the tokens in expert order, and grouped products by
tokamax or by jax.lax.ragged_dot."""


class ConventionalMoE(MoE):
    """`blaze_jax.MoE` with the same parameters, router and losses, but for the experts.

    Attributes:
      experts_layer: whose grouped product.
    """

    experts_layer: ExpertsLayer = "sort+ragged_dot"

    @nn.compact
    def __call__(self, x: Float[Array, "... d"], *, train: bool = False) -> Float[Array, "... d"]:
        """As `blaze_jax.MoE`; SwiGLU, and no token rounding or capacity."""
        config, dtype = self.config, self.dtype or x.dtype
        router = config.router
        if router.token_rounding or router.capacity(1, config.num_experts, config.experts_per_token):
            raise ValueError(f"experts_layer={self.experts_layer!r} has no token rounding and no capacity")
        initializers = {"router": self.router_init, "kernel": self.kernel_init, "bias": self.bias_init}
        params = {}
        for name, parameter in config.parameters(x.shape[-1]).items():

            def init(key, parameter=parameter):
                return initial_value(initializers[parameter.kind], key, parameter, self.param_dtype)

            params[name] = self.param(name, nn.with_logical_partitioning(init, parameter.axes))
        state, bias = None, None
        if config.bias_update_rate:
            state = self.variable("router_state", "selection_bias", jnp.zeros, (config.num_experts,), jnp.float32)
            bias = state.value

        tokens = x.reshape(-1, x.shape[-1]).astype(dtype)
        logits = jnp.dot(tokens.astype(jnp.float32), params["w_router"], precision=jax.lax.Precision.HIGHEST)
        routing = route(logits, config.experts_per_token, router=router, selection_bias=bias)
        weights = (params[name].astype(dtype) for name in ("w_gate", "w_up", "w_down"))
        y = sorted_layer(grouped_product(self.experts_layer))(tokens, *weights, routing.weights, routing.experts)
        if config.shared_width:
            gate, up = (tokens @ params[f"shared_w_{name}"].astype(dtype) for name in ("gate", "up"))
            y = y + (jax.nn.silu(gate) * up) @ params["shared_w_down"].astype(dtype)

        if not self.is_initializing():
            for name, loss in auxiliary_losses(routing, config).items():
                self.sow("losses", name, loss)
            for name, value in statistics(routing).items():
                self.sow("intermediates", name, value)
            if state is not None and train and self.is_mutable_collection("router_state"):
                state.value = update_selection_bias(state.value, routing.demand, config.bias_update_rate)
        return y.reshape(x.shape)


def grouped_product(experts_layer: ExpertsLayer):
    """The grouped product of a conventional layer.

    Raises:
      UserError: it is not installed.
    """
    if experts_layer == "sort+ragged_dot":
        return jax.lax.ragged_dot
    try:
        return tokamax_ragged_dot()
    except UnavailableError as error:
        raise UserError(f"--experts-layer sort+tokamax cannot run: {error}") from error
