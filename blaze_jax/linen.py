"""The layer as a flax.linen module."""

from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from blaze_jax.config import MoEConfig
from blaze_jax.experts import expert_ffn
from blaze_jax.layer import auxiliary_losses, initial_value, moe, statistics
from blaze_jax.routing import update_selection_bias


class MoE(nn.Module):
    """Mixture-of-Experts layer: router, routed experts, shared experts.

    Parameters are those of `config.parameters(d)`, with logical axis names. Sown, where the caller makes the collection
    mutable: weighted auxiliary losses in "losses", load statistics in "intermediates". With `config.bias_update_rate`,
    the variable "selection_bias" in the collection "router_state" is updated in training where that is mutable.

    Attributes:
      config: the layer.
      dtype: of the computation and the output; None for the common dtype of input and parameters.
      param_dtype: of the parameters.
      use_bias: biases on all projections of the experts.
      kernel_init: initialiser of each expert's matrices.
      bias_init: initialiser of the biases.
      router_init: initialiser of the router's matrix.
      experts: what computes the experts, see `blaze_jax.moe`.
    """

    config: MoEConfig
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    use_bias: bool = False
    kernel_init: Callable = nn.initializers.lecun_normal()
    bias_init: Callable = nn.initializers.zeros_init()
    router_init: Callable = nn.initializers.lecun_normal()
    experts: Callable[..., Array] = expert_ffn

    @nn.compact
    def __call__(self, x: Float[Array, "... d"], *, train: bool = False) -> Float[Array, "... d"]:
        """Output for tokens of any leading shape; `train` turns on token rounding and the selection bias's update."""
        initializers = {"router": self.router_init, "kernel": self.kernel_init, "bias": self.bias_init}
        params = {}
        for name, parameter in self.config.parameters(x.shape[-1], use_bias=self.use_bias).items():

            def init(key, parameter=parameter):
                return initial_value(initializers[parameter.kind], key, parameter, self.param_dtype)

            params[name] = self.param(name, nn.with_logical_partitioning(init, parameter.axes))

        state, bias = None, None
        if self.config.bias_update_rate:
            state = self.variable("router_state", "selection_bias", jnp.zeros, (self.config.num_experts,), jnp.float32)
            bias = state.value
        x = x.astype(self.dtype or jnp.result_type(x, self.param_dtype))
        y, routing = moe(x, params, self.config, selection_bias=bias, train=train, experts=self.experts)

        if self.is_initializing():  # or the first losses would stay in the variables that init returns
            return y
        for name, loss in auxiliary_losses(routing, self.config).items():
            self.sow("losses", name, loss)
        for name, value in statistics(routing).items():
            self.sow("intermediates", name, value)
        if state is not None and train and self.is_mutable_collection("router_state"):
            state.value = update_selection_bias(state.value, routing.demand, self.config.bias_update_rate)
        return y
