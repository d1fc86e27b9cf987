"""What transformers says of models that `train_example` has saved, and of config.json with other values of its fields.

Run it in two environments, for neither needs what the other has. First `python -m
tests.train_example.check_with_transformers FOLDER`, which writes token ids and the decoder's logits into the folder,
then `python tests/train_example/check_with_transformers.py FOLDER` with torch and transformers 5, which compares them.
There `python tests/train_example/check_with_transformers.py` writes the logits of `VARIANTS`. No test runs it.

With a second folder, of adapters that `train_example` has saved, of the attention, too, both put these on the model. It
takes peft, no warning of which is let pass.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

FILE = "logits.safetensors"
LOGITS_OF_VARIANTS = Path(__file__).with_name("variants.safetensors")
FIXTURES = Path(__file__).parents[1] / "blaze_jax" / "checkpoints" / "fixtures"

_ROTATION = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64}
_COMMON = {"rms_norm_eps": 0.1, "num_experts_per_tok": 3, **_ROTATION}
VARIANTS = {
    "olmoe": _COMMON
    | {"hidden_act": "gelu", "norm_topk_prob": True}
    | {"num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen3_moe": _COMMON | {"hidden_act": "gelu_pytorch_tanh", "norm_topk_prob": False},
    "olmoe ": {"hidden_act": "relu"},
    "qwen3_moe ": {"hidden_act": "gelu", "sliding_window": 2, "max_window_layers": 1},
    "gpt_oss-model": {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 3,
        "rope_parameters": _YARN | {"truncate": True, "mscale": 0.7, "mscale_all_dim": 1.1},
    },
    "gpt_oss-model ": {"rope_parameters": _YARN | {"attention_factor": 0.8, "beta_fast": 16.0, "factor": 3.0}},
    "gpt_oss-model  ": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "rms_norm_eps": 0.1},
}
"""Changes to a fixture's config.json by the family's name, with spaces for a second one."""


def write_logits(folder: Path, adapter: Path | None = None) -> None:
    """The decoder's side."""
    import numpy as np
    from safetensors.numpy import save_file

    from train_example.model import together
    from train_example.program.adapters import load_adapters
    from train_example.program.arguments import new_config
    from train_example.program.model import make_model
    from train_example.public_models.weights import load_params

    own = {} if adapter is None else {"adapter_from": str(adapter)}
    model = make_model(new_config({"checkpoint": str(folder), "dtype": "float32", **own}))
    params = load_params(folder, model)
    params = params if adapter is None else together(load_adapters(adapter, model), params)
    ids = np.random.default_rng(0).integers(0, model.config.vocabulary, (2, 33), dtype=np.int32)
    logits = model.apply({"params": params}, ids)
    save_file({"ids": ids, "logits": np.asarray(logits)}, folder / FILE)


def logits_of(folder: Path, file: Path, adapter: Path | None = None):
    """Transformers' logits of the ids in a file, and all that it has to say of the weights."""
    import warnings

    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    options = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    model, info = AutoModelForCausalLM.from_pretrained(folder, **options)
    if adapter is not None:
        from peft import PeftModel

        with warnings.catch_warnings(action="error", category=RuntimeWarning):
            model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model(input_ids=load_file(file)["ids"].long()).logits, info


def compare_logits(folder: Path, adapter: Path | None = None) -> None:
    """The side of transformers."""
    from safetensors.torch import load_file
    from transformers import PreTrainedTokenizerFast

    logits, info = logits_of(folder, folder / FILE, adapter)
    assert not any(info.values()), info
    error = (logits - load_file(folder / FILE)["logits"]).norm() / logits.norm()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    text = "It loads, and its text comes back."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    print(f"relative error of the logits {error:.1e}")
    assert error < 1e-5


def write_variants() -> None:
    """Writes transformers' logits of the fixtures where fields have other values."""
    from safetensors.torch import save_file

    logits = {}
    for name, change in VARIANTS.items():
        fixture = FIXTURES / name.strip()
        with tempfile.TemporaryDirectory() as folder:
            copy = shutil.copytree(fixture, Path(folder) / "model")
            config = json.loads((copy / "config.json").read_text()) | change
            (copy / "config.json").write_text(json.dumps(config))
            logits[name], _ = logits_of(copy, fixture / "expected.safetensors")
    save_file(logits, LOGITS_OF_VARIANTS)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        write_variants()
    else:
        (write_logits if __package__ else compare_logits)(*map(Path, sys.argv[1:]))
