"""Fields of a `config.json`, each taken with its type checked; those that nobody knows are errors."""

import math
from collections.abc import Mapping
from typing import Any

from blaze_jax.checkpoints.errors import CheckpointError
from blaze_jax.checks import shown

_MISSING = object()

_OF_ANY_MODEL = """
_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path add_cross_attention architectures
attention_bias attention_dropout auto_map bos_token_id chunk_size_feed_forward cross_attention_hidden_size dtype
eos_token_id finetuning_task head_dim id2label initializer_range is_decoder is_encoder_decoder label2id layer_types
max_position_embeddings model_type num_attention_heads num_key_value_heads output_attentions output_hidden_states
output_router_logits pad_token_id prefix problem_type pruned_heads return_dict rms_norm_eps rope_parameters rope_scaling
rope_theta router_aux_loss_coef sep_token_id sliding_window task_specific_params tf_legacy_loss tie_encoder_decoder
tie_word_embeddings tokenizer_class torch_dtype torchscript transformers_version use_bfloat16 use_cache vocab_size
"""
"""What transformers writes for any model, and what concerns attention, embeddings and norms."""

_DEEPSEEK_V3 = """
aux_loss_alpha ep_size kv_lora_rank num_mtp_layers num_nextn_predict_layers pretraining_tp q_lora_rank qk_head_dim
qk_nope_head_dim qk_rope_head_dim rope_interleave seq_aux v_head_dim
"""

_OF_FAMILY = {
    "mixtral": "",
    "qwen3_moe": "max_window_layers use_sliding_window",
    "olmoe": "clip_qkv",
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe": "num_mtp_layers num_nextn_predict_layers partial_rotary_factor use_qk_norm",
    "gpt_oss": "initial_context_length",
}
"""What concerns other parts of a model of that family, or its losses."""


class Fields:
    """The fields of a `config.json`, which notes those that were asked for.

    Args:
      values: the file's content.
      where: what an error calls it.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values, self._where, self._known = values, where, set()

    def count(self, name: str, default: Any = _MISSING, *, least: int = 1) -> int:
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(name, f"an integer of at least {least}")
        return value

    def count_of_any(self, names: list[str]) -> int:
        """A number that has several names, of which releases of transformers write one or another, or several."""
        present = [name for name in names if name in self._values] or names[:1]
        counts = [self.count(name) for name in present]
        if len(set(counts)) > 1:
            raise self.error(present[1], f"{present[0]}={counts[0]}")
        return counts[0]

    def counts(self, name: str, below: int) -> list[int]:
        """Distinct numbers of layers; none where the field is null or missing."""
        value = self._get(name, None)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(type(v) is int and 0 <= v < below for v in value):
            raise self.error(name, f"a list of integers from 0 to {below - 1}")
        return value

    def number(self, name: str, default: Any = _MISSING) -> float:
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.error(name, "a finite number")
        return float(value)

    def boolean(self, name: str, default: Any = _MISSING) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def choice(self, name: str, allowed: list, default: Any = _MISSING) -> Any:
        value = self._get(name, default)
        if isinstance(value, bool) or value not in allowed:
            raise self.error(name, " or ".join(map(str, allowed)))
        return value

    def check_quantization(self, method: str, **details: Any) -> None:
        """Raises CheckpointError if the file tells of compression by another method, or in another way."""
        value = self._get("quantization_config", None)
        if value is None:
            return
        expected = {"quant_method": method} | details
        if not isinstance(value, Mapping) or any(value.get(name, right) != right for name, right in expected.items()):
            raise self.error("quantization_config", f"null, or have {expected}")

    def check_all_known(self, family: str) -> None:
        """Raises CheckpointError if there are fields that nobody asked for, and that are no other part's of a model."""
        of_others = {*_OF_ANY_MODEL.split(), *_OF_FAMILY[family].split()}
        if unknown := sorted(map(str, self._values.keys() - self._known - of_others)):
            raise CheckpointError(
                f"{self._where}: {unknown[0]}={shown(self._values.get(unknown[0]))} is unknown to {family}; leave it "
                "out of a dict if it does not change the layer"
            )

    def error(self, name: str, rule: str) -> CheckpointError:
        if name not in self._values:
            return CheckpointError(f"{self._where}: {name} is missing, must be {rule}")
        return CheckpointError(f"{self._where}: {name}={shown(self._values[name])} must be {rule}")

    def _get(self, name: str, default: Any) -> Any:
        self._known.add(name)
        return self._values.get(name, default)
