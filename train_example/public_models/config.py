"""A public model's `config.json`, read as the decoder's sizes. What the decoder has not is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blaze_jax import checkpoints
from blaze_jax.json_file import read_json
from train_example.config import ModelConfig, UserError
from train_example.layers import QKNorm

FAMILIES: dict[str, QKNorm] = {"olmoe": "token", "qwen3_moe": "head"}
"""Families that the decoder covers, and what their norms of queries and keys take together."""

_MUST_BE = {
    "attention_bias": False,
    "attention_dropout": 0,
    "clip_qkv": None,
    "partial_rotary_factor": 1,
    "qkv_bias": False,
    "quantization_config": None,
    "rope_scaling": None,
    "shared_expert_intermediate_size": 0,
    "use_qk_norm": True,
    "use_sliding_window": False,
}
"""The one value that the decoder has, and that a field has which is missing."""

_ROTATION_MUST_BE = {"partial_rotary_factor": 1, "rope_type": "default", "type": "default"}

_USED = """
decoder_sparse_step experts_per_token head_dim hidden_act hidden_size intermediate_size layer_types
max_position_embeddings mlp_only_layers model_type moe_intermediate_size norm_topk_prob num_attention_heads num_experts
num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts output_router_logits rms_norm_eps
rope_parameters rope_theta router_aux_loss_coef tie_word_embeddings vocab_size
"""
_WITHOUT_EFFECT = """
architectures auto_map bos_token_id dtype eos_token_id finetuning_task id2label initializer_range label2id
max_window_layers output_attentions output_hidden_states pad_token_id prefix problem_type return_dict sep_token_id
sliding_window task_specific_params tokenizer_class torch_dtype torchscript transformers_version use_cache
"""
"""On logits and gradients of these families: windows come with `use_sliding_window` alone."""

_FULL = "full_attention"


def public_config(folder: str | Path) -> ModelConfig:
    """The sizes of the model in a folder.

    Raises:
      UserError: it is of another family, or has what the decoder has not; the message names the field and its value.
    """
    path = Path(folder) / "config.json"
    try:
        fields = read_json(path)
        public = checkpoints.read_model(path)
    except checkpoints.CheckpointError as error:
        raise UserError(f"--checkpoint {folder}: {error}") from error
    if public.family not in FAMILIES:
        raise UserError(f"--checkpoint {folder} is a model of {public.family}, must be one of {', '.join(FAMILIES)}")
    rotation = fields.get("rope_parameters") or {}
    try:
        where = f"--checkpoint {folder}: {path.name} has"
        _check_values(fields, _MUST_BE, {*_USED.split(), *_WITHOUT_EFFECT.split()}, where)
        _check_values(rotation, _ROTATION_MUST_BE, {"rope_theta"}, f"{where} rope_parameters's")
        if any(kind != _FULL for kind in fields.get("layer_types") or []):
            raise UserError(f"{where} layer_types={fields['layer_types']}, must be {_FULL} in every layer")
        heads = int(fields["num_attention_heads"])
        positions = fields.get("max_position_embeddings")
        return ModelConfig(
            width=public.width,
            num_layers=public.num_layers,
            num_heads=heads,
            num_kv_heads=int(fields.get("num_key_value_heads") or heads),
            num_experts=public.layer.num_experts,
            experts_per_token=public.layer.experts_per_token,
            expert_width=public.layer.expert_width,
            activation=str(public.layer.activation),
            dense_layers=public.dense_layers,
            dense_width=public.dense_width or 0,
            head_width=int(fields.get("head_dim") or public.width // heads),
            qk_norm=FAMILIES[public.family],
            rotary_base=float(rotation.get("rope_theta", fields.get("rope_theta", 10_000.0))),
            norm_epsilon=float(fields["rms_norm_eps"]),
            tied_head=bool(fields.get("tie_word_embeddings", False)),
            vocabulary=int(fields["vocab_size"]),
            max_positions=None if positions is None else int(positions),
            router=public.layer.router,
            load_balancing_weight=public.layer.load_balancing_weight,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"--checkpoint {folder}: {path.name} lacks or misstates a field: {error!r}") from error


def _check_values(fields: Mapping[str, Any], must_be: Mapping[str, Any], known: set[str], where: str) -> None:
    """Raises UserError for what would change the mathematics."""
    for name, value in fields.items():
        if name in must_be:
            if value != must_be[name] and value is not None:
                raise UserError(f"{where} {name}={value}, must be {must_be[name]}")
        elif value and name not in known and not name.startswith("_"):
            raise UserError(
                f"{where} {name}={value}, which this decoder does not know; leave it out if it changes nothing"
            )
