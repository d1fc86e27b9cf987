"""Configuration of a Mixture-of-Experts layer, and the parameters it asks for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from blaze_jax.activations import Activation, get_activation
from blaze_jax.adapters import A, B, LoRA
from blaze_jax.checks import check_booleans, check_integers, check_numbers, shown
from blaze_jax.huggingface import read_public_model
from blaze_jax.implementation import Implementation, check_implementation
from blaze_jax.plan import Save, check_mean_experts
from blaze_jax.precision import Precision, check_precision
from blaze_jax.router import Router, check_router

_OF_ROUTERS = {
    "mutual_information_loss": "mutual_information_weight",
    "activity_loss": "activity_weight",
    "chunk_loss": "chunk_loss_weight",
    "locality_loss": "locality_loss_weight",
}
"""Losses that are computed only where they are wanted, and what their weights are called."""

ParameterKind = Literal["router", "kernel", "bias", "gain", "lora_a", "lora_b"]


class Parameter(NamedTuple):
    """One parameter of the layer.

    Attributes:
      shape: its shape.
      axes: a logical name per axis: "expert", "embed", "expert_mlp", "mlp" (shared experts), "latent" (in the place of
        the experts' "embed", where they have a narrower space), "lora_rank"; None for one of size 1.
      kind: what initialises it: the router, an expert's kernel, a bias, a gain, which begins as ones, or a part of an
        adapter, of which A begins as PyTorch's linear layers do, and B as zeros.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    kind: ParameterKind


class DenseTwin(NamedTuple):
    """A dense feed-forward layer, `act(x·W_gate, x·W_up)·W_down` for every token.

    Attributes:
      width: its hidden width.
      activation: a name of `ACTIVATION_NAMES`, or an `Activation`.
    """

    width: int
    activation: str | Activation


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
      shared_gate: whether their output is scaled by the sigmoid of the token's product with a learnable vector, the
        parameter `shared_gate` (Qwen2-MoE).
      latent_width: width of the space in which the routed experts work, between two projections that they share
        (LatentMoE, Nemotron 3); 0 for that of the tokens, which router and shared experts see in any case.
      router: how experts are chosen and weighted.
      load_balancing_weight: weight of the load-balancing loss that the modules report.
      z_loss_weight: weight of the router's z-loss that the modules report.
      mutual_information_weight: weight of the mutual-information loss that the modules report: it sharpens the choice
        of each token, and spreads the load (DS-MoE).
      activity_weight: weight of a ReLU router's activity loss, which ReMoE adapts: see `update_activity_weight`.
      chunk_loss_weight: weight of BlockFFN's chunk loss of a ReLU router, see `neighbour_losses`; 0.05 in the paper.
      chunk_tokens: tokens of a chunk.
      locality_loss_weight: weight of BlockFFN's locality loss; 2e-3 in the paper.
      bias_update_rate: step of the selection bias in training (loss-free balancing); 0 for one that does not move.
      selection_bias: whether the modules hold a selection bias, as one with an update rate always does. Without a rate
        it is frozen: zero, or what a checkpoint says.
      router_bias: whether the router's logits have a learnable bias, the parameter `b_router` (gpt-oss).
      mean_experts: experts that a token has on average, where it may have fewer than slots: memory follows them, and
        not the slots, see `expert_ffn`. None for all K; without K, for a quarter of the experts.
      adapter: adapters of low rank, which alone are trained; None for a layer that is trained itself.
      save: what the experts' backward pass keeps, see `expert_ffn`.
      precision: "fp8" for products of 8 bits, see `expert_ffn`.
      implementation: which kernels to use, see `expert_ffn`.

    Raises:
      ValueError: a field does not fit; the message names it, its value and what is allowed.
    """

    num_experts: int
    experts_per_token: int | None
    expert_width: int
    activation: str | Activation = "swiglu"
    shared_width: int = 0
    shared_gate: bool = False
    latent_width: int = 0
    router: Router = field(default_factory=Router)
    load_balancing_weight: float = 0.01
    z_loss_weight: float = 0.0
    mutual_information_weight: float = 0.0
    activity_weight: float = 0.0
    chunk_loss_weight: float = 0.0
    chunk_tokens: int = 64
    locality_loss_weight: float = 0.0
    bias_update_rate: float = 0.0
    selection_bias: bool = False
    router_bias: bool = False
    mean_experts: float | None = None
    adapter: LoRA | None = None
    save: Save = "pre_activations"
    precision: Precision | None = None
    implementation: Implementation | None = None

    def __post_init__(self):
        get_activation(self.activation)
        check_router(self.router).check(self.num_experts, self.experts_per_token)
        check_implementation(self.implementation)
        check_precision(self.precision)
        if self.precision and self.router.train == "dense":
            raise ValueError(
                f"precision={self.precision!r} must be None with train='dense', which has no such products"
            )
        if self.save not in get_args(Save):
            raise ValueError(f"save={self.save!r} must be one of {', '.join(get_args(Save))}")
        widths = ("shared_width", "latent_width")
        check_integers(expert_width=self.expert_width, **{name: getattr(self, name) for name in widths})
        check_mean_experts(self.mean_experts, self.slots)
        if self.expert_width < 1:
            raise ValueError(f"expert_width={self.expert_width} must be at least 1")
        switches = ("shared_gate", "selection_bias", "router_bias")
        check_booleans(**{name: getattr(self, name) for name in switches})
        weights = ("load_balancing_weight", "z_loss_weight", *_OF_ROUTERS.values(), "bias_update_rate")
        check_numbers(**{name: getattr(self, name) for name in weights})
        for name in (*widths, *weights):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative or infinite")
        if self.router.open_ended and self.has_selection_bias:
            name = "bias_update_rate" if self.bias_update_rate else "selection_bias"
            raise ValueError(
                f"{name}={getattr(self, name)} must be left out: {self.router} takes experts by their logits alone"
            )
        check_integers(chunk_tokens=self.chunk_tokens)
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens={self.chunk_tokens} must be at least 1")
        for name in ("activity_weight", "chunk_loss_weight"):
            if getattr(self, name) and self.router.scoring != "relu":
                raise ValueError(f"{name}={getattr(self, name)} must be 0 unless scoring='relu', which has that loss")
        if self.shared_gate and not self.shared_width:
            raise ValueError("shared_gate=True must be left out where shared_width=0: it scales the shared experts")
        if not isinstance(self.adapter, LoRA | None):
            raise ValueError(f"adapter={shown(self.adapter)} must be a LoRA or None")
        if self.adapter:
            self.adapter.projections(get_activation(self.activation).gated)
            if self.save == "int8":
                raise ValueError(f"save={self.save!r} is not for adapters: leave it out")

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
    def losses_between_neighbours(self) -> tuple[str, ...]:
        """The losses of `neighbour_losses` that have a weight."""
        return tuple(loss for loss in ("chunk_loss", "locality_loss") if getattr(self, _OF_ROUTERS[loss]))

    @property
    def other_loss_weights(self) -> dict[str, float]:
        """Weights of the losses in `Routing.other_losses`, of those that are not 0."""
        weights = {loss: getattr(self, name) for loss, name in _OF_ROUTERS.items() if getattr(self, name)}
        if "activity_loss" in weights:
            weights["activity_loss"] /= self.experts_to_expect or self.slots
        return weights

    @property
    def has_selection_bias(self) -> bool:
        return self.selection_bias or self.bias_update_rate > 0

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of the adapters' parameters."""
        if self.adapter is None:
            return ()
        names = self.adapter.projections(get_activation(self.activation).gated)
        return tuple(f"w_{name}{end}" for name in names for end in (A, B))

    @property
    def random_stream(self) -> str | None:
        """What a training step draws numbers for, and Flax's stream of keys for it is called; None for nothing."""
        if self.router.jitter:
            return "jitter"
        return "dropout" if self.adapter and self.adapter.dropout else None

    def parameters(self, model_width: int, *, use_bias: bool = False) -> dict[str, Parameter]:
        """Every parameter of the layer for tokens of that width, by name; `use_bias` adds the experts' biases.

        Raises:
          ValueError: the width is not an integer of at least 1.
        """
        check_model_width(model_width)
        experts, width = self.num_experts, self.expert_width
        projections = ("gate", "up") if get_activation(self.activation).gated else ("up",)
        parameters = {"w_router": Parameter((model_width, experts), ("embed", "expert"), "router")}
        if self.router_bias:
            parameters["b_router"] = Parameter((experts,), ("expert",), "bias")
        if self.router.weight_norm == "rms":
            parameters["router_gain"] = Parameter((experts,), ("expert",), "gain")
        inner, axis = (self.latent_width, "latent") if self.latent_width else (model_width, "embed")
        for name in projections:
            parameters[f"w_{name}"] = Parameter((experts, inner, width), ("expert", axis, "expert_mlp"), "kernel")
        parameters["w_down"] = Parameter((experts, width, inner), ("expert", "expert_mlp", axis), "kernel")
        if use_bias:
            for name in projections:
                parameters[f"b_{name}"] = Parameter((experts, width), ("expert", "expert_mlp"), "bias")
            parameters["b_down"] = Parameter((experts, inner), ("expert", axis), "bias")
        parameters |= shared_parameters(model_width, self.shared_width, self.activation)
        if self.shared_gate:
            parameters["shared_gate"] = Parameter((model_width, 1), ("embed", None), "kernel")
        if self.latent_width:
            parameters["w_latent_in"] = Parameter((model_width, inner), ("embed", axis), "kernel")
            parameters["w_latent_out"] = Parameter((inner, model_width), (axis, "embed"), "kernel")
        for name in {name.removesuffix(A).removesuffix(B): None for name in self.adapter_names}:
            parameters |= self._adapter_of(name, parameters[name])
        return parameters

    def _adapter_of(self, name: str, weight: Parameter) -> dict[str, Parameter]:
        assert self.adapter is not None
        *experts, inputs, outputs = zip(weight.shape, weight.axes, strict=True)
        rank = self.adapter.rank, "lora_rank"
        of_a = [inputs, rank] if self.adapter.shared else [*experts, inputs, rank]
        a, b = (tuple(zip(*of, strict=True)) for of in (of_a, [*experts, rank, outputs]))
        return {name + A: Parameter(a[0], a[1], "lora_a"), name + B: Parameter(b[0], b[1], "lora_b")}

    def dense_twin(self, model_width: int) -> DenseTwin:
        """The dense layer of the same active arithmetic: a token's K experts, shared experts and latent projections.

        The router's product does not count: it is what routing costs, as are its weights' and the tokens' ways. The
        width, `K·n + shared_width` without a latent space, is rounded to an integer.

        Raises:
          ValueError: the width is not an integer of at least 1, or a token's experts are not counted.
        """
        check_model_width(model_width)
        active = self.experts_per_token if self.mean_experts is None else self.mean_experts
        if active is None:
            raise ValueError(
                "experts_per_token=None has no dense twin, unless mean_experts says how many a token takes"
            )
        matrices = 3 if get_activation(self.activation).gated else 2
        width = active * self.expert_width
        if self.latent_width:
            width = self.latent_width * (width / model_width + 2 / matrices)
        return DenseTwin(max(1, round(width + self.shared_width)), self.activation)


def shared_parameters(model_width: int, width: int, activation: str | Activation) -> dict[str, Parameter]:
    """The parameters of shared experts of that hidden width; none for width 0."""
    if not width:
        return {}
    names = ("gate", "up") if get_activation(activation).gated else ("up",)
    parameters = {f"shared_w_{name}": Parameter((model_width, width), ("embed", "mlp"), "kernel") for name in names}
    return parameters | {"shared_w_down": Parameter((width, model_width), ("mlp", "embed"), "kernel")}


def check_model_width(model_width: int) -> None:
    """Raises ValueError unless it is an integer of at least 1."""
    check_integers(model_width=model_width)
    if model_width < 1:
        raise ValueError(f"{model_width=} must be at least 1")


def check_config(config: MoEConfig) -> MoEConfig:
    """`config`; raises ValueError if it is not a MoEConfig."""
    if not isinstance(config, MoEConfig):
        raise ValueError(f"config={shown(config)} must be a MoEConfig")
    return config
