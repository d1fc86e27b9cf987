"""Writes the fixtures of this folder: small random models in each public format, and what transformers computes.

Run it with torch and transformers 5.23 on a CPU, in an environment of its own:
`python tests/blaze_jax/checkpoints/make_fixtures.py`. No test runs it, and none needs either library.

A folder holds a model as transformers saves it, and `expected.safetensors`: tokens x, output y and gradient dx of its
last block of experts for the gradient dy; of whole models also token ids, logits and loss. The folder with `-gradients`
has the gradient of each weight under the weight's own name, so that it can be read as a checkpoint. Other folders hold
the same models in other formats. Of the families of `LATER` only the last layer is kept, and the gradients are saved as
transformers saves a model of them. BlockFFN, which transformers has not, is written down here, as its paper says.
"""

import json
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

FOLDER = Path(__file__).parent / "fixtures"

COMMON = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
COMMON |= {"max_position_embeddings": 64, "num_experts_per_tok": 2}
FINE = {"intermediate_size": 20, "moe_intermediate_size": 8}
ROPE = {"rope_type": "default"}
QWEN3 = FINE | {"num_hidden_layers": 3, "mlp_only_layers": [1], "head_dim": 8, "num_experts": 6, "norm_topk_prob": True}
QWEN3 |= {"rms_norm_eps": 1e-4, "tie_word_embeddings": True, "rope_parameters": ROPE | {"rope_theta": 500.0}}
OLMOE = {"num_hidden_layers": 2, "intermediate_size": 8, "num_experts": 6, "norm_topk_prob": False}
OLMOE |= {"rope_parameters": ROPE | {"rope_theta": 10000.0}}
DEEPSEEK = FINE | {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 2}
DEEPSEEK |= {"n_group": 4, "topk_group": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
DEEPSEEK |= {"qk_nope_head_dim": 4, "v_head_dim": 4}
GLM4 = FINE | {"num_hidden_layers": 2, "first_k_dense_replace": 1, "head_dim": 8, "n_routed_experts": 6}
GLM4 |= {"routed_scaling_factor": 2.5, "use_qk_norm": True}
GPT_OSS = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "num_local_experts": 4, "head_dim": 4}
CONFIGS = {
    "mixtral": transformers.MixtralConfig(**COMMON, intermediate_size=16, num_hidden_layers=1, num_local_experts=4),
    "qwen3_moe": transformers.Qwen3MoeConfig(**COMMON, **QWEN3),
    "olmoe": transformers.OlmoeConfig(**COMMON, **OLMOE),
    "deepseek_v3": transformers.DeepseekV3Config(**COMMON, **DEEPSEEK),
    "glm4_moe": transformers.Glm4MoeConfig(**COMMON, **GLM4),
    "gpt_oss": transformers.GptOssConfig(**(COMMON | GPT_OSS)),
}
QWEN2 = FINE | {"num_hidden_layers": 2, "num_experts": 6, "shared_expert_intermediate_size": 12}
QWEN3_NEXT = {"num_hidden_layers": 4, "head_dim": 8, "linear_num_key_heads": 1, "linear_num_value_heads": 2}
QWEN3_NEXT |= {"linear_key_head_dim": 4, "linear_value_head_dim": 4}
DEEPSEEK_V2 = {key: value for key, value in DEEPSEEK.items() if "group" not in key} | {"routed_scaling_factor": 2.5}
GRANITE = {"intermediate_size": 8, "num_hidden_layers": 1, "num_local_experts": 4, "residual_multiplier": 0.22}
ERNIE = FINE | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "moe_num_experts": 6}
ERNIE |= {"vocab_size": 32, "hidden_size": 16, "moe_k": 2, "moe_num_shared_experts": 2}
MINIMAX = {"intermediate_size": 8, "num_hidden_layers": 1, "num_local_experts": 4, "head_dim": 4}
DBRX = {"vocab_size": 32, "d_model": 16, "n_heads": 4, "n_layers": 1, "max_seq_len": 64}
DBRX |= {"attn_config": {"rope_theta": 10000.0}}
DBRX |= {"ffn_config": {"ffn_hidden_size": 8, "moe_num_experts": 4, "moe_top_k": 2}}
LATER = {
    "qwen2_moe": transformers.Qwen2MoeConfig(**(COMMON | QWEN2)),
    "qwen3_next": transformers.Qwen3NextConfig(**(COMMON | QWEN2 | QWEN3_NEXT)),
    "deepseek_v2": transformers.DeepseekV2Config(**(COMMON | DEEPSEEK_V2)),
    "minimax_m2": transformers.MiniMaxM2Config(**COMMON, **MINIMAX),
    "granitemoe": transformers.GraniteMoeConfig(**COMMON, **GRANITE),
    "ernie4_5_moe": transformers.Ernie4_5_MoeConfig(**ERNIE),
    "dbrx": transformers.DbrxConfig(**DBRX),
}


def random_model(config, seed=0):
    """A model whose weights are large enough for each to matter."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if value.ndim > 1:
                inputs = value.shape[1] if "experts.gate_up_proj" in name and "Oss" in type(model).__name__ else None
                value.normal_(std=(inputs or value.shape[-1]) ** -0.5)
            elif "norm" in name:
                value.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                value.normal_(std=0.1)
            if name.endswith("gate_up_proj_bias"):
                value.mul_(60)  # so that the clamps of gpt-oss take part
    return model.eval()


def expected_of_block(model, tokens=11):
    """Tokens, output, and gradients of the last layer's block of experts."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, tokens, model.config.hidden_size, generator=generator, requires_grad=True)
    dy = torch.randn(x.shape, generator=generator)
    layer = model.transformer.blocks[-1] if hasattr(model, "transformer") else model.model.layers[-1]
    block = next(getattr(layer, name) for name in ("mlp", "block_sparse_moe", "ffn") if hasattr(layer, name))
    y = block(x)
    y = y[0] if isinstance(y, tuple) else y
    (y * dy).sum().backward()
    return {"x": x.detach(), "dy": dy, "y": y.detach(), "dx": x.grad}


def expected_of_model(model):
    """Ids, logits, loss, and gradients of a whole model."""
    model.zero_grad()
    ids = torch.randint(0, model.config.vocab_size, (2, 13), generator=torch.Generator().manual_seed(2))
    result = model(input_ids=ids, labels=ids, use_cache=False)
    result.loss.backward()
    return {"ids": ids.int(), "logits": result.logits.detach(), "loss": result.loss.detach()}


def gradients(model, prefix=""):
    """Gradient of each weight; a selection bias has none, and stands for itself."""
    found = {name: value.grad for name, value in model.named_parameters() if name.startswith(prefix)}
    found |= {name: value for name, value in model.named_buffers() if name.endswith("e_score_correction_bias")}
    return {name: value.detach().contiguous() for name, value in found.items()}


def save_tensors(folder, name, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / name, metadata={"format": "pt"})


def save_family(name, config):
    model = random_model(config)
    layer = f"model.layers.{config.num_hidden_layers - 1}.mlp."
    model.save_pretrained(FOLDER / name, max_shard_size="12KB" if name == "qwen3_moe" else "1GB")
    expected = expected_of_block(model)
    save_tensors(FOLDER / f"{name}-gradients", "model.safetensors", gradients(model, layer))
    if name in ("qwen3_moe", "olmoe"):
        expected |= expected_of_model(model)
        save_tensors(FOLDER / f"{name}-model-gradients", "model.safetensors", gradients(model))
    save_tensors(FOLDER / name, "expected.safetensors", expected)
    if name not in ("glm4_moe", "gpt_oss"):  # the first is stored as DeepSeek-V3 is
        state = {key: value for key, value in model.state_dict().items() if key.startswith(layer)}
        save_tensors(FOLDER / f"{name}-fused", "model.safetensors", state)
        random_model(config).to(torch.bfloat16).save_pretrained(FOLDER / f"{name}-bfloat16")


def save_gpt_oss_model():
    """A whole model of gpt-oss, in windows that matter, with sinks and frequencies that do."""
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64}
    rope |= {"beta_fast": 8.0, "beta_slow": 1.0, "truncate": False}
    sizes = {"num_hidden_layers": 3, "head_dim": 16, "sliding_window": 5, "rope_parameters": rope}
    model = random_model(transformers.GptOssConfig(**(COMMON | GPT_OSS | sizes)), seed=6)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("sinks"):
                value.normal_()
            if name.endswith("gate_up_proj_bias"):
                value.div_(60)
    model.save_pretrained(FOLDER / "gpt_oss-model")
    save_tensors(FOLDER / "gpt_oss-model", "expected.safetensors", expected_of_model(model))
    save_tensors(FOLDER / "gpt_oss-model-gradients", "model.safetensors", gradients(model))


def save_later(name, config):
    model = random_model(config)
    expected = expected_of_block(model)
    save_last_layer(FOLDER / name, model)
    save_tensors(FOLDER / name, "expected.safetensors", expected)
    if name == "qwen2_moe":
        layer = f"model.layers.{config.num_hidden_layers - 1}.mlp."
        state = {key: value for key, value in model.state_dict().items() if key.startswith(layer)}
        save_tensors(FOLDER / f"{name}-fused", "model.safetensors", state)
    with torch.no_grad():
        for value in model.parameters():
            if value.grad is not None:
                value.copy_(value.grad)
    save_last_layer(FOLDER / f"{name}-gradients", model)
    (FOLDER / f"{name}-gradients" / "config.json").unlink()


def save_last_layer(folder, model):
    model.save_pretrained(folder)
    last = tuple(f"{layers}.{model.config.num_hidden_layers - 1}." for layers in ("model.layers", "transformer.blocks"))
    tensors = {key: value for key, value in load_file(folder / "model.safetensors").items() if key.startswith(last)}
    save_tensors(folder, "model.safetensors", tensors)


def save_blockffn():
    """A layer of BlockFFN as arXiv 2507.08771 defines it, with a gain below zero."""
    generator, last = torch.Generator().manual_seed(5), "model.layers.0.mlp."
    shapes = {"router_proj.weight": (6, 16), "up_proj": (6 * 8, 16), "down_proj": (16, 6 * 8)}
    tensors = {key: torch.randn(shape, generator=generator) * shape[1] ** -0.5 for key, shape in shapes.items()}
    tensors["router_norm.weight"] = torch.tensor([1.0, -0.5, 2.0, 1.5, 0.75, 1.25])
    x, dy = (torch.randn(1, 11, 16, generator=generator) for _ in range(2))
    for value in (x, *tensors.values()):
        value.requires_grad_()
    scores = torch.relu(x @ tensors["router_proj.weight"].T)
    scores = scores * torch.rsqrt(scores.square().mean(-1, keepdim=True) + 1e-5) * tensors["router_norm.weight"]
    hidden = torch.nn.functional.silu(x @ tensors["up_proj"].T) * scores.repeat_interleave(8, -1)
    y = hidden @ tensors["down_proj"].T
    (y * dy).sum().backward()
    for folder, values in (
        ("minicpm", {last + key: value.detach() for key, value in tensors.items()}),
        ("minicpm-gradients", {last + key: value.grad for key, value in tensors.items()}),
    ):
        save_tensors(FOLDER / folder, "model.safetensors", values)
    expected = {"x": x.detach(), "dy": dy, "y": y.detach(), "dx": x.grad}
    save_tensors(FOLDER / "minicpm", "expected.safetensors", expected)
    config = {"model_type": "minicpm", "ffn_type": "block_linear", "hidden_act": "silu", "router_act": "relu"}
    config |= {"hidden_size": 16, "num_hidden_layers": 1, "num_experts": 6, "expert_size": 8, "rms_norm_eps": 1e-5}
    (FOLDER / "minicpm" / "config.json").write_text(json.dumps(config | {"norm_after_router": "rms"}))


def save_mxfp4():
    """The model of gpt-oss with compressed experts, and the same experts after transformers decoded them."""
    generator = torch.Generator().manual_seed(3)
    model = random_model(CONFIGS["gpt_oss"])
    compressed, plain = {}, {}
    for key, value in model.state_dict().items():
        if ".mlp." not in key:
            continue
        if not key.endswith(("gate_up_proj", "down_proj")):
            compressed[key] = plain[key] = value.to(torch.bfloat16)
            continue
        experts, inputs, outputs = value.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(119, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        compressed |= {key + "_blocks": blocks, key + "_scales": scales}
        plain[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).contiguous()
    save_tensors(FOLDER / "gpt_oss-mxfp4", "model.safetensors", compressed)
    save_tensors(FOLDER / "gpt_oss-mxfp4-decoded", "model.safetensors", plain)


def save_float8():
    """A layer of DeepSeek-V3 in float8, wider than a block, and what it computes with the numbers meant."""
    config = transformers.DeepseekV3Config(
        **(CONFIGS["deepseek_v3"].to_dict() | {"hidden_size": 136, "n_routed_experts": 4})
    )
    config.n_group, config.topk_group = 2, 1
    model = random_model(config, seed=4)
    layer = model.model.layers[-1].mlp
    compressed = {"gate.weight": layer.gate.weight.to(torch.bfloat16)}
    compressed["gate.e_score_correction_bias"] = layer.gate.e_score_correction_bias
    with torch.no_grad():
        layer.gate.weight.copy_(compressed["gate.weight"])
        matrices = {}
        for expert in range(config.n_routed_experts):
            gate, up = layer.experts.gate_up_proj[expert].chunk(2)
            for name, value in (("gate", gate), ("up", up), ("down", layer.experts.down_proj[expert])):
                matrices[f"experts.{expert}.{name}_proj.weight"] = value
        for name in ("gate", "up", "down"):
            matrices[f"shared_experts.{name}_proj.weight"] = getattr(layer.shared_experts, f"{name}_proj").weight
        for key, value in matrices.items():
            scales = torch.stack(
                [torch.stack([block.abs().max() / 448 for block in rows.split(128, 1)]) for rows in value.split(128, 0)]
            )
            spread = scales.repeat_interleave(128, 0)[: len(value)].repeat_interleave(128, 1)[:, : value.shape[1]]
            compressed[key] = (value / spread).to(torch.float8_e4m3fn)
            compressed[key.replace(".weight", ".weight_scale_inv")] = scales
            value.copy_(compressed[key].float() * spread)  # a view of the model's weights
    config.quantization_config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    folder = FOLDER / "deepseek_v3-float8"
    compressed = {"model.layers.1.mlp." + key: value.detach().contiguous() for key, value in compressed.items()}
    save_tensors(folder, "model.safetensors", compressed)
    config.to_json_file(folder / "config.json")
    expected = expected_of_block(model, tokens=3)
    save_tensors(folder, "expected.safetensors", expected)


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name, config in CONFIGS.items():
        save_family(name, config)
    for name, config in LATER.items():
        save_later(name, config)
    save_blockffn()
    save_gpt_oss_model()
    save_mxfp4()
    save_float8()
    for path in FOLDER.rglob("generation_config.json"):
        path.unlink()
    print(sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) // 1024, "KiB")
