"""Layers that are written into the folder of a whole model, from several writers, and by writers that are stopped."""

import json
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from blaze_jax import checkpoints
from blaze_jax.checkpoints import writing
from blaze_jax.checkpoints.folder import INDEX, SINGLE_FILE
from blaze_jax.checkpoints.locked import locked
from tests.blaze_jax.checkpoints.models import FIXTURES, load, model, tensors_of, write
from tests.numerics import assert_same_bits


def copied(name, tmp_path):
    folder = shutil.copytree(FIXTURES / name, tmp_path / "model")
    (folder / "expected.safetensors").unlink(missing_ok=True)
    return folder


def halved(layer):
    return layer._replace(params={name: value / 2 for name, value in layer.params.items()})


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    "name", ["mixtral", "qwen3_moe", "olmoe-bfloat16", "olmoe-fused", "deepseek_v3", "glm4_moe", "gpt_oss"]
)
def test_a_layer_takes_the_place_of_the_one_that_is_there(tmp_path, name):
    """In a folder of one file, and in one of several: all tensors stay, each once, but those of the layer change."""
    described = model(name.partition("-")[0])
    number = described.num_layers - 1
    folder = copied(name, tmp_path)
    before = tensors_of(folder)
    layer = halved(load(name))
    files = []
    with pytest.raises(checkpoints.CheckpointError, match=r"has the tensor .* already"):
        checkpoints.save(folder, {number: layer}, described.layer)
    for _ in range(2):
        written = checkpoints.save(folder, {number: layer}, described.layer, overwrite=True)
        assert_same_bits(checkpoints.load(folder, number, described.layer)[:2], layer[:2])
        files = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
        names = [key for path in files for key in load_file(path)]
        assert sorted(names) == sorted(before)
        assert set(written) <= set(files)
        assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors"}
    after = tensors_of(folder)
    block = f"model.layers.{number}." + ("block_sparse_moe." if name == "mixtral" else "mlp.")
    assert_same_bits(*({k: v for k, v in all_.items() if not k.startswith(block)} for all_ in (after, before)))
    assert (folder / SINGLE_FILE).exists() == (name != "qwen3_moe")
    if name == "qwen3_moe":
        index = json.loads((folder / INDEX).read_text())["weight_map"]
        assert index.keys() == before.keys()
        assert set(index.values()) == {path.name for path in files}


def test_another_layout_takes_the_place_of_a_compressed_one(tmp_path):
    folder = copied("gpt_oss-mxfp4", tmp_path)
    layer = load("gpt_oss-mxfp4")
    with pytest.warns(UserWarning, match="had layers 0 compressed, and has them in full now"):
        checkpoints.save(folder, {0: layer}, model("gpt_oss").layer, overwrite=True)
    assert not any("_blocks" in name or "_scales" in name for name in checkpoints.Folder(folder).names)
    assert_same_bits(checkpoints.load(folder, 0, model("gpt_oss").layer).params, layer.params)


def test_tensors_of_types_without_numpy_stay(tmp_path):
    folder = copied("deepseek_v3-float8", tmp_path)
    described = model("deepseek_v3-float8")
    layer = load("deepseek_v3-float8")
    checkpoints.save(folder, {0: layer}, described.layer)
    assert_same_bits(load("deepseek_v3-float8")[:2], checkpoints.load(folder, 1, described.layer)[:2])
    assert_same_bits(layer[:2], checkpoints.load(folder, 0, described.layer)[:2])


def test_a_model_without_head_stays_one(tmp_path):
    stored = {name.removeprefix("model."): value for name, value in tensors_of(FIXTURES / "olmoe").items()}
    folder = write(tmp_path / "model", stored)
    checkpoints.save(folder, {1: load("olmoe")}, model("olmoe").layer, overwrite=True)
    assert_same_bits(tensors_of(folder), stored)


def test_links_of_a_cache_are_replaced_and_not_what_they_lead_to(tmp_path):
    for path in (FIXTURES / "olmoe").iterdir():
        (tmp_path / path.name).symlink_to(path)
    before = (FIXTURES / "olmoe" / SINGLE_FILE).read_bytes()
    checkpoints.save(tmp_path, {1: halved(load("olmoe"))}, model("olmoe").layer, overwrite=True)
    assert (FIXTURES / "olmoe" / SINGLE_FILE).read_bytes() == before
    assert (tmp_path / SINGLE_FILE).read_bytes() != before


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("single", [False, True])
def test_writers_at_the_same_time_lose_nothing(tmp_path, single):
    """Eight, each of which has read the folder before any other has written."""
    if single:
        write(tmp_path, {"first": np.zeros(3, np.float32)})
    together = threading.Barrier(8)

    def save(number):
        def parts():
            if not single:  # where one writes after the other
                together.wait(30)
            return [np.full(5, number, np.float32)]

        tensor = writing.NewTensor(f"layers.{number}.x", np.dtype(np.float32), (5,), parts)
        writing.write_tensors(tmp_path, [tensor], f"layers-{number}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(save, range(8)))
    opened = checkpoints.Folder(tmp_path)
    assert {f"layers.{number}.x" for number in range(8)} | ({"first"} if single else set()) == set(opened.names)
    for number in range(8):
        assert (opened[f"layers.{number}.x"].read() == number).all()
    assert {path.suffix for path in tmp_path.iterdir()} == ({".safetensors"} if single else {".json", ".safetensors"})


def test_two_writers_of_one_layer(tmp_path):
    """One writes it, the other says that it is there, though it was not when its work began."""
    together = threading.Barrier(2)

    def save(number):
        def parts():
            together.wait(30)
            return [np.full(5, number, np.float32)]

        try:
            tensor = writing.NewTensor("x", np.dtype(np.float32), (5,), parts)
            return writing.write_tensors(tmp_path, [tensor], "layers-1")
        except checkpoints.CheckpointError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(save, range(2)))
    assert sorted("has the tensor 'x' already" in str(result) for result in results) == [False, True]
    winner = 0 if isinstance(results[0], list) else 1
    assert (checkpoints.Folder(tmp_path)["x"].read() == winner).all()
    assert len(list(tmp_path.iterdir())) == 2


def test_processes_wait_for_the_lock(tmp_path):
    """A lock of another process, which has no more of this library than that module."""
    program = (
        "import runpy, sys, time; from pathlib import Path; m = runpy.run_path(sys.argv[1])\n"
        "with m['locked'](Path(sys.argv[2])): print('has it', flush=True); time.sleep(1); print('lets go', flush=True)"
    )
    command = [sys.executable, "-c", program, str(Path(writing.__file__).with_name("locked.py")), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "has it\n"
        with locked(tmp_path):
            assert other.stdout.readline() == "lets go\n"
    assert not list(tmp_path.iterdir())


class StoppedError(Exception):
    pass


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("where", ["parts", "_write_index", "_rewrite"])
def test_a_writer_that_is_stopped_leaves_the_folder_whole_and_may_try_again(tmp_path, monkeypatch, where):
    folder = copied("qwen3_moe", tmp_path)
    described = model("qwen3_moe")
    layer = halved(load("qwen3_moe"))
    before = tensors_of(folder)

    def stop(*_):
        raise StoppedError

    with monkeypatch.context() as patch:
        if where == "parts":
            patch.setattr(writing.np, "ascontiguousarray", stop)
        else:
            patch.setattr(writing, where, stop)
        with pytest.raises(StoppedError):
            checkpoints.save(folder, {2: layer}, described.layer, overwrite=True)
    assert not list(folder.glob("*.unfinished"))
    found = checkpoints.load(folder, 2, described.layer)
    assert_same_bits(found.params, layer.params if where == "_rewrite" else load("qwen3_moe").params)
    checkpoints.save(folder, {2: layer}, described.layer, overwrite=True)
    assert_same_bits(checkpoints.load(folder, 2, described.layer).params, layer.params)
    assert sorted(name for path in folder.glob("*.safetensors") for name in load_file(path)) == sorted(before)


def test_a_file_of_someone_else_keeps_its_name(tmp_path):
    described = model("olmoe")
    write(tmp_path, {"mine": np.ones(2, np.float32)})
    (tmp_path / SINGLE_FILE).rename(tmp_path / "layers-00001.safetensors")
    content = (tmp_path / "layers-00001.safetensors").read_bytes()
    (path,) = checkpoints.save(tmp_path, {1: load("olmoe", dtype=jnp.bfloat16)}, described.layer)
    assert path.name == "layers-00001-1.safetensors"
    assert (tmp_path / "layers-00001.safetensors").read_bytes() == content
