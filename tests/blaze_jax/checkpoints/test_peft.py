"""Adapters in PEFT's format: its own files compute what it computes, ours come back, and wrong ones are named."""

import json
import re
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from blaze_jax import LoRA, checkpoints, moe
from tests.blaze_jax.checkpoints.models import FIXTURES, expected, load, model
from tests.blaze_jax.checkpoints.write_adapters import PEFT_FAMILIES, random_adapters
from tests.numerics import assert_close, assert_same_bits

ALL = ("gate", "up", "down", "router")


def of_peft(family):
    """The fixture's layer, its configuration with the adapters that PEFT has saved, and these."""
    folder, layer = FIXTURES / f"{family}-peft", load(family)
    config = replace(model(family).layer, adapter=checkpoints.read_adapter(folder))
    number = model(family).num_layers - 1
    return layer, config, checkpoints.load_adapters(folder, number, config, layout=layer.layout)


@pytest.mark.parametrize("family", PEFT_FAMILIES)
@pytest.mark.default_cases("mixtral", "gpt_oss")
def test_what_peft_saves_has_its_output_and_gradients(family):
    layer, config, adapters = of_peft(family)
    assert config.adapter == LoRA(rank=4, alpha=6, targets=ALL)
    given, wanted = expected(family), load_file(FIXTURES / f"{family}-peft" / "expected.safetensors")

    @jax.jit
    def run(adapters, x, dy):
        y, vjp = jax.vjp(
            lambda a, x: moe(x, layer.params | a, config, selection_bias=layer.selection_bias)[0], adapters, x
        )
        return y, *vjp(dy)

    y, d_adapters, dx = run(adapters, given["x"], given["dy"])
    assert_close((y, dx), (wanted.pop("y"), wanted.pop("dx")), 2e-5)
    d = {name: np.asarray(value, np.float64) for name, value in d_adapters.items()}
    joined = {  # gate and up are one adapter there: its A has the sum of the gradients, its B their columns
        "experts.base_layer.lora_A": d["w_gate_lora_a"] + d["w_up_lora_a"],
        "experts.base_layer.lora_B": _columns(d["w_gate_lora_b"], d["w_up_lora_b"], layer.layout == "gpt_oss"),
        "experts.lora_A": d["w_down_lora_a"],
        "experts.lora_B": d["w_down_lora_b"],
        f"{'router' if family == 'gpt_oss' else 'gate'}.lora_A": d["w_router_lora_a"][None],
        f"{'router' if family == 'gpt_oss' else 'gate'}.lora_B": d["w_router_lora_b"][None],
    }
    assert len(joined) == len(wanted)
    for name, value in joined.items():
        theirs = next(v for key, v in wanted.items() if f"mlp.{name}.weight" in key)
        rows = value.transpose(0, 2, 1).reshape(theirs.shape) if "_A" in name else value.transpose(2, 1, 0)
        assert_close(rows.reshape(theirs.shape), theirs, 2e-5)


def _columns(gate, up, alternating: bool):
    return np.stack([gate, up], -1).reshape(*gate.shape[:2], -1) if alternating else np.concatenate([gate, up], -1)


@pytest.mark.parametrize(
    ("family", "adapter"),
    [
        ("mixtral", LoRA(rank=4, targets=ALL)),
        ("gpt_oss", LoRA(rank=3, targets=ALL, alpha=1.5)),
        ("deepseek_v3", LoRA(rank=4, shared=True)),
        ("olmoe", LoRA(rank=2, targets=("up",))),
        ("qwen3_moe", LoRA(rank=2, targets=("router", "down"))),
    ],
)
@pytest.mark.default_cases("*")
def test_what_is_saved_comes_back(tmp_path, family, adapter):
    config, layout = replace(model(family).layer, adapter=adapter), load(family).layout
    layers = {number: random_adapters(config, model(family).width) for number in (0, 3)}
    layers[3] = jax.tree.map(lambda a: a.astype("bfloat16"), layers[3])
    files = checkpoints.save_adapters(tmp_path, layers, config, layout=layout, base_model="a/model")
    assert [file.name for file in files] == ["adapter_model.safetensors", "adapter_config.json"]
    for number, adapters in layers.items():
        assert_same_bits(checkpoints.load_adapters(tmp_path, number, config, layout=layout), adapters)
    read = checkpoints.read_adapter(tmp_path)
    assert (read.rank, read.alpha) == (adapter.rank, adapter.alpha)


def test_a_base_is_read_and_written_without_adapters(tmp_path):
    layer, config, adapters = of_peft("olmoe")
    number = model("olmoe").num_layers - 1
    assert_same_bits(checkpoints.load(FIXTURES / "olmoe", number, config).params, layer.params)
    both = layer._replace(params=layer.params | adapters)
    with pytest.raises(ValueError, match="the layer has adapters, w_down_lora_a: merge them first, or write them by"):
        checkpoints.save(tmp_path, {0: both}, config)
    checkpoints.save(tmp_path, {0: layer}, config)


def test_wrong_files_are_named(tmp_path):
    _, config, _ = of_peft("mixtral")
    folder = shutil.copytree(FIXTURES / "mixtral-peft", tmp_path / "adapter")
    path = folder / "adapter_config.json"
    fields = json.loads(path.read_text())

    def refused(message, config=config, layout="mixtral", layer=0, **changes):
        path.write_text(json.dumps(fields | changes))
        with pytest.raises(ValueError, match=re.escape(message)):
            checkpoints.load_adapters(folder, layer, config, layout=layout)

    refused("peft_type='IA3' must be 'LORA'", peft_type="IA3")
    refused("use_dora=True must be false or missing", use_dora=True)
    refused("r='4' must be an integer", r="4")
    refused("rank_pattern=[] must be a dict", rank_pattern=[])
    refused("the pattern '(' is none", rank_pattern={"(": 4})
    refused("has rank 3, must have 4 or 8, by LoRA(rank=4", r=3)
    refused("has alpha / rank = 8/4, must have that of LoRA(rank=4, alpha=6", lora_alpha=8)
    refused("tensor 'base_model.model.model.layers.7.mlp.experts.base_layer.lora_A.weight' is missing", layer=7)
    refused(
        "has shape (16, 16), must have (32, 16)",
        rank_pattern={".*gate_up_proj": 8},
        alpha_pattern={".*gate_up_proj": 12},
    )
    refused("each expert has an A of its own", replace(config, adapter=replace(config.adapter, shared=True)))
    refused("tensor 'base_model", replace(config, adapter=replace(config.adapter, targets=("up",))))
    refused("layout='dbrx' must be one of mixtral, by_expert", layout="dbrx")
    refused("config.adapter=None must be a LoRA", replace(config, adapter=None))
    path.write_text(json.dumps(fields | {"target_parameters": ["lm_head.weight"]}))
    with pytest.raises(checkpoints.CheckpointError, match=r"target_parameters=\['lm_head.weight'\] has none of an"):
        checkpoints.read_adapter(folder)
    with pytest.raises(ValueError, match=r"layers\[2\] lacks w_gate_lora_a, which LoRA\(rank=4"):
        checkpoints.save_adapters(tmp_path, {2: {}}, config, layout="mixtral")
    with pytest.raises(ValueError, match=r"layers=\{\} must have at least one"):
        checkpoints.save_adapters(tmp_path, {}, config, layout="mixtral")
