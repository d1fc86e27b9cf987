"""Each error names the file and the tensor, what was found and what is allowed; nothing is placed before it.

Faults of a file's header are named when the folder is opened.
"""

import dataclasses
import json
import os
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import blaze_jax
from blaze_jax import MoEConfig, checkpoints
from blaze_jax.checkpoints import loading
from tests.blaze_jax.checkpoints.models import FIXTURES, block, copied, load, model, save, tensors_of, write

MLP = "model.layers.1.mlp."


def olmoe(tmp_path, change):
    """The fixture with other tensors in layer 1's block, and without those that are None."""
    tensors = tensors_of(FIXTURES / "olmoe") | {MLP + name: value for name, value in change.items()}
    return write(tmp_path / "model", {name: value for name, value in tensors.items() if value is not None})


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


ROUTER, GATE, UP = "gate.weight", "experts.0.gate_proj.weight", "experts.3.up_proj.weight"
CASES = {
    "missing": ({UP: None}, rf"model.safetensors: layer 1: tensor '{MLP}{UP}' is missing in the layout 'by_expert' wi"),
    "no router": ({ROUTER: None}, f"'{MLP}gate.weight' is missing"),
    "shape": ({UP: zeros(8, 9)}, rf"model.safetensors: tensor '{MLP}{UP}' has shape \(8, 9\), must have \(8, 16\)"),
    "turned": ({GATE: zeros(16, 8)}, r"has shape \(16, 8\), must have \(8, 16\)"),
    "rank": ({ROUTER: zeros(6)}, r"gate.weight' has shape \(6,\), must have \(6, width\)"),
    "router": ({ROUTER: zeros(5, 16)}, r"gate.weight' has shape \(5, 16\), must have \(6, width\)"),
    "dtype": ({UP: zeros(8, 16, dtype=np.int32)}, f"{UP}' has dtype I32, must have F32 or F16 or BF16 or F8_E4M3"),
    "expert": ({UP.replace("3", "6"): zeros(8, 16)}, "6.up_proj.weight' has no place in the .* with num_experts=6, "),
    "bias": ({"gate.e_score_correction_bias": zeros(6)}, "bias' has no place .* has_selection_bias=False"),
    "shared": ({"shared_experts.up_proj.weight": zeros(8, 16)}, "up_proj.weight' has no place .*shared_width=0"),
    "both": (
        {"experts.gate_up_proj": zeros(6, 16, 16), "experts.down_proj": zeros(6, 16, 8)},
        f"is there in two layouts, 'by_expert' and 'fused': tensor '{MLP}experts.down_proj'",
    ),
    "scale": ({f"{UP}_scale_inv": zeros(1, 1)}, f"has dtype F32, but '{MLP}{UP}_scale_inv' holds scales of F8_E4M3"),
    "unknown": ({"x": zeros(1)}, "has no place in the layout"),
}


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("case", CASES)
def test_tensors_are_checked_before_anything_is_placed(tmp_path, case, monkeypatch):
    change, message = CASES[case]
    monkeypatch.setattr(loading, "_load_kernels", None)
    monkeypatch.setattr(loading, "place", None)
    with pytest.raises(checkpoints.CheckpointError, match=message):
        load("olmoe", olmoe(tmp_path, change))


def test_a_layer_with_and_without_prefix(tmp_path):
    tensors = tensors_of(FIXTURES / "olmoe")
    tensors["layers.1.mlp.gate.weight"] = tensors["model.layers.1.mlp.gate.weight"]
    with pytest.raises(checkpoints.CheckpointError, match=r"layer 1 is there twice, with and without 'model.'"):
        load("olmoe", write(tmp_path, tensors))


def test_dense_and_missing_layers():
    folder = checkpoints.Folder(FIXTURES / "qwen3_moe")
    for layer, message in ((1, "has no experts: it is dense"), (3, r"has no tensors: no such layer")):
        with pytest.raises(checkpoints.CheckpointError, match=rf"index\.json: layer {layer} {message}"):
            checkpoints.load(folder, layer, model("qwen3_moe").layer)


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts.down_proj_scales": zeros(4, 32, 2, dtype=np.uint8)}, r"must have \(4, 32, 1\)"),
        ({"experts.gate_up_proj_blocks": zeros(4, 64, 1, 16, dtype=np.int8)}, "dtype I8, must have U8"),
        ({"experts.gate_up_proj": zeros(4, 32, 64)}, "two layouts, 'gpt_oss_mxfp4' and"),
    ],
)
def test_compressed_tensors_are_checked(tmp_path, change, message):
    tensors = tensors_of(FIXTURES / "gpt_oss-mxfp4") | {block("gpt_oss") + key: value for key, value in change.items()}
    with pytest.raises(checkpoints.CheckpointError, match=message):
        load("gpt_oss", write(tmp_path, tensors))


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"[2,1]", b"[1,2]", r"weight_scale_inv' has shape \(1, 2\), must have \(2, 1\)"),
        (b"3.down_proj.weight_scale_inv", b"3.down_proj.weight_scale_exp", "has no place"),
        (
            b'experts.3.down_proj.weight":{"dtype":"F8_E4M3"',
            b'experts.3.down_proj.weight":{"dtype":"F8_E5M2"',
            "has dtype F8_E5M2, but .* holds scales of F8_E4M3",
        ),
        (b"", b"", r"weight_block_size=\[64, 64\], must be \[128, 128\]"),
    ],
)
def test_float8_is_checked(tmp_path, old, new, message):
    folder = copied("deepseek_v3-float8", tmp_path)
    content = (folder / "model.safetensors").read_bytes()
    assert old in content
    (folder / "model.safetensors").write_bytes(content.replace(old, new, 1))
    if not old:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"]["weight_block_size"] = [64, 64]
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(checkpoints.CheckpointError, match=message):
        load("deepseek_v3-float8", folder)


def indexed(tmp_path, change):
    folder = copied("qwen3_moe", tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    change(folder, index)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def point_to(file):
    return lambda folder, index: index["weight_map"].update({"model.layers.2.mlp.gate.weight": file})


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (point_to("../x.safetensors"), r"names the file '\.\./x.safetensors', must be .* inside the folder"),
        (point_to("/etc/x.safetensors"), "names the file '/etc/x.safetensors'"),
        (point_to("C:\\x.safetensors"), "names the file 'C:"),
        (point_to("a\\..\\..\\x.safetensors"), "inside the folder"),
        (point_to("pytorch_model.bin"), "names the file 'pytorch_model.bin'"),
        (point_to(["model-00001-of-00004.safetensors"]), "names the file"),
        (point_to("x" * 300 + ".safetensors"), "no such file, which model.safetensors.index.json says has the tensor"),
        (point_to("model-00009-of-00004.safetensors"), "model-00009-of-00004.safetensors: no such file"),
        (point_to("model-00001-of-00004.safetensors"), "model-00001-.*: tensor '.*gate.weight' is missing, which"),
        (lambda folder, index: index.pop("weight_map"), "weight_map must be an object"),
        (lambda folder, index: index.update(weight_map=["x"]), "weight_map must be an object"),
        (lambda folder, index: index["weight_map"].pop("model.layers.2.mlp.gate.weight"), "gate.weight' is missing"),
        (lambda folder, index: (folder / "model.safetensors").touch(), "which one counts?"),
    ],
)
def test_an_index_is_checked(tmp_path, change, message):
    with pytest.raises(checkpoints.CheckpointError, match=message):
        load("qwen3_moe", indexed(tmp_path, change))


def test_folders_without_a_checkpoint(tmp_path):
    with pytest.raises(checkpoints.CheckpointError, match="no such folder"):
        checkpoints.Folder(tmp_path / "none")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(checkpoints.CheckpointError, match=r"holds neither model.safetensors nor model.safetens.*json"):
        checkpoints.Folder(tmp_path)


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": {}}, "must be a MoEConfig"),
        ({"layer": "1"}, "layer='1' must be an integer"),
        ({"dtype": jnp.int8}, "dtype=int8 must be floating"),
        ({"sharding": "tpu"}, "must be a Sharding, a mapping"),
        ({"sharding": {"w_side": None}}, "sharding names w_side, must name some of w_router"),
    ],
)
def test_arguments_are_checked(arguments, message):
    arguments = {"layer": 1, "config": model("olmoe").layer} | arguments
    with pytest.raises(ValueError, match=message):
        checkpoints.load(FIXTURES / "olmoe", **arguments)


def test_a_module_of_another_configuration_is_refused():
    def module(width=16, **options):
        config = MoEConfig(num_experts=6, experts_per_token=2, expert_width=8, **options)
        return nnx.eval_shape(lambda: blaze_jax.nnx.MoE(width, config, rngs=nnx.Rngs(0)))

    with pytest.raises(ValueError, match=r"w_router has shape \(18, 6\), must be \(16, 6\)"):
        load("olmoe").put_into(module(18))
    with pytest.raises(ValueError, match=r"the module has .*shared_w_up"):
        load("olmoe").put_into(module(shared_width=3))


def test_reading_and_writing_need_no_safetensors(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    save("olmoe", tmp_path, load("olmoe"))


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, r"gate.weight' has shape \(6, 16\), must have \(1000000000000, width\)"),
        ({ROUTER: None}, "has no router, and no tensors of 1000000000000 experts"),
        ({ROUTER: None, UP: None}, "has no router"),
    ],
)
def test_more_experts_than_there_are_take_no_time(tmp_path, change, message):
    config = dataclasses.replace(model("olmoe").layer, num_experts=10**12)
    with pytest.raises(checkpoints.CheckpointError, match=message):
        checkpoints.load(olmoe(tmp_path, change), 1, config)


def with_header(path, change):
    """The file with its header changed, by a function of the parsed header, or of its text."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length]
    header = json.dumps(change(json.loads(header))).encode() if change.__name__ != "text" else change(header)
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def at_tensor(**fields):
    def change(header):
        name = next(name for name in sorted(header, key=lambda name: str(header[name])) if "experts.2.up" in name)
        header[name] |= fields
        return header

    return change


def text(header):
    return header.replace(b'":{', b'"={', 1)


def moved(header):
    """A hole of four bytes before every tensor but those at the start."""
    for name, entry in header.items():
        if name != "__metadata__" and entry["data_offsets"][0]:
            entry["data_offsets"] = [number + 4 for number in entry["data_offsets"]]
    return header


HEADERS = {
    "text": (text, "its header is not JSON"),
    "moved": (moved, "tensor '.*' begins at byte .*, must begin at"),
    "shape": (at_tensor(shape=[10**20, 10**20]), "experts.2.up_proj.weight' has .* bytes, not those of F32 and shape"),
    "empty": (at_tensor(shape=[0, 16]), "experts.2.up_proj.weight' has 512 bytes, not those of F32 and shape"),
    "dtype": (at_tensor(dtype="F31"), "experts.2.up_proj.weight' has dtype 'F31', must have one of"),
    "fields": (at_tensor(data_offsets=[0, True]), "experts.2.up_proj.weight' must have a dtype, a shape, and"),
    "rank": (at_tensor(shape=[10**9] * 100_000), "experts.2.up_proj.weight' must have a dtype, a shape, and"),
    "offsets": (at_tensor(data_offsets=[0, 512]), "tensor '.*' begins at byte .*, must begin at"),
    "beyond": (at_tensor(data_offsets=[2**62, 2**62 + 512]), "tensor '.*' begins at byte"),
    "metadata": (lambda header: header | {"__metadata__": [1]}, "__metadata__ must be an object"),
}


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe"])
@pytest.mark.parametrize("case", HEADERS)
def test_a_damaged_header_is_named_when_the_folder_is_opened(tmp_path, family, case):
    change, message = HEADERS[case]
    folder = copied(family, tmp_path)
    file = next(path for path in sorted(folder.glob("*.safetensors")) if b"mlp.experts.2.up" in path.read_bytes())
    with_header(file, change)
    with pytest.raises(checkpoints.CheckpointError, match=f"{file.name}: .*{message}"):
        checkpoints.Folder(folder)


def test_files_that_are_not_there_matter_only_to_their_tensors(tmp_path):
    folder = copied("qwen3_moe", tmp_path)
    missing = next(path for path in sorted(folder.glob("model-*")) if b"model.layers.2.mlp.gate" in path.read_bytes())
    missing.unlink()
    opened = checkpoints.Folder(folder)
    assert checkpoints.load(opened, 0, model("qwen3_moe").layer).params
    with pytest.raises(checkpoints.CheckpointError, match=f"{missing.name}: no such file, which .* says has the ten"):
        checkpoints.load(opened, 2, model("qwen3_moe").layer)


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("value", [np.nan, -np.inf, 255])
def test_scales_are_numbers(tmp_path, value):
    name = "gpt_oss-mxfp4" if value == 255 else "deepseek_v3-float8"
    folder = copied(name, tmp_path)
    opened = checkpoints.Folder(folder)
    ends = ("down_proj_scales", "2.down_proj.weight_scale_inv")
    stored = opened[next(tensor for tensor in opened.names if tensor.endswith(ends))]
    content = (folder / "model.safetensors").read_bytes()
    last = np.asarray(value, stored.read().dtype).tobytes()
    raw = stored.raw.tobytes()
    assert content.count(raw) == 1
    (folder / "model.safetensors").write_bytes(content.replace(raw, raw[: -len(last)] + last))
    with pytest.raises(checkpoints.CheckpointError, match=f"{stored.name}' has scales that are no finite numbers"):
        load(name, folder)


def test_a_pipe_is_no_index(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    with pytest.raises(checkpoints.CheckpointError, match=r"index\.json: is no file"):
        checkpoints.Folder(tmp_path)
