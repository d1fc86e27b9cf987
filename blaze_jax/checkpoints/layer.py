"""The parameters of one layer, as functions, linen and nnx take them."""

from typing import Any, NamedTuple

from jaxtyping import Array, Float

from blaze_jax.nnx import MoE


class Layer(NamedTuple):
    """One layer of a checkpoint.

    Attributes:
      params: arrays by name, what `blaze_jax.moe` takes.
      selection_bias: `(E,)` float32, the layer's other argument; None where it has none.
      layout: the public format, in which `save` writes the layer.
    """

    params: dict[str, Array]
    selection_bias: Float[Array, " E"] | None = None
    layout: str = "by_expert"

    @property
    def variables(self) -> dict[str, Any]:
        """What `apply` of the linen module `blaze_jax.MoE` takes."""
        if self.selection_bias is None:
            return {"params": self.params}
        return {"params": self.params, "router_state": {"selection_bias": self.selection_bias}}

    def put_into(self, module: MoE) -> MoE:
        """Sets the variables of a `blaze_jax.nnx.MoE`, also of one from `nnx.eval_shape`, and returns it.

        Raises:
          ValueError: the module's parameters are others, by name or shape.
        """
        values = dict(self.params)
        if self.selection_bias is not None:
            values["selection_bias"] = self.selection_bias
        names = {*module.parameter_names, *(("selection_bias",) if module.config.has_selection_bias else ())}
        if names != values.keys():
            raise ValueError(f"the module has {', '.join(sorted(names))}; the layer has {', '.join(sorted(values))}")
        for name, value in values.items():
            if getattr(module, name).shape != value.shape:
                raise ValueError(f"the module's {name} has shape {getattr(module, name).shape}, must be {value.shape}")
            getattr(module, name).set_value(value)
        return module

    @classmethod
    def of(cls, module: MoE, layout: str = "by_expert") -> "Layer":
        """The layer that a `blaze_jax.nnx.MoE` holds now."""
        bias = module.selection_bias[...] if module.config.has_selection_bias else None
        return cls({name: getattr(module, name)[...] for name in module.parameter_names}, bias, layout)
