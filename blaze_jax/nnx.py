"""The layer as a flax.nnx module: same parameter names, shapes and numbers as the linen one."""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from blaze_jax.config import MoEConfig
from blaze_jax.experts import expert_ffn
from blaze_jax.layer import auxiliary_losses, initial_value, moe, statistics
from blaze_jax.routing import update_selection_bias


class AuxiliaryLoss(nnx.Variable):
    """A weighted loss the layer asks to be added to the training loss; collect it with `nnx.capture`."""


class RouterState(nnx.Variable):
    """The selection bias of loss-free balancing: state that training updates without a gradient."""


class MoE(nnx.Module):
    """Mixture-of-Experts layer: router, routed experts, shared experts.

    Parameters are those of `config.parameters(model_width)` as `nnx.Param`, with logical axis names in the metadata
    `out_sharding`. Under `nnx.capture(..., AuxiliaryLoss, nnx.Intermediate)` the weighted auxiliary losses and the load
    statistics are sown; outside it nothing is stored. With `config.bias_update_rate`, `selection_bias` is updated in
    training.

    Args:
      model_width: d.
      config: the layer.
      dtype: of the computation and the output; None for the common dtype of input and parameters.
      param_dtype: of the parameters.
      use_bias: biases on all projections of the experts.
      kernel_init: initialiser of each expert's matrices.
      bias_init: initialiser of the biases.
      router_init: initialiser of the router's matrix.
      experts: what computes the experts, see `blaze_jax.moe`.
      rngs: its stream `params` initialises the parameters.
    """

    def __init__(
        self,
        model_width: int,
        config: MoEConfig,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        use_bias: bool = False,
        kernel_init: Callable = nnx.initializers.lecun_normal(),
        bias_init: Callable = nnx.initializers.zeros_init(),
        router_init: Callable = nnx.initializers.lecun_normal(),
        experts: Callable[..., Array] = expert_ffn,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.experts = experts
        parameters = config.parameters(model_width, use_bias=use_bias)
        self.parameter_names = tuple(parameters)
        initializers = {"router": router_init, "kernel": kernel_init, "bias": bias_init}
        for name, parameter in parameters.items():
            value = initial_value(initializers[parameter.kind], rngs.params(), parameter, param_dtype)
            # The names are logical: which mesh axes they mean is the user's to say, so nothing is sharded yet.
            setattr(self, name, nnx.Param(value, out_sharding=parameter.axes, eager_sharding=False))
        if config.bias_update_rate:
            self.selection_bias = RouterState(jnp.zeros(config.num_experts, jnp.float32))

    def __call__(self, x: Float[Array, "... d"], *, train: bool = False) -> Float[Array, "... d"]:
        """Output for tokens of any leading shape; `train` turns on token rounding and the selection bias's update."""
        x = x.astype(self.dtype or jnp.result_type(x, self.param_dtype))
        params = {name: getattr(self, name)[...] for name in self.parameter_names}
        bias = self.selection_bias[...] if self.config.bias_update_rate else None
        y, routing = moe(x, params, self.config, selection_bias=bias, train=train, experts=self.experts)

        for name, loss in auxiliary_losses(routing, self.config).items():
            self.sow(AuxiliaryLoss, name, loss, capture_noop=True)
        for name, value in statistics(routing).items():
            self.sow(nnx.Intermediate, name, value, capture_noop=True)
        if bias is not None and train:
            self.selection_bias[...] = update_selection_bias(bias, routing.demand, self.config.bias_update_rate)
        return y
