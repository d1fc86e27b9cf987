"""Configuration of a Mixture-of-Experts layer, and the parameters it asks for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from blaze_jax.activations import Activation, get_activation
from blaze_jax.checks import check_booleans, check_integers, check_numbers, shown
from blaze_jax.huggingface import read_public_model
from blaze_jax.implementation import Implementation, check_implementation
from blaze_jax.plan import Save, check_mean_experts
from blaze_jax.router import Router, check_router

ParameterKind = Literal["router", "kernel", "bias", "gain"]


class Parameter(NamedTuple):
    """One parameter of the layer.

    Attributes:
      shape: its shape.
      axes: a logical name per axis: "expert", "embed", "expert_mlp", "mlp" (shared experts).
      kind: what initialises it: the router, an expert's kernel, a bias, or a gain, which begins as ones.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    kind: ParameterKind


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A Mixture-of-Experts layer. Checked on construction.

    Attributes:
      num_experts: E, the number of routed experts.
      experts_per_token: K, the experts that each token takes; of a ReLU router and with `Router(top_p=...)` the most
        that it takes, and None for no limit.
      expert_width: n, the hidden width of one expert.
      activation: a name of `ACTIVATION_NAMES`, or an `Activation`.
      shared_width: hidden width of the shared experts together, which see every token; 0 for none.
      router: how experts are chosen and weighted.
      load_balancing_weight: weight of the load-balancing loss that the modules report.
      z_loss_weight: weight of the router's z-loss that the modules report.
      bias_update_rate: step of the selection bias in training (loss-free balancing); 0 for one that does not move.
      selection_bias: whether the modules hold a selection bias, as one with an update rate always does. Without a rate
        it is frozen: zero, or what a checkpoint says.
      router_bias: whether the router's logits have a learnable bias, the parameter `b_router` (gpt-oss).
      mean_experts: experts that a token has on average, where it may have fewer than slots: memory follows them, and
        not the slots, see `expert_ffn`. None for all K; without K, for a quarter of the experts.
      save: what the experts' backward pass keeps, see `expert_ffn`.
      implementation: which kernels to use, see `expert_ffn`.

    Raises:
      ValueError: a field does not fit; the message names it, its value and what is allowed.
    """

    num_experts: int
    experts_per_token: int | None
    expert_width: int
    activation: str | Activation = "swiglu"
    shared_width: int = 0
    router: Router = field(default_factory=Router)
    load_balancing_weight: float = 0.01
    z_loss_weight: float = 0.0
    bias_update_rate: float = 0.0
    selection_bias: bool = False
    router_bias: bool = False
    mean_experts: float | None = None
    save: Save = "pre_activations"
    implementation: Implementation | None = None

    def __post_init__(self):
        get_activation(self.activation)
        check_router(self.router).check(self.num_experts, self.experts_per_token)
        check_implementation(self.implementation)
        if self.save not in get_args(Save):
            raise ValueError(f"save={self.save!r} must be one of {', '.join(get_args(Save))}")
        check_integers(expert_width=self.expert_width, shared_width=self.shared_width)
        check_mean_experts(self.mean_experts, self.slots)
        if self.expert_width < 1:
            raise ValueError(f"expert_width={self.expert_width} must be at least 1")
        check_booleans(selection_bias=self.selection_bias, router_bias=self.router_bias)
        weights = ("load_balancing_weight", "z_loss_weight", "bias_update_rate")
        check_numbers(**{name: getattr(self, name) for name in weights})
        for name in ("shared_width", *weights):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative or infinite")
        if self.router.open_ended and self.has_selection_bias:
            name = "bias_update_rate" if self.bias_update_rate else "selection_bias"
            raise ValueError(
                f"{name}={getattr(self, name)} must be left out: {self.router} takes experts by their logits alone"
            )

    @classmethod
    def from_huggingface(cls, config: Mapping[str, Any] | str | Path) -> "MoEConfig":
        """The layer that the `config.json` of a public model describes.

        `blaze_jax.checkpoints.read_model` names the models, and says the rest, such as which layers are dense.

        Args:
          config: what the file holds, the file, or its folder.

        Raises:
          CheckpointError: a ValueError; a field is missing, unknown, or contradicts another, and the message names it.
        """
        return read_public_model(config, cls).layer

    @property
    def slots(self) -> int:
        """Experts that a token may have."""
        return self.num_experts if self.experts_per_token is None else self.experts_per_token

    @property
    def experts_to_expect(self) -> float | None:
        """`mean_experts`, or what it stands for where it is None: a number, or None for all slots."""
        if self.mean_experts is None and self.experts_per_token is None:
            return self.num_experts / 4
        return self.mean_experts

    @property
    def has_selection_bias(self) -> bool:
        return self.selection_bias or self.bias_update_rate > 0

    def parameters(self, model_width: int, *, use_bias: bool = False) -> dict[str, Parameter]:
        """Every parameter of the layer for tokens of that width, by name; `use_bias` adds the experts' biases.

        Raises:
          ValueError: the width is not an integer of at least 1.
        """
        check_integers(model_width=model_width)
        if model_width < 1:
            raise ValueError(f"{model_width=} must be at least 1")
        experts, width = self.num_experts, self.expert_width
        projections = ("gate", "up") if get_activation(self.activation).gated else ("up",)
        parameters = {"w_router": Parameter((model_width, experts), ("embed", "expert"), "router")}
        if self.router_bias:
            parameters["b_router"] = Parameter((experts,), ("expert",), "bias")
        if self.router.weight_norm:
            parameters["router_gain"] = Parameter((experts,), ("expert",), "gain")
        for name in projections:
            parameters[f"w_{name}"] = Parameter(
                (experts, model_width, width), ("expert", "embed", "expert_mlp"), "kernel"
            )
        parameters["w_down"] = Parameter((experts, width, model_width), ("expert", "expert_mlp", "embed"), "kernel")
        if use_bias:
            for name in projections:
                parameters[f"b_{name}"] = Parameter((experts, width), ("expert", "expert_mlp"), "bias")
            parameters["b_down"] = Parameter((experts, model_width), ("expert", "embed"), "bias")
        if self.shared_width:
            for name in projections:
                parameters[f"shared_w_{name}"] = Parameter((model_width, self.shared_width), ("embed", "mlp"), "kernel")
            parameters["shared_w_down"] = Parameter((self.shared_width, model_width), ("mlp", "embed"), "kernel")
        return parameters


def check_config(config: MoEConfig) -> MoEConfig:
    """`config`; raises ValueError if it is not a MoEConfig."""
    if not isinstance(config, MoEConfig):
        raise ValueError(f"config={shown(config)} must be a MoEConfig")
    return config
