"""Faults of files of tensors are named when the folder is opened; scales are numbers."""

import json
import os

import numpy as np
import pytest

from blaze_jax import checkpoints
from tests.blaze_jax.checkpoints.models import copied, load, model


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
