"""Files with something wrong in them: each ends in a clear error, or holds the weights that it says it holds.

Folders with something wrong in them are written into, too: all of a layer is there afterwards, or nothing has changed.
"""

import json
import random
import shutil

import numpy as np
import pytest

from blaze_jax import checkpoints
from blaze_jax.checkpoints.folder import DTYPES
from tests.blaze_jax.checkpoints.models import FIXTURES, joined, load, model, parsed, write
from tests.numerics import assert_same_bits

FILES_OF_A_TEST = 100
BASES = ("mixtral-bfloat16", "qwen3_moe", "olmoe-fused", "gpt_oss", "gpt_oss-mxfp4", "deepseek_v3-float8")


TEXTS = (b"", b"{}", b"[]", b"null", b"{" * 1000, b"[" * 50_000, b'{"a":' * 2000, bytes(64))


def mutated(rng, content):
    """A file with something wrong in it: its size, bits of its header that have a meaning, or what its header says."""
    header, body = parsed(content)
    text, names = json.dumps(header).encode(), sorted(header.keys() - {"__metadata__"})
    one, other = rng.sample(names, 2)
    rest = {name: entry for name, entry in header.items() if name != one}
    flipped = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        flipped[rng.randrange(len(content) - len(body))] ^= 1 << rng.randrange(8)
    renamed = [one + "x", one.replace("experts", "expert"), one.replace(".0.", ".99."), "", "\0", one[:-1]]
    more = {"dtype": "F32", "shape": [1], "data_offsets": [len(body), len(body) + 4]}
    lengths = [0, 1, len(text) - 1, len(text) + 1, len(content), 2**31, 2**40, 2**63, 2**64 - 1]
    field = joined(header | {one: header[one] | rng.choice(other_fields(**header[one]))}, body)
    files = [
        content[: rng.randrange(len(content))],
        content + bytes(rng.choice([1, 8, 100])),
        bytes(flipped),
        field,
        field,
        joined(header | {one: header[other], other: header[one]}, body),
        joined(rest | {rng.choice(renamed): header[one]}, body),
        joined(rest, body),
        joined(header | {one.replace("weight", "more"): more}, body + bytes(rng.choice([0, 4, 5]))),
        joined(text.replace(json.dumps(one).encode(), json.dumps(other).encode()), body),
        joined(text, body, rng.choice(lengths)),
        joined(rng.choice([*TEXTS, text[::-1]]), body),
    ]
    return rng.choice(files)


def other_fields(dtype, shape, data_offsets):
    """Other types, shapes, and places of a tensor."""
    start, end = data_offsets
    dtypes = [*["F32", "BF16", "F16", "I8", "U8", "F64", "F8_E4M3", "F8_E5M2", "BOOL", "I64", "F4", "x"], None, 7]
    shapes = [shape[::-1], [*shape, 1], shape[1:], [-1, *shape[1:]], [0], [2**63, 2], [2**40, 2**40], "8", None, [[]]]
    places = [[start + 1, end + 1], [start, end - 1], [end, start], [0, end - start], [start, 2**62], [-8, end]]
    places += [[start], [start, end, end], None]
    fields = {"dtype": dtypes, "shape": shapes, "data_offsets": places}
    return [{name: value} for name, values in fields.items() for value in values]


def other_index(rng, content):
    """Changes names of tensors and files."""
    index = json.loads(content)
    names = index["weight_map"]
    one = rng.choice(sorted(names))
    files = ["missing.safetensors", "../model.safetensors", "/etc/passwd", "", 7, None, "model.safetensors"]
    without = {name: file for name, file in names.items() if name != one}
    changed = [without, names | {one: files[0]}, names | {one: rng.choice(files)}, names | {one + "x": names[one]}]
    index["weight_map"] = rng.choice([*changed, rng.choice([None, [], {}, "x"])])
    text = json.dumps(index).encode()
    return text[: rng.choice([None, rng.randrange(len(text))])]


def stated(folder, prefix):
    """Returns what the files say of a layer's tensors, read by the format's definition; others may be broken."""
    found = {}
    for path in folder.glob("model*.safetensors"):
        content = path.read_bytes()
        if prefix.encode() not in content:
            continue
        header, body = parsed(content)
        for name, entry in header.items():
            if name.startswith(prefix):
                start, end = entry["data_offsets"]
                found[name] = np.frombuffer(body[start:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


def messages_of(part, tmp_path, attempt):
    """Errors of attempts with files of their own, which all name their place, and "" for those that came to an end."""
    messages = []
    for seed in range(part * FILES_OF_A_TEST, (part + 1) * FILES_OF_A_TEST):
        try:
            attempt(random.Random(seed), tmp_path / str(seed))
            messages.append("")
        except checkpoints.CheckpointError as error:
            messages.append(str(error))
            assert str(tmp_path) in messages[-1]
        shutil.rmtree(tmp_path / str(seed))
    return messages


@pytest.mark.default_cases("0", "1")
@pytest.mark.parametrize("part", range(10))
def test_mutated_files(tmp_path, part):
    def attempt(rng, path):
        base = rng.choice(BASES)
        folder = shutil.copytree(FIXTURES / base, path)
        file = rng.choice(sorted(path for path in folder.glob("model*.safetensors")))
        file.write_bytes(mutated(rng, file.read_bytes()))
        layer = load(base, folder)
        clean = write(path / "clean", stated(folder, f"model.layers.{model(base).num_layers - 1}."))
        assert_same_bits(layer[:2], load(base, clean)[:2])

    assert sum(map(bool, messages_of(part, tmp_path, attempt))) > FILES_OF_A_TEST // 2


@pytest.mark.default_cases("4", "5")
@pytest.mark.parametrize("part", range(10))
def test_writing_into_mutated_folders(tmp_path, part):
    config, layer, written = model("qwen3_moe").layer, load("qwen3_moe"), tmp_path / "written"
    for number in (0, 1):
        checkpoints.save(written, {number: layer}, config)

    def attempt(rng, path):
        folder = shutil.copytree(rng.choice([written, FIXTURES / "qwen3_moe"]), path)
        file = rng.choice(sorted([*folder.glob("*.safetensors"), *folder.glob("*.index.json")] * 2))
        mutation = other_index if file.suffix == ".json" else mutated
        file.write_bytes(mutation(rng, file.read_bytes()))
        before = {path: path.read_bytes() for path in folder.iterdir()}
        number = rng.choice([0, 1, 7])
        try:
            checkpoints.save(folder, {number: layer}, config)
        except checkpoints.CheckpointError:
            assert {path: path.read_bytes() for path in folder.iterdir()} == before
            raise
        assert_same_bits(checkpoints.load(folder, number, config).params, layer.params)
        assert all(path.read_bytes() == content for path, content in before.items() if path.suffix != ".json")

    assert FILES_OF_A_TEST // 4 < sum(map(bool, messages_of(part, tmp_path, attempt))) < FILES_OF_A_TEST
