"""Writes adapters beside the fixtures of this folder, as PEFT saves them, and what PEFT and transformers compute.

Run it with torch, transformers 5.24 and peft 0.21 on a CPU, in an environment of its own, after `make_fixtures.py`:
`python tests/blaze_jax/checkpoints/make_peft_fixtures.py`. No test runs it, and none needs these libraries.

With a folder, `python tests/blaze_jax/checkpoints/make_peft_fixtures.py FOLDER`, it writes nothing. It loads the
adapters in `FOLDER/family` into the model, and compares the output of its last layer with that in
`FOLDER/family/y.safetensors`. `python -m tests.blaze_jax.checkpoints.write_adapters FOLDER` writes both before, in the
project's environment.

A folder `family-peft` has the two files of an adapter, and in `expected.safetensors` output, gradient of the tokens and
of each of the adapter's tensors of the last layer's block, for x and dy of the family's fixture. In the folders of
`OF_MODELS` the attention has adapters, too or alone, and `expected.safetensors` has the whole model's logits for the
ids of the family's fixture.
"""

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

FIXTURES = Path(__file__).parent / "fixtures"
FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = [f"{name}_proj" for name in "qkvo"]
OF_MODELS = {
    "qwen3_moe-model-peft": ("qwen3_moe", ["mlp.gate.weight", *EXPERTS]),
    "gpt_oss-model-peft": ("gpt_oss-model", []),
}
"""Folders of adapters of whole models: the family, and what has adapters beside its attention."""


def base(family):
    return AutoModelForCausalLM.from_pretrained(FIXTURES / family, dtype=torch.float32, attn_implementation="eager")


def block_of(model, x):
    y = model.base_model.model.model.layers[-1].mlp(x)
    return y[0] if isinstance(y, tuple) else y


def adapted(folder, family, modules, parameters):
    """The model with random adapters, which are saved, and these."""
    torch.manual_seed(7)
    targets = {"target_modules": modules, "target_parameters": parameters}
    model = get_peft_model(base(family), LoraConfig(r=4, lora_alpha=6, **targets))
    own = {name: value for name, value in model.named_parameters() if "lora_" in name}
    with torch.no_grad():
        for value in own.values():
            value.normal_(std=value.shape[1] ** -0.5)
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    fields = json.loads((folder / "adapter_config.json").read_text())
    fields["base_model_name_or_path"] = None
    fields |= {name: sorted(fields[name] or []) for name in targets}
    (folder / "adapter_config.json").write_text(json.dumps(fields, indent=1))
    return model, own


def write_model(name, family, parameters):
    model, _ = adapted(FIXTURES / name, family, ATTENTION, parameters)
    with torch.no_grad():
        logits = model(input_ids=load_file(FIXTURES / family / "expected.safetensors")["ids"].long()).logits
    save_file({"logits": logits}, FIXTURES / name / "expected.safetensors")


def write(family):
    router = "mlp.router.weight" if family == "gpt_oss" else "mlp.gate.weight"
    folder = FIXTURES / f"{family}-peft"
    model, own = adapted(folder, family, [], [router, *EXPERTS])
    given = load_file(FIXTURES / family / "expected.safetensors")
    x = given["x"].requires_grad_()
    y = block_of(model, x)
    (y * given["dy"]).sum().backward()
    expected = {"y": y.detach(), "dx": x.grad}
    expected |= {name.replace(".default", ""): value.grad for name, value in own.items() if value.grad is not None}
    save_file({name: value.contiguous() for name, value in expected.items()}, folder / "expected.safetensors")


def check(family, folder):
    model = PeftModel.from_pretrained(base(family), folder / family)
    x = load_file(FIXTURES / family / "expected.safetensors")["x"]
    y = load_file(folder / family / "y.safetensors")["y"]
    with torch.no_grad():
        theirs = block_of(model, x)
        without = base(family).model.layers[-1].mlp(x)
    without = without[0] if isinstance(without, tuple) else without
    error = (theirs - y).norm() / y.norm()
    print(f"{family}: scaled error {error:.1e}; the adapters change {(theirs - without).norm() / y.norm():.1e}")
    assert error < 2e-5


if __name__ == "__main__":
    for name in FAMILIES:
        check(name, Path(sys.argv[1])) if len(sys.argv) > 1 else write(name)
    for name, of_model in {} if len(sys.argv) > 1 else OF_MODELS.items():
        write_model(name, *of_model)
