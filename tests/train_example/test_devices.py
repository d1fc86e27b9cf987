"""Runs over the devices of a mesh, in one process and in two."""

import socket
import time
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from tests.train_example.small import CONFIG, decoder, metrics, start
from train_example.data import Corpus, open_text
from train_example.loop import placed
from train_example.program.devices import parallelism, state_shardings
from train_example.step import init_state

OPTIONS = ["--dtype", "float32", "--evaluate-every", "20", "--checkpoint-every", "4"]
COMPARED = 20  # steps, before rounding has grown
ON_CPU = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the devices here are virtual ones of the CPU")


def start_two(out, *options):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    several = ["--coordinator", address, "--processes", "2", "--process"]
    return [start(out, *options, *several, str(i), devices=2, alone=False) for i in range(2)]


def assert_same_training(out, other):
    for name in ("loss", "gradient_norm", "auxiliary_loss"):
        numbers, others = ([record[name] for record in metrics(folder)][:COMPARED] for folder in (out, other))
        assert len(numbers) == COMPARED
        np.testing.assert_allclose(numbers, others, rtol=1e-4)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Folder of a run on one device."""
    out = tmp_path_factory.mktemp("alone") / "run"
    process = start(out, *OPTIONS, devices=4)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return out


@ON_CPU
@pytest.mark.slow
def test_a_lost_process_ends_the_run_and_another_mesh_goes_on(alone, tmp_path):
    split = tmp_path / "split"
    first, second = start_two(split, *OPTIONS, "--mesh", "fsdp=2,expert=2")
    deadline = time.monotonic() + 300
    while len(metrics(split)) < 6:
        assert time.monotonic() < deadline
        assert first.poll() is None
        time.sleep(0.02)
    second.kill()
    _, said = first.communicate(timeout=120)
    second.communicate()
    assert first.returncode != 0
    if first.returncode == 3:  # else jax's own watch over the processes came first
        assert "train_example: this process cannot go on, perhaps another one is lost; start all again with" in said
    assert len(metrics(split)) < COMPARED

    resumed = start(split, "--resume", "--mesh", "expert=4", devices=4)
    out, said = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, said
    assert "training from step" in out
    assert_same_training(split, alone)
    assert (split / "sample.txt").exists()


@ON_CPU
@pytest.mark.slow
def test_two_processes_train_as_one(alone, tmp_path):
    split = tmp_path / "split"
    processes = start_two(split, *OPTIONS, "--mesh", "fsdp=2,tensor=2")
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "final: held-out" in outputs[0][0]
    assert "final: held-out" not in outputs[1][0]
    assert_same_training(split, alone)
    assert {int(path.name) for path in (split / "checkpoints").iterdir()} == {32, 36, 40}


def state_and_shardings(model, **mesh):
    state = jax.eval_shape(partial(init_state, CONFIG, model))
    return state, state_shardings(parallelism(mesh), state, model.moe, CONFIG.model.width)


@ON_CPU
def test_a_device_keeps_its_share_of_the_state():
    state, shardings = state_and_shardings(decoder(), fsdp=2, expert=2, tensor=2)
    shares = jax.tree.map(lambda a, s: np.prod(s.shard_shape(a.shape)) / max(a.size, 1), state, shardings)
    split = {share for share, leaf in zip(*map(jax.tree.leaves, (shares, state)), strict=True) if leaf.size > 1}
    assert split == {1 / 8}, shares


@ON_CPU
def test_no_stack_is_split_between_its_layers():
    model = decoder(replace(CONFIG.model, num_layers=8, num_dense_layers=0, dense_layers=(1,), dense_width=24))
    later = jax.tree.leaves(state_and_shardings(model, fsdp=2)[1].params["moe_blocks_1"])
    assert [sharding.spec[0] for sharding in later] == [None] * len(later)


@ON_CPU
def test_a_process_reads_what_its_devices_need():
    corpus, asked = Corpus(open_text(None), CONFIG.sequence_length), []
    starts, windows = np.arange(16), corpus.windows
    expected = windows(starts.reshape(2, 8))
    corpus.windows = lambda starts: (asked.append(starts.shape), windows(starts))[1]
    batch = placed(replace(CONFIG, accumulate=2, batch_size=16), corpus, parallelism({"data": 4}), starts)
    assert set(asked) == {(2, 2)}
    np.testing.assert_array_equal(np.asarray(batch), expected)
