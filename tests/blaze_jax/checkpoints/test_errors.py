"""Each error names the file and the tensor, what was found and what is allowed; nothing is placed before it.

Faults of a file's header are named when the folder is opened.
"""

import dataclasses
import json
import os

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import blaze_jax
from blaze_jax import MoEConfig, checkpoints
from blaze_jax.checkpoints import loading
from blaze_jax.checkpoints.folder import INDEX, SINGLE_FILE
from tests.blaze_jax.checkpoints.models import FIXTURES, block, copied, joined, load, model, parsed, tensors_of, write

MLP = "model.layers.1.mlp."
ROUTER, GATE, UP = "gate.weight", "experts.0.gate_proj.weight", "experts.3.up_proj.weight"


def changed(name, tmp_path, change):
    """The fixture with other tensors in the last layer's block, and without those that are None."""
    tensors = tensors_of(FIXTURES / name) | {block(name) + key: value for key, value in change.items()}
    return write(tmp_path / "model", {key: value for key, value in tensors.items() if value is not None})


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


OLMOE = [
    ({UP: None}, rf"model.safetensors: layer 1: tensor '{MLP}{UP}' is missing in the layout 'by_expert' wi"),
    ({ROUTER: None}, f"'{MLP}gate.weight' is missing"),
    ({UP: zeros(8, 9)}, rf"model.safetensors: tensor '{MLP}{UP}' has shape \(8, 9\), must have \(8, 16\)"),
    ({GATE: zeros(16, 8)}, r"has shape \(16, 8\), must have \(8, 16\)"),
    ({ROUTER: zeros(6)}, r"gate.weight' has shape \(6,\), must have \(6, width\)"),
    ({ROUTER: zeros(5, 16)}, r"gate.weight' has shape \(5, 16\), must have \(6, width\)"),
    ({UP: zeros(8, 16, dtype=np.int32)}, f"{UP}' has dtype I32, must have F32 or F16 or BF16 or F8_E4M3"),
    ({UP.replace("3", "6"): zeros(8, 16)}, "6.up_proj.weight' has no place in the .* with num_experts=6, "),
    ({"gate.e_score_correction_bias": zeros(6)}, "bias' has no place .* has_selection_bias=False"),
    ({"shared_experts.up_proj.weight": zeros(8, 16)}, "up_proj.weight' has no place .*shared_width=0"),
    (
        {"experts.gate_up_proj": zeros(6, 16, 16), "experts.down_proj": zeros(6, 16, 8)},
        f"is there in two layouts, 'by_expert' and 'fused': tensor '{MLP}experts.down_proj'",
    ),
    ({f"{UP}_scale_inv": zeros(1, 1)}, f"has dtype F32, but '{MLP}{UP}_scale_inv' holds scales of F8_E4M3"),
]
MXFP4 = [
    ({"experts.down_proj_scales": zeros(4, 32, 2, dtype=np.uint8)}, r"must have \(4, 32, 1\)"),
    ({"experts.gate_up_proj_blocks": zeros(4, 64, 1, 16, dtype=np.int8)}, "dtype I8, must have U8"),
    ({"experts.gate_up_proj": zeros(4, 32, 64)}, "two layouts, 'gpt_oss_mxfp4' and"),
]
CASES = [("olmoe", *case) for case in OLMOE] + [("gpt_oss-mxfp4", *case) for case in MXFP4]


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(("name", "change", "message"), CASES)
def test_tensors_are_checked_before_anything_is_placed(tmp_path, monkeypatch, name, change, message):
    monkeypatch.setattr(loading, "_load_kernels", None)
    monkeypatch.setattr(loading, "place", None)
    with pytest.raises(checkpoints.CheckpointError, match=message):
        load(name, changed(name, tmp_path, change))


@pytest.mark.parametrize("router", [True, False])
def test_more_experts_than_there_are_take_no_time(tmp_path, router):
    config = dataclasses.replace(model("olmoe").layer, num_experts=10**12)
    found = r"gate.weight' has shape \(6, 16\), must have \(1000000000000, width\)"
    with pytest.raises(checkpoints.CheckpointError, match=found if router else "has no router, and no tensors of 1000"):
        checkpoints.load(changed("olmoe", tmp_path, {} if router else {ROUTER: None}), 1, config)


def test_a_layer_with_and_without_prefix(tmp_path):
    tensors = tensors_of(FIXTURES / "olmoe")
    tensors["layers.1.mlp.gate.weight"] = tensors["model.layers.1.mlp.gate.weight"]
    with pytest.raises(checkpoints.CheckpointError, match=r"layer 1 is there as 'model.layers.1.' and 'layers.1.'"):
        load("olmoe", write(tmp_path, tensors))


def test_dense_and_missing_layers():
    folder = checkpoints.Folder(FIXTURES / "qwen3_moe")
    for layer, message in ((1, "has no experts: it is dense"), (3, r"has no tensors: no such layer")):
        with pytest.raises(checkpoints.CheckpointError, match=rf"index\.json: layer {layer} {message}"):
            checkpoints.load(folder, layer, model("qwen3_moe").layer)


DOWN = 'experts.3.down_proj.weight":{"dtype":"'


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (SINGLE_FILE, "[2,1]", "[1,2]", r"weight_scale_inv' has shape \(1, 2\), must have \(2, 1\)"),
        (SINGLE_FILE, "3.down_proj.weight_scale_inv", "3.down_proj.weight_scale_exp", "has no place"),
        (SINGLE_FILE, f"{DOWN}F8_E4M3", f"{DOWN}F8_E5M2", "has dtype F8_E5M2, but .* holds scales of F8_E4M3"),
        ("config.json", "[\n      128", "[\n      64", r"weight_block_size=\[64, 128\], must be \[128, 128\]"),
    ],
)
def test_float8_is_checked(tmp_path, file, old, new, message):
    folder = copied("deepseek_v3-float8", tmp_path)
    content = (folder / file).read_bytes()
    assert old.encode() in content
    (folder / file).write_bytes(content.replace(old.encode(), new.encode(), 1))
    with pytest.raises(checkpoints.CheckpointError, match=message):
        load("deepseek_v3-float8", folder)


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("value", [np.nan, -np.inf, 255])
def test_scales_are_numbers(tmp_path, value):
    name = "gpt_oss-mxfp4" if value == 255 else "deepseek_v3-float8"
    folder = copied(name, tmp_path)
    header, body = parsed((folder / SINGLE_FILE).read_bytes())
    scales = next(key for key in header if key.endswith(("down_proj_scales", "2.down_proj.weight_scale_inv")))
    last, end = np.asarray(value, np.uint8 if value == 255 else np.float32).tobytes(), header[scales]["data_offsets"][1]
    (folder / SINGLE_FILE).write_bytes(joined(header, body[: end - len(last)] + last + body[end:]))
    with pytest.raises(checkpoints.CheckpointError, match=f"{scales}' has scales that are no finite numbers"):
        load(name, folder)


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("../x.safetensors", r"names the file '\.\./x.safetensors', must be .* inside the folder"),
        ("/etc/x.safetensors", "names the file '/etc/x.safetensors'"),
        ("C:\\x.safetensors", "names the file 'C:"),
        ("a\\..\\..\\x.safetensors", "inside the folder"),
        ("pytorch_model.bin", "names the file 'pytorch_model.bin'"),
        (["model-00001-of-00004.safetensors"], "names the file"),
        ("x" * 300 + ".safetensors", f"no such file, which {INDEX} says has the tensor"),
        ("model-00009-of-00004.safetensors", "model-00009-of-00004.safetensors: no such file"),
        ("model-00001-of-00004.safetensors", "model-00001-.*: tensor '.*gate.weight' is missing, which"),
        (None, "gate.weight' is missing"),
    ],
)
def test_an_index_is_checked(tmp_path, file, message):
    folder = copied("qwen3_moe", tmp_path)
    index = json.loads((folder / INDEX).read_text())
    router = block("qwen3_moe") + ROUTER
    index["weight_map"].pop(router)
    index["weight_map"] |= {} if file is None else {router: file}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(checkpoints.CheckpointError, match=message):
        load("qwen3_moe", folder)


def test_files_that_are_not_there_matter_only_to_their_tensors(tmp_path):
    folder = copied("qwen3_moe", tmp_path)
    missing = next(path for path in sorted(folder.glob("model-*")) if b"model.layers.2.mlp.gate" in path.read_bytes())
    missing.unlink()
    opened = checkpoints.Folder(folder)
    assert checkpoints.load(opened, 0, model("qwen3_moe").layer).params
    with pytest.raises(checkpoints.CheckpointError, match=f"{missing.name}: no such file, which .* says has the ten"):
        checkpoints.load(opened, 2, model("qwen3_moe").layer)


def test_folders_without_a_checkpoint(tmp_path):
    def raises(message):
        return pytest.raises(checkpoints.CheckpointError, match=message)

    with raises("no such folder"):
        checkpoints.Folder(tmp_path / "none")
    (tmp_path / "pytorch_model.bin").touch()
    with raises(r"holds neither model.safetensors nor model.safetens.*json"):
        checkpoints.Folder(tmp_path)
    os.mkfifo(tmp_path / INDEX)
    with raises(r"index\.json: is no file"):
        checkpoints.Folder(tmp_path)
    (tmp_path / INDEX).unlink()
    for content in ("{}", '{"weight_map": ["x"]}'):
        (tmp_path / INDEX).write_text(content)
        with raises("weight_map must be an object"):
            checkpoints.Folder(tmp_path)
    (tmp_path / SINGLE_FILE).touch()
    with raises(r"which one counts\?"):
        checkpoints.Folder(tmp_path)


FIELDS = "'.*experts.2.up_proj.weight' must have a dtype, a shape, and data_offsets from one byte to another"


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (b"{", "its header is not JSON"),
        ({"__metadata__": [1]}, "__metadata__ must be an object"),
        ({"shape": [10**20, 10**20]}, "experts.2.up_proj.weight' has .* bytes, not those of F32 and shape"),
        ({"shape": [0, 16]}, "experts.2.up_proj.weight' has 512 bytes, not those of F32 and shape"),
        ({"dtype": "F31"}, "experts.2.up_proj.weight' has dtype 'F31', must have one of"),
        ({"data_offsets": [0, True]}, FIELDS),
        ({"shape": [10**9] * 100_000}, FIELDS),
        ({"data_offsets": [0, 512]}, "tensor '.*' begins at byte .*, must begin at"),
        ({"data_offsets": [2**62, 2**62 + 512]}, "tensor '.*' begins at byte"),
    ],
)
def test_a_damaged_header_is_named_when_the_folder_is_opened(tmp_path, change, message):
    folder = copied("qwen3_moe", tmp_path)
    file = next(path for path in sorted(folder.glob("*.safetensors")) if b"mlp.experts.2.up" in path.read_bytes())
    header, body = parsed(file.read_bytes())
    if change == b"{":
        header = change
    else:
        name = next(name for name in header if name in change or "experts.2.up_proj" in name)
        header[name] = change.get(name, header[name] | change)
    file.write_bytes(joined(header, body))
    with pytest.raises(checkpoints.CheckpointError, match=f"{file.name}: .*{message}"):
        checkpoints.Folder(folder)


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
