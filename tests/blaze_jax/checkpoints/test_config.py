"""What a `config.json` says, in the words of the models' public files."""

import json

import pytest

from blaze_jax import MoEConfig, Router, checkpoints, clamped_swiglu
from tests.blaze_jax.checkpoints.models import FAMILIES, FIXTURES, model

MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rope_scaling": None,
    "router_aux_loss_coef": 0.001,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
OLMOE_1B_7B = {
    "attention_bias": False,
    "clip_qkv": None,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "router_aux_loss_coef": 0.01,
    "vocab_size": 50304,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "routed_scaling_factor": 2.827,
    "seq_aux": True,
    "topk_group": 1,
}
GLM_4_5 = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
    "use_qk_norm": True,
}
GPT_OSS_20B = {
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "model_type": "gpt_oss",
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
    "router_aux_loss_coef": 0.9,
    "swiglu_limit": 7.0,
}

NONE = {"load_balancing_weight": 0.0}
PUBLIC = [
    (
        MIXTRAL_8X7B,
        MoEConfig(
            num_experts=8, experts_per_token=2, expert_width=14336, router=Router(normalize_weights=True), **NONE
        ),
        (),
    ),
    (
        QWEN3_30B_A3B,
        MoEConfig(
            num_experts=128, experts_per_token=8, expert_width=768, router=Router(normalize_weights=True), **NONE
        ),
        (),
    ),
    (
        OLMOE_1B_7B,
        MoEConfig(
            num_experts=64, experts_per_token=8, expert_width=1024, router=Router(normalize_weights=False), **NONE
        ),
        (),
    ),
    (
        DEEPSEEK_V3,
        MoEConfig(
            num_experts=256,
            experts_per_token=8,
            expert_width=2048,
            shared_width=2048,
            selection_bias=True,
            router=Router(
                scoring="sigmoid", normalize_weights=True, weight_scale=2.5, num_groups=8, groups_per_token=4
            ),
            **NONE,
        ),
        (0, 1, 2),
    ),
    (
        KIMI_K2,
        MoEConfig(
            num_experts=384,
            experts_per_token=8,
            expert_width=2048,
            shared_width=2048,
            selection_bias=True,
            router=Router(scoring="sigmoid", normalize_weights=True, weight_scale=2.827),
            **NONE,
        ),
        (0,),
    ),
    (
        GLM_4_5,
        MoEConfig(
            num_experts=160,
            experts_per_token=8,
            expert_width=1536,
            shared_width=1536,
            selection_bias=True,
            router=Router(scoring="sigmoid", normalize_weights=True, weight_scale=2.5),
            **NONE,
        ),
        (0, 1, 2),
    ),
    (
        GPT_OSS_20B,
        MoEConfig(
            num_experts=32,
            experts_per_token=4,
            expert_width=2880,
            activation=clamped_swiglu(1.702, 7.0),
            router_bias=True,
            router=Router(scoring="softmax_selected"),
            **NONE,
        ),
        (),
    ),
]


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    ("config", "layer", "dense"), PUBLIC, ids=lambda v: v.get("model_type") if isinstance(v, dict) else ""
)
def test_public_models(config, layer, dense):
    described = checkpoints.read_model(config)
    assert MoEConfig.from_huggingface(config) == layer == described.layer
    assert described.dense_layers == dense
    assert (described.width, described.num_layers) == (config["hidden_size"], config["num_hidden_layers"])
    assert described.use_bias == (config["model_type"] == "gpt_oss")
    assert described.dense_width == (
        None if config["model_type"] in ("mixtral", "olmoe", "gpt_oss") else config["intermediate_size"]
    )


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("family", FAMILIES)
def test_files_of_transformers_5_by_path_folder_or_content(family):
    path = FIXTURES / family / "config.json"
    layer = model(family).layer
    assert MoEConfig.from_huggingface(path) == MoEConfig.from_huggingface(json.loads(path.read_text())) == layer
    assert MoEConfig.from_huggingface(str(path)) == layer


def test_dense_layers_of_qwen3():
    config = QWEN3_30B_A3B | {"num_hidden_layers": 6, "mlp_only_layers": [3], "decoder_sparse_step": 2}
    assert checkpoints.read_model(config).dense_layers == (0, 2, 3, 4)


def test_losses_count_where_transformers_adds_them():
    config = QWEN3_30B_A3B | {"output_router_logits": True}
    assert MoEConfig.from_huggingface(config).load_balancing_weight == pytest.approx(0.001 * 8 / 48)


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (MIXTRAL_8X7B, {"model_type": "llama"}, "model_type='llama' must be mixtral or qwen3_moe or olmoe"),
        (MIXTRAL_8X7B, {"model_type": None}, "model_type"),
        (MIXTRAL_8X7B, {"hidden_act": "quick"}, "hidden_act='quick' must be silu or"),
        (MIXTRAL_8X7B, {"num_local_experts": "8"}, "num_local_experts='8' must be an integer"),
        (MIXTRAL_8X7B, {"num_experts": 4}, "num_experts=4 must be num_local_experts=8"),
        (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "experts_per_token=9 must be from 1 to"),
        (MIXTRAL_8X7B, {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 must be 0"),
        (
            MIXTRAL_8X7B,
            {"experts_everywhere": True},
            "experts_everywhere=True is unknown to mixtral, and could change the layer",
        ),
        (MIXTRAL_8X7B, {"quantization_config": {"quant_method": "awq"}}, "quantization_config=.* is unknown"),
        (OLMOE_1B_7B, {"norm_topk_prob": 1}, "norm_topk_prob=1 must be true or false"),
        (OLMOE_1B_7B, {"hidden_size": True}, "hidden_size=True must be an integer"),
        (OLMOE_1B_7B, {"n_group": 4}, "n_group=4 is unknown to olmoe"),
        (QWEN3_30B_A3B, {"mlp_only_layers": [48]}, "mlp_only_layers=.* from 0 to 47"),
        (QWEN3_30B_A3B, {"mlp_only_layers": "1"}, "mlp_only_layers"),
        (QWEN3_30B_A3B, {"shared_expert_intermediate_size": 4}, "shared_expert_intermediate_size=4 is unknown"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func='softmax' must be sigmoid"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method='greedy' must be noaux_tc"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq=2 must be 1"),
        (DEEPSEEK_V3, {"n_group": 7}, "num_groups=7 must be a divisor"),
        (DEEPSEEK_V3, {"n_group": None}, "n_group=None must be an integer"),
        (DEEPSEEK_V3, {"routed_scaling_factor": float("nan")}, "routed_scaling_factor=nan must be a finite number"),
        (
            DEEPSEEK_V3,
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            "weight_block_size",
        ),
        (DEEPSEEK_V3, {"quantization_config": "fp8"}, "quantization_config='fp8' must be null, or have"),
        (GPT_OSS_20B, {"experts_per_token": 2}, "experts_per_token=2 must be num_experts_per_tok=4"),
        (GPT_OSS_20B, {"hidden_act": "gelu"}, "hidden_act='gelu' must be silu"),
        (GPT_OSS_20B, {"swiglu_limit": -1.0}, "limit=-1.0 must be positive"),
    ],
)
def test_what_contradicts_is_named(config, change, message):
    with pytest.raises(checkpoints.CheckpointError, match=message):
        checkpoints.read_model(config | change)


@pytest.mark.default_cases("mixtral", "qwen3_moe", "olmoe", "kimi_k2", "gpt_oss")
@pytest.mark.parametrize("config", [entry[0] for entry in PUBLIC], ids=lambda config: config["model_type"])
def test_what_decides_the_mathematics_must_be_there(config):
    needed = {"hidden_size", "num_hidden_layers", "hidden_act", "norm_topk_prob", "n_group", "topk_group", "model_type"}
    needed |= {"routed_scaling_factor", "n_shared_experts", "first_k_dense_replace", "moe_intermediate_size"}
    for name in needed & config.keys():
        with pytest.raises(checkpoints.CheckpointError, match=f"{name} is missing"):
            checkpoints.read_model({key: value for key, value in config.items() if key != name})


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[1]", "must hold a JSON object, holds list"),
        ('{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' stands there twice"),
        ("[" * 100_000, "is not JSON"),
        ("\x00\xff", "is not JSON"),
        (None, "cannot be read"),
    ],
)
def test_broken_files_are_named(tmp_path, text, message):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(checkpoints.CheckpointError, match=f"config.json: .*{message}"):
        MoEConfig.from_huggingface(path)
