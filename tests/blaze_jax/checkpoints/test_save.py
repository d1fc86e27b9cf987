"""Layers that are written: the same tensors, bit for bit, and files that other programs read."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors import safe_open

import blaze_jax
from blaze_jax import checkpoints
from blaze_jax.checkpoints import saving
from tests.blaze_jax.checkpoints.models import FAMILIES, FIXTURES, block, load, model, save, tensors_of
from tests.numerics import assert_same_bits

WRITABLE = [f"{family}-bfloat16" for family in FAMILIES[:4]] + ["deepseek_v3-fused", "gpt_oss-mxfp4-decoded"]


def raw(folder):
    """Every tensor's type and bytes, as safetensors gives them."""
    found = {}
    for path in folder.glob("*.safetensors"):
        if path.name != "expected.safetensors":
            with safe_open(path, framework="numpy") as file:
                found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("name", WRITABLE)
def test_what_was_read_is_written_bit_for_bit(tmp_path, name):
    save(name, tmp_path, load(name))
    stored = {key: value for key, value in raw(FIXTURES / name).items() if key.startswith(block(name))}
    if name == "deepseek_v3-bfloat16":  # transformers wrote the selection bias in bfloat16, too
        bias = block(name) + "gate.e_score_correction_bias"
        stored[bias] = stored[bias].astype(np.float32)
    assert_same_bits(raw(tmp_path), stored)
    assert_same_bits(load(name, tmp_path)[:2], load(name)[:2])


def test_layers_are_added_to_a_folder(tmp_path):
    described = model("qwen3_moe")
    layers = {n: checkpoints.load(FIXTURES / "qwen3_moe", n, described.layer) for n in (0, 2)}
    for number, layer in layers.items():
        checkpoints.save(tmp_path, {number: layer}, described.layer)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"layers-00000.safetensors", "layers-00002.safetensors"}
    assert index["metadata"]["total_size"] > 0
    for number, layer in layers.items():
        assert_same_bits(checkpoints.load(tmp_path, number, described.layer).params, layer.params)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(checkpoints.CheckpointError, match=r"has the tensor 'model\.layers\.2\..*already"):
        checkpoints.save(tmp_path, {1: layers[0], 2: layers[2]}, described.layer)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_many_files(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "LARGEST_FILE", 2000)
    files = save("mixtral", tmp_path, load("mixtral"), dtype="bfloat16")
    assert len(files) > 3
    assert files[0].name.startswith("layers-00000-00001-of-")
    assert_same_bits(load("mixtral", tmp_path).params, load("mixtral", dtype="bfloat16").params)


def test_sharded_arrays_are_written(tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    sharding = {"w_up": NamedSharding(mesh, P("a", None, "b")), "w_down": NamedSharding(mesh, P(None, "b"))}
    save("olmoe", tmp_path, load("olmoe", sharding=sharding))
    stored = {name: value for name, value in tensors_of(FIXTURES / "olmoe").items() if name.startswith(block("olmoe"))}
    assert_same_bits(tensors_of(tmp_path), stored)


def test_a_module_of_nnx_is_written(tmp_path):
    described = model("deepseek_v3")
    module = blaze_jax.nnx.MoE(described.width, described.layer, rngs=nnx.Rngs(0))
    save("deepseek_v3", tmp_path, checkpoints.Layer.of(load("deepseek_v3").put_into(module)))
    assert_same_bits(load("deepseek_v3", tmp_path)[:2], load("deepseek_v3")[:2])


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "olmoe"])
def test_a_selection_bias_starts_at_zero_and_is_not_lost(tmp_path, family):
    """Fine-tuning without a balancing loss, of a model that was trained with one."""
    described = model(family)
    number = described.num_layers - 1
    config = dataclasses.replace(described.layer, bias_update_rate=1e-3)
    second = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    layer = checkpoints.load(FIXTURES / family, number, config, sharding={"selection_bias": second})
    assert_same_bits(layer.params, load(family).params)
    assert layer.selection_bias.sharding == second
    np.testing.assert_array_equal(layer.selection_bias, np.zeros(described.layer.num_experts, np.float32))
    checkpoints.save(tmp_path / "zero", {number: layer}, config)
    assert_same_bits(checkpoints.load(tmp_path / "zero", number, config)[:2], layer[:2])

    moved = layer._replace(selection_bias=layer.selection_bias + 1e-3)
    if family == "olmoe":
        checkpoints.save(tmp_path / "moved", {number: moved}, config)
        assert_same_bits(checkpoints.load(tmp_path / "moved", number, config)[:2], moved[:2])
    else:
        with pytest.raises(ValueError, match=f"'{family}' has no place for the layer's selection_bias, which is not"):
            checkpoints.save(tmp_path / "moved", {number: moved}, config)
        with pytest.raises(checkpoints.CheckpointError, match=f"'{family}' has no selection bias, and sel.*=True"):
            checkpoints.load(FIXTURES / family, number, dataclasses.replace(config, selection_bias=True))


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "onnx"}, "layout='onnx' must be one of mixtral, by_expert, fused, gpt_oss"),
        ({"layout": "gpt_oss"}, "the layout 'gpt_oss' does not fit"),
        ({"layout": "mixtral"}, "the layout 'mixtral' does not fit a layer with .*: shared_w_down"),
        ({"selection_bias": None}, "must have .*: selection_bias"),
        ({"params": {}}, "no matrix 'w_router'"),
        ({"w_up": np.zeros((2, 3))}, r"w_up has shape \(2, 3\), must be"),
        ({"w_up": np.zeros((8, 16, 8), np.int32)}, "dtype=int32 must be one of float32, float16, bfloat16"),
        ({"w_up": SimpleNamespace(shape=(8, 16, 8), is_fully_addressable=False)}, "w_up lies on devices of several"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, change, message):
    layer = load("deepseek_v3")
    params = layer.params | {name: value for name, value in change.items() if name not in layer._fields}
    fields = {"params": params} | {name: value for name, value in change.items() if name in layer._fields}
    with pytest.raises(ValueError, match=message):
        save("deepseek_v3", tmp_path / "new", layer._replace(**fields))
    assert not (tmp_path / "new").exists()
