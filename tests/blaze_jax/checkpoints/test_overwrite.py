"""Layers that are written into the folder of a whole model, from several writers, and by writers that are stopped."""

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from blaze_jax import checkpoints
from blaze_jax.checkpoints import saving
from blaze_jax.checkpoints.folder import INDEX, SINGLE_FILE
from tests.blaze_jax.checkpoints.models import FIXTURES, block, copied, load, model, save, tensors_of, write
from tests.numerics import assert_same_bits


def halved(layer):
    return layer._replace(params={name: value / 2 for name, value in layer.params.items()})


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    "name", ["mixtral", "qwen3_moe", "olmoe-bfloat16", "olmoe-fused", "deepseek_v3", "glm4_moe", "gpt_oss"]
)
def test_a_layer_takes_the_place_of_the_one_that_is_there(tmp_path, name):
    """In a folder of one file, and in one of several: all tensors stay, each once, but those of the layer change."""
    folder = copied(name, tmp_path)
    before = tensors_of(folder)
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
    after = tensors_of(folder)
    assert_same_bits(*({k: v for k, v in all_.items() if not k.startswith(block(name))} for all_ in (after, before)))
    assert (folder / SINGLE_FILE).exists() == (name != "qwen3_moe")
    if name == "qwen3_moe":
        index = json.loads((folder / INDEX).read_text())["weight_map"]
        assert index.keys() == before.keys()
        assert set(index.values()) == {path.name for path in files}


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("name", ["olmoe", "qwen3_moe"])
def test_who_has_opened_a_folder_reads_what_it_was(tmp_path, name):
    folder = copied(name, tmp_path)
    opened = checkpoints.Folder(folder)
    save(name, folder, halved(load(name)), overwrite=True)
    assert_same_bits(load(name, opened).params, load(name).params)


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


def test_a_model_without_head_stays_one(tmp_path):
    stored = {name.removeprefix("model."): value for name, value in tensors_of(FIXTURES / "olmoe").items()}
    folder = write(tmp_path / "model", stored)
    save("olmoe", folder, load("olmoe"), overwrite=True)
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
            tensor = saving.NewTensor(name.format(number), "F32", (5,), parts)
            return saving.write_tensors(folder, [tensor], f"layers-{number}")
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
    command = [sys.executable, "-c", program, str(tmp_path / saving.LOCK)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "has it\n"
        with saving.locked(tmp_path):
            assert other.stdout.readline() == "lets go\n"
    assert not list(tmp_path.iterdir())


class StoppedError(Exception):
    pass


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("where", ["parts", "_write_index", "_rewrite"])
def test_a_writer_that_is_stopped_leaves_the_folder_whole_and_may_try_again(tmp_path, monkeypatch, where):
    folder, layer = copied("qwen3_moe", tmp_path), halved(load("qwen3_moe"))
    before = tensors_of(folder)

    def stop(*_):
        raise StoppedError

    with monkeypatch.context() as patch:
        if where == "parts":
            patch.setattr(saving.np, "ascontiguousarray", stop)
        else:
            patch.setattr(saving, where, stop)
        with pytest.raises(StoppedError):
            save("qwen3_moe", folder, layer, overwrite=True)
    assert not list(folder.glob("*.unfinished"))
    found = load("qwen3_moe", folder)
    assert_same_bits(found.params, layer.params if where == "_rewrite" else load("qwen3_moe").params)
    save("qwen3_moe", folder, layer, overwrite=True)
    assert_same_bits(load("qwen3_moe", folder).params, layer.params)
    assert sorted(name for path in folder.glob("*.safetensors") for name in load_file(path)) == sorted(before)


def test_a_file_of_someone_else_keeps_its_name(tmp_path):
    write(tmp_path, {"mine": np.ones(2, np.float32)})
    (tmp_path / SINGLE_FILE).rename(tmp_path / "layers-00001.safetensors")
    content = (tmp_path / "layers-00001.safetensors").read_bytes()
    (path,) = save("olmoe", tmp_path, load("olmoe", dtype=jnp.bfloat16))
    assert path.name == "layers-00001-1.safetensors"
    assert (tmp_path / "layers-00001.safetensors").read_bytes() == content
