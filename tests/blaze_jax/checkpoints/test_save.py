"""Layers that are written: the same tensors, bit for bit, in files that other programs read.

They are also written into the folder of a whole model, by several at once, and by writers that are stopped.
"""

import dataclasses
import json
import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import blaze_jax
from blaze_jax import checkpoints
from blaze_jax.checkpoints import writing
from blaze_jax.checkpoints.folder import INDEX, SINGLE_FILE
from tests.blaze_jax.checkpoints.models import (
    FAMILIES,
    FIXTURES,
    LATER,
    block,
    copied,
    load,
    model,
    save,
    tensors_of,
    write,
)
from tests.numerics import assert_same_bits

WRITABLE = [f"{family}-bfloat16" for family in FAMILIES[:4]] + ["deepseek_v3-fused", "gpt_oss-mxfp4-decoded", *LATER]


def stored_block(name):
    return {key: value for key, value in tensors_of(FIXTURES / name).items() if key.startswith(block(name))}


def halved(layer):
    return layer._replace(params={name: value / 2 for name, value in layer.params.items()})


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("name", WRITABLE)
def test_what_was_read_is_written_bit_for_bit(tmp_path, name):
    save(name, tmp_path, load(name))
    stored = stored_block(name)
    if name == "deepseek_v3-bfloat16":  # transformers wrote the selection bias in bfloat16, too
        bias = block(name) + "gate.e_score_correction_bias"
        stored[bias] = stored[bias].astype(np.float32)
    assert_same_bits(tensors_of(tmp_path), stored)
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


def test_reading_and_writing_need_no_safetensors(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    save("olmoe", tmp_path, load("olmoe"))


def test_many_files(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "LARGEST_FILE", 2000)
    files = save("mixtral", tmp_path, load("mixtral"), dtype="bfloat16")
    assert len(files) > 3
    assert files[0].name.startswith("layers-00000-00001-of-")
    assert_same_bits(load("mixtral", tmp_path).params, load("mixtral", dtype="bfloat16").params)


def test_sharded_arrays_are_written(tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    sharding = {"w_up": NamedSharding(mesh, P("a", None, "b")), "w_down": NamedSharding(mesh, P(None, "b"))}
    save("olmoe", tmp_path, load("olmoe", sharding=sharding))
    assert_same_bits(tensors_of(tmp_path), stored_block("olmoe"))


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


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    "name", ["mixtral", "qwen3_moe", "olmoe-bfloat16", "olmoe-fused", "deepseek_v3", "glm4_moe", "gpt_oss", "dbrx"]
)
def test_a_layer_takes_the_place_of_the_one_that_is_there(tmp_path, name):
    """In a folder of one file, and in one of several: all tensors stay, each once, but those of the layer change."""
    folder = copied(name, tmp_path)
    before, opened = tensors_of(folder), checkpoints.Folder(folder)
    layer = halved(load(name))
    files = []
    with pytest.raises(checkpoints.CheckpointError, match=r"has the tensor .* already"):
        save(name, folder, layer)
    for _ in range(2):
        written = save(name, folder, layer, overwrite=True)
        assert_same_bits(load(name, folder)[:2], layer[:2])
        files = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
        names = [key for path in files for key in load_file(path)]
        assert sorted(names) == sorted(before)
        assert set(written) <= set(files)
        assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors"}
    assert_same_bits(load(name, opened).params, load(name).params)  # who has opened a folder reads what it was
    after = tensors_of(folder)
    assert_same_bits(*({k: v for k, v in all_.items() if not k.startswith(block(name))} for all_ in (after, before)))
    assert (folder / SINGLE_FILE).exists() == (name != "qwen3_moe")
    if name == "qwen3_moe":
        index = json.loads((folder / INDEX).read_text())["weight_map"]
        assert index.keys() == before.keys()
        assert set(index.values()) == {path.name for path in files}


def test_another_layout_takes_the_place_of_a_compressed_one(tmp_path):
    folder = copied("gpt_oss-mxfp4", tmp_path)
    layer = load("gpt_oss-mxfp4")
    with pytest.warns(UserWarning, match="had layers 0 compressed, and has them in full now"):
        save("gpt_oss", folder, layer, overwrite=True)
    assert not any("_blocks" in name or "_scales" in name for name in checkpoints.Folder(folder).names)
    assert_same_bits(load("gpt_oss", folder).params, layer.params)


def test_tensors_of_types_without_numpy_stay(tmp_path):
    name = "deepseek_v3-float8"
    folder, layer, config = copied(name, tmp_path), load(name), model(name).layer
    checkpoints.save(folder, {0: layer}, config)
    assert_same_bits(load(name, folder)[:2], layer[:2])
    assert_same_bits(checkpoints.load(folder, 0, config)[:2], layer[:2])


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(("family", "head"), [("olmoe", "model."), ("dbrx", "transformer.")])
def test_a_model_without_head_is_read_and_stays_one(tmp_path, family, head):
    stored = {name.removeprefix(head): value for name, value in tensors_of(FIXTURES / family).items()}
    folder = write(tmp_path / "model", stored)
    assert_same_bits(load(family, folder).params, load(family).params)
    save(family, folder, load(family), overwrite=True)
    assert_same_bits(tensors_of(folder), stored)


def test_links_of_a_cache_are_followed_and_replaced_and_not_what_they_lead_to(tmp_path):
    for path in (FIXTURES / "olmoe").iterdir():
        (tmp_path / path.name).symlink_to(path)
    assert_same_bits(load("olmoe", tmp_path).params, load("olmoe").params)
    before = (FIXTURES / "olmoe" / SINGLE_FILE).read_bytes()
    save("olmoe", tmp_path, halved(load("olmoe")), overwrite=True)
    assert (FIXTURES / "olmoe" / SINGLE_FILE).read_bytes() == before
    assert (tmp_path / SINGLE_FILE).read_bytes() != before


def at_the_same_time(writers, folder, name, *, wait=True):
    """Files or errors of writers of a tensor, each of which has read the folder before any other has written."""
    together = threading.Barrier(writers)

    def save_number(number):
        def parts():
            if wait:
                together.wait(30)
            return [np.full(5, number, np.float32)]

        try:
            tensor = writing.NewTensor(name.format(number), "F32", (5,), parts)
            return writing.write_tensors(folder, [tensor], f"layers-{number}")
        except checkpoints.CheckpointError as error:
            return str(error)

    with ThreadPoolExecutor(writers) as pool:
        return list(pool.map(save_number, range(writers)))


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("single", [False, True])
def test_writers_at_the_same_time_lose_nothing(tmp_path, single):
    if single:
        write(tmp_path, {"first": np.zeros(3, np.float32)})
    at_the_same_time(8, tmp_path, "layers.{}.x", wait=not single)  # into one file they write one after the other
    opened = checkpoints.Folder(tmp_path)
    assert {f"layers.{number}.x" for number in range(8)} | ({"first"} if single else set()) == set(opened.names)
    for number in range(8):
        assert (opened[f"layers.{number}.x"].read() == number).all()
    assert {path.suffix for path in tmp_path.iterdir()} == ({".safetensors"} if single else {".json", ".safetensors"})


def test_of_two_writers_of_one_layer_one_says_that_it_is_there(tmp_path):
    results = at_the_same_time(2, tmp_path, "x")
    assert sorted("has the tensor 'x' already" in str(result) for result in results) == [False, True]
    winner = 0 if isinstance(results[0], list) else 1
    assert (checkpoints.Folder(tmp_path)["x"].read() == winner).all()
    assert len(list(tmp_path.iterdir())) == 2


def test_processes_wait_for_the_lock(tmp_path):
    """Another process has the lock, and removes its file before it lets go, as this library does."""
    program = (
        "import fcntl, os, sys, time; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('has it', flush=True); time.sleep(1); os.unlink(sys.argv[1]); print('lets go', flush=True)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / writing.LOCK)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "has it\n"
        with writing.locked(tmp_path):
            assert other.stdout.readline() == "lets go\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("files", range(8))
def test_a_writer_that_is_stopped_leaves_the_folder_whole_and_may_try_again(tmp_path, files):
    """It writes the layer, the index, and the files without the layer, each with its folder."""
    folder, layer = copied("qwen3_moe", tmp_path), halved(load("qwen3_moe"))
    before = tensors_of(folder)
    effects = [None] * files + [KeyboardInterrupt]
    with mock.patch.object(writing.os, "fsync", side_effect=effects), pytest.raises(KeyboardInterrupt):
        save("qwen3_moe", folder, layer, overwrite=True)
    assert not list(folder.glob("*.unfinished"))
    found = load("qwen3_moe", folder)
    assert_same_bits(found.params, (layer if files >= 3 else load("qwen3_moe")).params)
    save("qwen3_moe", folder, layer, overwrite=True)
    assert_same_bits(load("qwen3_moe", folder).params, layer.params)
    assert sorted(name for path in folder.glob("*.safetensors") for name in load_file(path)) == sorted(before)


def test_a_name_is_on_the_disk_before_what_relies_on_it(tmp_path, monkeypatch):
    """New files come before the index that names them, and that before old files go: each time the folder is synced."""
    folder, done = copied("qwen3_moe", tmp_path), []
    synced, replaced, removed = writing.os.fsync, Path.replace, Path.unlink

    def note(what, change):
        return lambda *args, **options: (done.append(what(*args)), change(*args, **options))[1]

    monkeypatch.setattr(writing.os, "fsync", note(lambda file: "sync" * stat.S_ISDIR(os.fstat(file).st_mode), synced))
    monkeypatch.setattr(Path, "replace", note(lambda _, path: path.suffix, replaced))
    monkeypatch.setattr(Path, "unlink", note(lambda path: "-" * (path.suffix == ".safetensors"), removed))
    save("qwen3_moe", folder, halved(load("qwen3_moe")), overwrite=True)
    found = [what for what in done if what]
    assert found[:4] == [".safetensors", "sync", ".json", "sync"]
    assert found[4:].count(".safetensors") == found[4:].count("sync") > 0


def test_hashes_tell_which_file_is_damaged(tmp_path):
    folder = copied("qwen3_moe", tmp_path)
    path = checkpoints.write_hashes(folder)
    assert json.loads(path.read_text()).keys() == {file.name for file in folder.iterdir()} - {path.name}
    checkpoints.check_hashes(folder)
    damaged = folder / "model-00002-of-00004.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(checkpoints.CheckpointError, match=f"{damaged.name}: is not as it was when sha256.json was"):
        checkpoints.check_hashes(folder)
    damaged.unlink()
    with pytest.raises(checkpoints.CheckpointError, match=f"{damaged.name}: no such file"):
        checkpoints.check_hashes(folder)


def test_a_file_of_someone_else_keeps_its_name(tmp_path):
    write(tmp_path, {"mine": np.ones(2, np.float32)})
    (tmp_path / SINGLE_FILE).rename(tmp_path / "layers-00001.safetensors")
    content = (tmp_path / "layers-00001.safetensors").read_bytes()
    (path,) = save("olmoe", tmp_path, load("olmoe", dtype=jnp.bfloat16))
    assert path.name == "layers-00001-1.safetensors"
    assert (tmp_path / "layers-00001.safetensors").read_bytes() == content
