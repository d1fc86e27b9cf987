"""All fields of public releases, fields that nobody knows, and numbers beyond reason."""

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from blaze_jax import checkpoints
from tests.blaze_jax.checkpoints.test_config import (
    DEEPSEEK_V3,
    GPT_OSS_20B,
    MIXTRAL_8X7B,
    OLMOE_1B_7B,
    QWEN3_30B_A3B,
)

RELEASES = json.loads((Path(__file__).parent / "public_configs.json").read_text())
"""Files of public releases, all fields: "public copy" are as others have copied them, "memory" as this test's author
remembers them. Lists of modules that are not compressed are cut to one."""

FAMILIES_OF_RELEASES = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "kimi_k2", "glm4_moe", "gpt_oss")


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("name", RELEASES)
def test_every_field_of_a_public_release_is_known_or_passed_over(name):
    config = RELEASES[name]["config"]
    described = checkpoints.read_model(config)
    layer = described.layer
    assert described.family == config["model_type"]
    assert layer.num_experts in {config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts")}
    assert layer.experts_per_token == config["num_experts_per_tok"]
    assert layer.expert_width == config.get("moe_intermediate_size", config["intermediate_size"])
    assert layer.shared_width == config.get("n_shared_experts", 0) * layer.expert_width
    assert described.dense_layers == tuple(range(config.get("first_k_dense_replace", 0)))


def test_there_are_three_releases_of_each_family():
    counted = Counter(release["config"]["model_type"] for release in RELEASES.values())
    assert set(counted) == set(FAMILIES_OF_RELEASES)
    assert min(counted.values()) >= 3


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    "fields",
    [
        {"qkv_bias": True},
        {"use_qk_norm": True},
        {"shared_expert_intermediate_size": 0, "mlp_bias": False, "expert_capacity": None, "n_group": 0},
        {"partial_rotary_factor": 0.5, "factor": 2, "attn_factor": 1, "exact": True},
        {"unsloth_fixed": True, "unsloth_version": "2025.9"},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 32768},
        {"_experts_implementation": "grouped_mm"},
        {"attention_dropout": 0.1, "logits_to_keep": 1, "tokenizer_class": "Qwen2Tokenizer"},
        {"router_aux_loss_coef": 0.5, "seq_aux": True, "aux_loss_alpha": 0.1},
        {"max_window_layers": 28, "sliding_window": 4096, "use_sliding_window": True},
        {"text_config": None, "quantization_config": None},
        {7: 8},
    ],
)
def test_what_concerns_other_parts_is_passed_over(fields):
    for config in (QWEN3_30B_A3B, OLMOE_1B_7B, MIXTRAL_8X7B):
        assert checkpoints.read_model(config | fields) == checkpoints.read_model(config)


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    "name",
    [
        "expert_capacity_factor",
        "numExpertsPerGroup",
        "moe_shared_size",
        "use_gate",
        "gating_dropout",
        "mlp_bias",
        "ffn_mult",
        "activation_limit",
        "swiglu_beta",
        "topk_scale",
        "n_group",
        "scoring",
        "router_z_loss_coef",
        "shared_width",
        "residual_multiplier",
        "weight_scale",
        "drop_tokens",
        "normalize_weights",
        "quantization",
        "use_bias",
    ],
)
def test_what_could_change_the_layer_is_refused(name):
    with pytest.raises(checkpoints.CheckpointError, match=f"{name}=2 is unknown to olmoe, and could change the layer"):
        checkpoints.read_model(OLMOE_1B_7B | {name: 2})


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (OLMOE_1B_7B, {"hidden_size": 10**30}, "hidden_size=1000.* must be an integer of at most"),
        (OLMOE_1B_7B, {"num_experts": 10**12}, "num_experts=1000000000000 must be an integer of at most"),
        (QWEN3_30B_A3B, {"num_hidden_layers": 10**12, "decoder_sparse_step": 2}, "num_hidden_layers=1000000000000"),
        (DEEPSEEK_V3, {"n_shared_experts": 10**400}, "n_shared_experts=1000.* must be an integer of at most"),
        (DEEPSEEK_V3, {"routed_scaling_factor": 10**400}, "routed_scaling_factor=1000.* must be a finite number"),
        (GPT_OSS_20B, {"swiglu_limit": -(10**400)}, "swiglu_limit=-1000.* must be a finite number"),
        (MIXTRAL_8X7B, {"norm_topk_prob": False}, "norm_topk_prob=False must be True"),
    ],
)
def test_numbers_beyond_reason_are_named(tmp_path, config, change, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | change))
    with pytest.raises(checkpoints.CheckpointError, match=f"config.json: {message}"):
        checkpoints.read_model(path)


def test_a_kilobyte_takes_no_time(tmp_path):
    assert len(checkpoints.read_model(DEEPSEEK_V3 | {"first_k_dense_replace": 10**9}).dense_layers) == 61
    path = tmp_path / "config.json"
    path.write_text("{" + ",".join(f'"a{n % 80_000}": 0' for n in range(80_001)) + "}")
    start = time.perf_counter()
    with pytest.raises(checkpoints.CheckpointError, match="'a0' stands there twice"):
        checkpoints.read_model(path)
    assert time.perf_counter() - start < 5
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(checkpoints.CheckpointError, match=r"config\.json: is no file"):
        checkpoints.read_model(path)


def test_a_name_that_cannot_be_printed_is_escaped():
    with pytest.raises(checkpoints.CheckpointError, match=r"expert\\ud800=1 is unknown") as raised:
        checkpoints.read_model(OLMOE_1B_7B | {"expert\ud800": 1})
    assert str(raised.value).isascii()
