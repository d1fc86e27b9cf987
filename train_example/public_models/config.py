"""A public model's `config.json`, read as the decoder's sizes. What the decoder has not is refused."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from blaze_jax import MoEConfig, checkpoints
from blaze_jax.checks import shown
from blaze_jax.huggingface import Fields, PublicModel
from blaze_jax.json_file import CheckpointError, read_json
from train_example.config import ModelConfig, UserError
from train_example.layers import QKNorm
from train_example.public_models.gpt_oss import GptOssConfig, yarn, yarn_scale

FAMILIES: dict[str, QKNorm | None] = {"olmoe": "token", "qwen3_moe": "head", "gpt_oss": None}
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

_OF_GPT_OSS = {"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""What differs from that in this family; whose experts may be compressed, as the layer's reader checks."""

_ROTATION_MUST_BE = {"partial_rotary_factor": 1, "rope_type": "default", "type": "default"}
_YARN_MUST_BE = {"partial_rotary_factor": 1, "rope_type": "yarn", "type": "yarn"}
_YARN = """
attention_factor beta_fast beta_slow factor mscale mscale_all_dim original_max_position_embeddings rope_theta truncate
"""

_USED = """
decoder_sparse_step experts_per_token head_dim hidden_act hidden_size intermediate_size layer_types
max_position_embeddings mlp_only_layers model_type moe_intermediate_size norm_topk_prob num_attention_heads num_experts
num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts output_router_logits rms_norm_eps
rope_parameters rope_theta router_aux_loss_coef tie_word_embeddings vocab_size
"""
_WITHOUT_EFFECT = """
architectures auto_map bos_token_id dtype eos_token_id finetuning_task id2label initial_context_length
initializer_range label2id
max_window_layers output_attentions output_hidden_states pad_token_id prefix problem_type return_dict sep_token_id
sliding_window task_specific_params tokenizer_class torch_dtype torchscript transformers_version use_cache
"""
"""On logits and gradients of these families: windows come with `use_sliding_window` alone."""

_FULL, _SLIDING = "full_attention", "sliding_attention"


def public_config(folder: str | Path) -> ModelConfig:
    """The sizes of the model in a folder.

    Raises:
      UserError: it is of another family, or has what the decoder has not; the message names the field and its value.
    """
    path = Path(folder) / "config.json"
    try:
        fields = read_json(path)
        public = checkpoints.read_model(path)
        if public.family not in FAMILIES:
            raise CheckpointError(f"is a model of {public.family}, must be one of {', '.join(FAMILIES)}")
        return _decoder(fields, public, path)
    except CheckpointError as error:
        raise UserError(f"--checkpoint {folder}: {error}") from error


def _decoder(content: Mapping[str, Any], public: PublicModel[MoEConfig], path: Path) -> ModelConfig:
    """Returns the sizes that a `config.json` says; CheckpointError for a field that the decoder has not."""
    is_gpt_oss = public.family == "gpt_oss"
    rotation = content.get("rope_parameters") or (is_gpt_oss and content.get("rope_scaling")) or {}
    if not isinstance(rotation, Mapping):
        raise CheckpointError(f"{path}: rope_parameters={shown(rotation)} must be an object")
    _check(content, rotation, is_gpt_oss, f"{path.name} has")
    # Null stands for what a field has where it is missing; newer files keep the rotation's base among its parameters.
    given = {name: value for name, value in {**content, **rotation}.items() if value is not None}
    fields = Fields(given, str(path))
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    head_width = fields.count("head_dim", public.width // heads)
    if heads % kv_heads or head_width % 2 or ("head_dim" not in given and public.width % heads):
        raise CheckpointError(
            f"{path}: num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}, and heads of "
            f"width {head_width}, by head_dim or hidden_size={public.width}, must have an even one and fill it"
        )
    base = fields.number("rope_theta", 150_000.0 if is_gpt_oss else 10_000.0, positive=True)
    make: Callable[..., ModelConfig] = ModelConfig
    if is_gpt_oss:
        frequencies, scale = _rotation(fields, rotation.get("rope_type") == "yarn", head_width, base)
        windows = _windows(fields, given.get("layer_types"), public.num_layers, path)
        make = partial(GptOssConfig, windows=windows, rotary_frequencies=frequencies, rotary_scale=scale)
    return make(
        width=public.width,
        num_layers=public.num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        num_experts=public.layer.num_experts,
        experts_per_token=public.layer.slots,
        expert_width=public.layer.expert_width,
        activation=getattr(public.layer.activation, "name", str(public.layer.activation)),
        dense_layers=public.dense_layers,
        dense_width=public.dense_width or 0,
        head_width=head_width,
        qk_norm=FAMILIES[public.family],
        rotary_base=base,
        norm_epsilon=fields.number("rms_norm_eps", positive=True),
        tied_head=fields.boolean("tie_word_embeddings", False),
        vocabulary=fields.count("vocab_size"),
        max_positions=fields.count("max_position_embeddings") if "max_position_embeddings" in given else None,
        router=public.layer.router,
        load_balancing_weight=public.layer.load_balancing_weight,
    )


def _rotation(fields: Fields, is_yarn: bool, head_width: int, base: float) -> tuple[tuple[float, ...], float]:
    """The frequencies of half a head, and what rotated queries and keys are times."""
    if not is_yarn:
        return yarn(head_width, base, 1.0, 1), 1.0
    factor = fields.number("factor", positive=True)
    length = fields.count("original_max_position_embeddings")
    turns = (fields.number(name, value, positive=True) for name, value in (("beta_fast", 32.0), ("beta_slow", 1.0)))
    frequencies = yarn(head_width, base, factor, length, *turns, truncate=fields.boolean("truncate", True))
    weights = fields.number("mscale", 0.0), fields.number("mscale_all_dim", 0.0)
    scale = yarn_scale(factor, weights[0]) / yarn_scale(factor, weights[1]) if all(weights) else yarn_scale(factor)
    return frequencies, fields.number("attention_factor", scale, positive=True)


def _windows(fields: Fields, kinds: Sequence[str] | None, num_layers: int, path: Path) -> tuple[int, ...]:
    """How many positions a token of each layer sees, 0 for all; every other one has a window where nothing is said."""
    kinds = kinds or [(_SLIDING, _FULL)[layer % 2] for layer in range(num_layers)]
    if len(kinds) != num_layers:
        raise CheckpointError(f"{path}: layer_types has {len(kinds)} layers, must have num_hidden_layers={num_layers}")
    window = fields.count("sliding_window", 128)
    return tuple(window if kind == _SLIDING else 0 for kind in kinds)


def _check(fields: Mapping[str, Any], rotation: Mapping[str, Any], is_gpt_oss: bool, where: str) -> None:
    """Raises CheckpointError for what would change the mathematics."""
    must_be = _MUST_BE | (_OF_GPT_OSS if is_gpt_oss else {})
    own = ("rope_scaling", "quantization_config", "layer_types") if is_gpt_oss else ()
    must_be = {name: value for name, value in must_be.items() if name not in own}
    _check_values(fields, must_be, {*_USED.split(), *_WITHOUT_EFFECT.split(), *own}, where)
    is_yarn = is_gpt_oss and rotation.get("rope_type") == "yarn"
    known = {*_YARN.split()} if is_yarn else {"rope_theta"}
    _check_values(rotation, _YARN_MUST_BE if is_yarn else _ROTATION_MUST_BE, known, f"{where} rope_parameters's")
    kinds = fields.get("layer_types") or []
    allowed = (_FULL, _SLIDING) if is_gpt_oss else (_FULL,)
    if not isinstance(kinds, list) or any(kind not in allowed for kind in kinds):
        raise CheckpointError(
            f"{where} layer_types={fields['layer_types']}, must be {' or '.join(allowed)} in every layer"
        )


def _check_values(fields: Mapping[str, Any], must_be: Mapping[str, Any], known: set[str], where: str) -> None:
    for name, value in fields.items():
        if name in must_be:
            if value != must_be[name] and value is not None:
                raise CheckpointError(f"{where} {name}={value}, must be {must_be[name]}")
        elif value and name not in known and not name.startswith("_"):
            raise CheckpointError(
                f"{where} {name}={value}, which this decoder does not know; leave it out if it changes nothing"
            )
