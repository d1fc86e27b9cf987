"""Logits of transformers where fields of the fixtures' config.json have other values.

`python tests/train_example/variants.py` wrote them, with torch and transformers 5 in an environment of its own.
"""

from pathlib import Path

FILE = Path(__file__).with_suffix(".safetensors")
FIXTURES = Path(__file__).parents[1] / "blaze_jax" / "checkpoints" / "fixtures"

_ROTATION = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
_COMMON = {"rms_norm_eps": 0.1, "num_experts_per_tok": 3, **_ROTATION}
VARIANTS = {
    "olmoe": _COMMON
    | {"hidden_act": "gelu", "norm_topk_prob": True}
    | {"num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen3_moe": _COMMON | {"hidden_act": "gelu_pytorch_tanh", "norm_topk_prob": False},
    "olmoe ": {"hidden_act": "relu"},
    "qwen3_moe ": {"hidden_act": "gelu", "sliding_window": 2, "max_window_layers": 1},
}
"""Changes by the family's name, with spaces for a second one."""


def write() -> None:
    import json
    import shutil
    import tempfile

    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    logits = {}
    for name, change in VARIANTS.items():
        fixture = FIXTURES / name.strip()
        with tempfile.TemporaryDirectory() as folder:
            copy = shutil.copytree(fixture, Path(folder) / "model")
            config = json.loads((copy / "config.json").read_text()) | change
            (copy / "config.json").write_text(json.dumps(config))
            model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32, attn_implementation="eager")
            with torch.no_grad():
                logits[name] = model(input_ids=load_file(fixture / "expected.safetensors")["ids"].long()).logits
    save_file(logits, FILE)


if __name__ == "__main__":
    write()
