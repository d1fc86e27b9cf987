"""What a public model's `config.json` says of its layers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blaze_jax.activations import Activation, clamped_swiglu
from blaze_jax.checkpoints.decode import FLOAT8_BLOCK
from blaze_jax.checkpoints.errors import CheckpointError
from blaze_jax.checkpoints.fields import MOST_LAYERS, Fields
from blaze_jax.checkpoints.json_file import read_json
from blaze_jax.config import MoEConfig
from blaze_jax.router import Router


@dataclass(frozen=True, kw_only=True)
class PublicModel:
    """A model as its `config.json` describes it.

    Attributes:
      family: the file's model_type: mixtral, qwen3_moe, olmoe, deepseek_v3, kimi_k2, glm4_moe or
        gpt_oss.
      width: d, the width of a token.
      num_layers: how many layers it has.
      dense_layers: numbers of those without experts, from 0.
      dense_width: hidden width of the dense layers; None for a family that has none.
      use_bias: whether the experts have biases, an argument of the modules.
      layer: the configuration of its Mixture-of-Experts layers.
    """

    family: str
    width: int
    num_layers: int
    dense_layers: tuple[int, ...]
    dense_width: int | None
    use_bias: bool
    layer: MoEConfig


def read_model(config: Mapping[str, Any] | str | Path) -> PublicModel:
    """Reads a `config.json` of Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3, Kimi-K2, GLM-4.5 or gpt-oss.

    Auxiliary losses have the weights of the file where transformers would add them, which `output_router_logits` says,
    and no weight otherwise; the selection bias is frozen. `dataclasses.replace(model.layer, ...)` sets what else
    training should do.

    Args:
      config: what the file holds, the file, or its folder.

    Raises:
      CheckpointError: a field is missing, unknown, of another type, or contradicts another; the message names it.
    """
    if isinstance(config, Mapping):
        where = "config"
    else:
        where = Path(config)
        where = where / "config.json" if where.is_dir() else where
        config = read_json(where)
    fields = Fields(config, str(where))
    family = fields.choice("model_type", list(_FAMILIES))
    try:
        model = _FAMILIES[family](fields)
    except CheckpointError:
        raise
    except ValueError as error:  # of the layer's own checks
        raise CheckpointError(f"{where}: no layer of this library fits it: {error}") from error
    fields.check_all_known(family)
    return model


_FLOAT8 = {"fmt": "e4m3", "weight_block_size": [FLOAT8_BLOCK, FLOAT8_BLOCK]}


def _mixtral(fields: Fields) -> PublicModel:
    fields.choice("router_jitter_noise", [0], 0)
    fields.choice("norm_topk_prob", [True], True)
    return _model(fields, Router(normalize_weights=True), "intermediate_size")


def _olmoe(fields: Fields) -> PublicModel:
    router = Router(normalize_weights=fields.boolean("norm_topk_prob"))
    return _model(fields, router, "intermediate_size")


def _qwen3_moe(fields: Fields) -> PublicModel:
    fields.check_quantization("fp8", **_FLOAT8)
    router = Router(normalize_weights=fields.boolean("norm_topk_prob"))
    num_layers = fields.count("num_hidden_layers", most=MOST_LAYERS)
    step = fields.count("decoder_sparse_step", 1)
    listed = set(fields.counts("mlp_only_layers", num_layers))
    return _model(
        fields,
        router,
        "moe_intermediate_size",
        dense_layers=tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step),
        dense_width=fields.count("intermediate_size"),
    )


def _deepseek_v3(fields: Fields) -> PublicModel:
    """Kimi-K2 and GLM-4.5 have its layer, too; what GLM-4.5 leaves out has one value there."""
    fields.choice("scoring_func", ["sigmoid"], "sigmoid")
    fields.choice("topk_method", ["noaux_tc"], "noaux_tc")
    fields.choice("moe_layer_freq", [1], 1)
    fields.check_quantization("fp8", **_FLOAT8)
    router = Router(
        scoring="sigmoid",
        normalize_weights=fields.boolean("norm_topk_prob"),
        weight_scale=fields.number("routed_scaling_factor"),
        num_groups=fields.count("n_group"),
        groups_per_token=fields.count("topk_group"),
    )
    num_layers = fields.count("num_hidden_layers", most=MOST_LAYERS)
    return _model(
        fields,
        router,
        "moe_intermediate_size",
        dense_layers=tuple(range(min(fields.count("first_k_dense_replace", least=0), num_layers))),
        dense_width=fields.count("intermediate_size"),
        shared_width=fields.count("n_shared_experts", least=0) * fields.count("moe_intermediate_size"),
        selection_bias=True,
    )


def _gpt_oss(fields: Fields) -> PublicModel:
    fields.check_quantization("mxfp4")
    fields.choice("norm_topk_prob", [True], True)
    fields.choice("hidden_act", ["silu"])
    alpha, limit = fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)
    return _model(
        fields,
        Router(scoring="softmax_selected"),
        "intermediate_size",
        activation=clamped_swiglu(alpha, limit),
        router_bias=True,
    )


_FAMILIES: dict[str, Callable[[Fields], PublicModel]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "glm4_moe": _deepseek_v3,
    "gpt_oss": _gpt_oss,
}

_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
    "relu": "reglu",
}


def _model(
    fields: Fields,
    router: Router,
    expert_width: str,
    *,
    activation: Activation | None = None,
    dense_layers: tuple[int, ...] = (),
    dense_width: int | None = None,
    **options: Any,
) -> PublicModel:
    """What all families say in the same way."""
    num_layers = fields.count("num_hidden_layers", most=MOST_LAYERS)
    experts_per_token = fields.count_of_any(["num_experts_per_tok", "experts_per_token"])
    weight = (
        fields.number("router_aux_loss_coef", 0.0) if fields.boolean("output_router_logits", default=False) else 0.0
    )
    layer = MoEConfig(
        num_experts=fields.count_of_any(["num_local_experts", "num_experts", "n_routed_experts"]),
        experts_per_token=experts_per_token,
        expert_width=fields.count(expert_width),
        activation=activation or _ACTIVATIONS[fields.choice("hidden_act", list(_ACTIVATIONS))],
        router=router,
        # transformers counts each of a token's choices as one, and all layers as one.
        load_balancing_weight=weight * experts_per_token / max(num_layers - len(dense_layers), 1),
        **options,
    )
    return PublicModel(
        family=fields.choice("model_type", list(_FAMILIES)),
        width=fields.count("hidden_size"),
        num_layers=num_layers,
        dense_layers=dense_layers,
        dense_width=dense_width,
        use_bias=layer.router_bias,
        layer=layer,
    )
