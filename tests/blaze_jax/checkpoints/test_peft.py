"""Adapters in PEFT's format: its own files compute what it computes, ours come back, and wrong ones are named."""

import json
import re
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

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


@pytest.mark.slow
@pytest.mark.parametrize("family", PEFT_FAMILIES)
@pytest.mark.ci_cases("mixtral", "gpt_oss")
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
@pytest.mark.default_cases("deepseek_v3-*")
@pytest.mark.ci_cases("*")
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


@pytest.mark.parametrize(("family", "attention_alone"), [("qwen3_moe", False), ("gpt_oss", True)])
@pytest.mark.default_cases("*")
def test_adapters_outside_of_the_layers_are_read_by_their_names_and_never_left_out_silently(
    tmp_path, family, attention_alone
):
    folder, layout = FIXTURES / f"{family}-model-peft", load(family).layout
    adapter = checkpoints.read_adapter(folder)
    assert adapter == LoRA(rank=4, alpha=6, targets=() if attention_alone else ("gate", "up", "down", "router"))
    config = replace(model(family).layer, adapter=adapter)
    with pytest.raises(checkpoints.CheckpointError, match=r"'model.layers.0.self_attn.k_proj' has an adapter, but is"):
        checkpoints.load_adapters(folder, 0, config, layout=layout)
    modules = checkpoints.load_module_adapters(folder)
    names = {f"model.layers.{layer}.self_attn.{part}_proj" for layer in range(3) for part in "qkvo"}
    assert modules.keys() == names
    with pytest.raises(checkpoints.CheckpointError, match=r"'model.layers.2.self_attn.v_proj' has an adapter, but is"):
        checkpoints.load_adapters(folder, 0, config, layout=layout, modules=names - {"model.layers.2.self_attn.v_proj"})

    numbers = () if attention_alone else (0, 2)
    layers = {n: checkpoints.load_adapters(folder, n, config, layout=layout, modules=modules) for n in numbers}
    checkpoints.save_adapters(tmp_path, layers, config, layout=layout, modules=modules)
    ours, theirs = (load_file(path / "adapter_model.safetensors") for path in (tmp_path, folder))
    assert ours.keys() == theirs.keys()
    alike = [name for name in theirs if "experts.base_layer" not in name]  # there gate and up have the same A
    assert_same_bits({name: ours[name] for name in alike}, {name: theirs[name] for name in alike})
    patterns = json.loads((tmp_path / "adapter_config.json").read_text())["rank_pattern"]
    assert len(patterns) == (not attention_alone)
    for pattern in patterns:  # peft warns of one that no module matches
        named = [n for n in (*names, "layers.0.mlp.experts.gate_up_proj") if re.match(rf"(.*\.)?({pattern})$", n)]
        assert set(named) == names
    assert checkpoints.read_adapter(tmp_path) == adapter
    assert_same_bits(checkpoints.load_module_adapters(tmp_path), modules)
    for number, adapters in layers.items():
        again = checkpoints.load_adapters(tmp_path, number, config, layout=layout, modules=modules)
        assert_same_bits(again, adapters)


def test_files_that_hold_more_than_the_layers_and_linear_modules_are_refused(tmp_path):
    folder = shutil.copytree(FIXTURES / "qwen3_moe-model-peft", tmp_path / "adapter")
    path, tensors = folder / "adapter_config.json", load_file(folder / "adapter_model.safetensors")
    fields = json.loads(path.read_text())
    q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"

    def refused(message, tensors=tensors, **changes):
        path.write_text(json.dumps(fields | changes))
        save_file(tensors, folder / "adapter_model.safetensors")
        with pytest.raises(checkpoints.CheckpointError, match=re.escape(message)):
            checkpoints.load_module_adapters(folder)

    refused("'model.layers.0.self_attn.q_proj' has rank 8, must have 4", rank_pattern={"layers.0.*q_proj": 8})
    refused("'model.layers.0.self_attn.q_proj' has alpha 3, must have 6", alpha_pattern={"layers.0.*q_proj": 3})
    refused(f"tensor '{q}B.weight' is missing", {n: t for n, t in tensors.items() if n != f"{q}B.weight"})
    refused(f"tensor '{q}A.weight' has shape (4,)", tensors | {f"{q}A.weight": np.zeros(4, np.float32)})
    embedding = "base_model.model.model.embed_tokens.lora_embedding_A"
    other = tensors | {embedding: np.zeros((4, 32), np.float32)}
    refused(f"tensor '{embedding}' is no adapter of a linear module", other)
    modules = {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in tensors}
    config = replace(model("qwen3_moe").layer, adapter=checkpoints.read_adapter(folder))
    with pytest.raises(
        checkpoints.CheckpointError, match=re.escape(f"'{embedding}' has an adapter, but is no part of")
    ):
        checkpoints.load_adapters(folder, 0, config, modules=modules)


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
    refused(
        "mlp.gate.lora_A.weight' is an adapter that LoRA(rank=4, alpha=6, targets=('gate', 'up', 'down')",
        replace(config, adapter=replace(config.adapter, targets=("gate", "up", "down"))),
    )
    refused("layout='dbrx' must be one of mixtral, by_expert", layout="dbrx")
    refused("config.adapter=None must be a LoRA", replace(config, adapter=None))
    path.write_text(json.dumps(fields | {"target_parameters": ["lm_head.weight"]}))
    with pytest.raises(checkpoints.CheckpointError, match=r"target_parameters=\['lm_head.weight'\] has none of an"):
        checkpoints.read_adapter(folder)
    with pytest.raises(ValueError, match=r"layers\[2\] lacks w_gate_lora_a, which LoRA\(rank=4"):
        checkpoints.save_adapters(tmp_path, {2: {}}, config, layout="mixtral")
    with pytest.raises(ValueError, match=r"layers=\{\} must have at least one"):
        checkpoints.save_adapters(tmp_path, {}, config, layout="mixtral")
    none = replace(config, adapter=LoRA(rank=4, targets=()))
    with pytest.raises(ValueError, match=r"modules=None must have at least one, for LoRA\(rank=4.* has no targets"):
        checkpoints.save_adapters(tmp_path, {}, none, layout="mixtral")
    for shapes in (((8, 3), (3, 8)), ((8, 4), (4, 2, 4)), ((8, 4), (8, 4))):
        with pytest.raises(
            ValueError, match=re.escape(f"modules['lm_head'] has shapes {shapes[0]} and {shapes[1]}, must")
        ):
            checkpoints.save_adapters(tmp_path, {}, none, layout="mixtral", modules={"lm_head": map(np.zeros, shapes)})
