"""Generation with experts from host memory: the tokens of resident experts, whatever stays, however it is batched."""

import json
import logging
import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from blaze_jax.benchmark.plots import draw_one
from blaze_jax.benchmark.results import environment
from blaze_jax.benchmark.tables import terminal
from blaze_jax.offload.plan import make_plan
from blaze_jax.offload.store import ExpertStore
from tests.numerics import assert_close, assert_same_bits
from tests.train_example.test_generate import GREEDY, MOST, NOTHING, apart, generator, model_and_variables, prompts_of
from tests.train_example.tiny_checkpoint import write_tiny_checkpoint
from train_example.generate import offload, streaming
from train_example.generate.__main__ import main
from train_example.generate.sampling import Sampling
from train_example.generate.streaming import StreamingGenerator, in_chunks, without_experts


def streaming_generator(name="own", sampling=GREEDY, bits=None, resident=(), pass_tokens=64, chunks=1):
    model, variables = model_and_variables(name)
    rest, experts = without_experts(apart(model, variables))
    rests = []
    layers = experts if chunks == 1 else in_chunks(model, experts, chunks, rests)
    store = ExpertStore(layers, bits=bits, resident=resident)
    options = {"sampling": sampling, "stops": NOTHING, "rests": rests, "pass_tokens": pass_tokens}
    return StreamingGenerator(model, rest, store, 4, 32, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own", "qwen3_moe", "olmoe", "gpt_oss-model"])
@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.ci_cases("0.8-qwen3_moe")
def test_tokens_are_those_of_resident_experts(name, temperature, monkeypatch):
    monkeypatch.setattr(streaming, "MICRO_TOKENS", 18)
    monkeypatch.setattr(streaming, "MICRO_LENGTH", 6)  # three sequences at a time, then one; pieces of 6, 6 and 4
    sampling = Sampling(temperature)
    streamed, resident = streaming_generator(name, sampling), generator(name, sampling)
    prompts = prompts_of(resident.model)
    found = streamed.generate(prompts, MOST)
    assert found == resident.generate(prompts, MOST)
    assert_close(streamed.prefilled(prompts, MOST).logits[:3], resident.prefilled(prompts, MOST).logits[:3], 1e-5)
    for of_streamed, of_resident in zip(streamed.score(prompts), resident.score(prompts), strict=True):
        np.testing.assert_allclose(of_streamed, of_resident, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own", "qwen3_moe", "gpt_oss-model"])
@pytest.mark.ci_cases("gpt*")
def test_chunks_of_experts_make_the_layers_numbers(name):
    chunked, resident = streaming_generator(name, chunks=2), generator(name)
    prompts = prompts_of(resident.model)
    assert len(chunked.store) == 2 * len(chunked.rests)
    assert chunked.generate(prompts, MOST) == resident.generate(prompts, MOST)
    assert_close(chunked.prefilled(prompts, MOST).logits[:3], resident.prefilled(prompts, MOST).logits[:3], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 2])
def test_where_the_experts_are_changes_no_bit(chunks):
    outputs = []
    for resident in [(), (0,), (0, 1)]:
        streamed = streaming_generator(resident=resident, chunks=chunks)
        outputs.append(streamed.prefilled(prompts_of(streamed.model), MOST).logits)
    assert_same_bits(outputs[0], outputs[1])
    assert_same_bits(outputs[0], outputs[2])


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 2])
def test_later_passes_over_prompts_run_the_programs_of_the_first(chunks, caplog):
    streamed = streaming_generator(pass_tokens=12, chunks=chunks)
    prompts = prompts_of(streamed.model)
    assert max(map(len, prompts)) > 3  # tokens of a pass
    list(streamed.stream([prompt[:1] for prompt in prompts], 2))
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        jax.block_until_ready(streamed.prefilled(prompts, MOST))
    assert [message for message in caplog.messages if message.startswith("Compiling")] == []


def test_a_store_of_another_model():
    model, variables = model_and_variables("own")
    rest, experts = without_experts(apart(model, variables))
    with pytest.raises(ValueError, match="the store has 1 layers, must have the model's 2"):
        StreamingGenerator(model, rest, ExpertStore(experts[:1]), 4, 32)


def run(capsys, *options):
    assert main([str(option) for option in options]) == 0
    return capsys.readouterr()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.slow
def test_the_command_line_writes_the_same_texts(checkpoint, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("A list\nthe string\n")
    common = "--checkpoint", checkpoint, "--prompts", tmp_path / "prompts.txt", "--tokens", 4, "--temperature", 0
    run(capsys, *common, "--out", tmp_path / "resident.jsonl", "--dtype", "float32")
    told = run(capsys, *common, "--out", tmp_path / "streamed.jsonl", "--dtype", "float32", "--gpu-bytes", "40MB").err
    assert "come from" in told
    assert "tokens/s" in told
    assert (tmp_path / "streamed.jsonl").read_text() == (tmp_path / "resident.jsonl").read_text()


@pytest.mark.slow
def test_compressed_experts_write_the_texts_of_their_numbers(tmp_path, capsys):
    """Those of a file in MXFP4, kept so on the device or on the host, or decoded when they are read."""
    folder = write_tiny_checkpoint(tmp_path / "model", "gpt_oss-model", mxfp4=True)
    (tmp_path / "prompts.txt").write_text("A list\nthe string\n")
    common = "--checkpoint", folder, "--prompts", tmp_path / "prompts.txt", "--tokens", 4, "--temperature", 0
    written, plans = [], []
    for number, options in enumerate([(), ("--base", "mxfp4"), ("--base", "mxfp4", "--gpu-bytes", "40MB")]):
        out = tmp_path / f"{number}.jsonl"
        plans.append(run(capsys, *common, "--dtype", "float32", *options, "--out", out).err)
        written.append(out.read_text())
    assert written[0] == written[1] == written[2]
    assert "come from" in plans[2]


@pytest.mark.slow
def test_compressed_experts_are_timed_where_they_are_resident(checkpoint, capsys):
    options = "--time", "--checkpoint", checkpoint, "--tokens", 4, "--batch-size", 2, "--base", "float8"
    found = json.loads(run(capsys, *options).out)
    assert found["base"] == "float8"
    assert found["decode_tokens_per_second"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("form", [(), ("--expert-bits", 4), ("--base", "float8")])
def test_chunks_are_timed_in_every_form(form, checkpoint, capsys, monkeypatch):
    def in_two(*given):
        return replace(make_plan(*given), resident=(1,), chunks=2)

    monkeypatch.setattr(offload, "make_plan", in_two)
    options = "--time", "--checkpoint", checkpoint, "--tokens", 4, "--batch-size", 2, "--gpu-bytes", "24GB", *form
    found = json.loads(run(capsys, *options).out)
    layers = found["plan"]["sizes"]["layers"]
    assert (found["streamed_layers"], found["chunks"]) == (layers - 0.5, 2)
    assert f"{layers - 0.5:g}, 2 chunks each" in terminal(found)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [(), ("--expert-bits", 3), ("--base", "float8")])
def test_time_prints_the_plan_beside_what_came_out(bits, checkpoint, tmp_path, capsys):
    options = "--time", "--checkpoint", checkpoint, "--tokens", 4, "--batch-size", 2, "--gpu-bytes", "24GB", *bits
    found = json.loads(run(capsys, *options).out)
    assert found["streamed_layers"] == 0
    assert found["planned_decode_tokens_per_second"] > 0
    assert found["gpu_bytes"] == 24 * 10**9
    assert terminal(found).count("tokens/s (planned)") == 2
    draw_one({"records": [found], "environment": environment()}, tmp_path / "speed.png")
    assert found["decode_tokens_per_second"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpu-bytes", "1MB"), r"--gpu-bytes: 0\.0 GB of the GPU do not suffice"),
        (("--gpu-bytes", "many"), "many must be a size such as 24GB"),
        (("--expert-bits", "3"), "give --gpu-bytes"),
        (("--base", "nf4"), "--base nf4 has scales of 64 inputs, must divide"),
        (("--gpu-bytes", "24GB", "--expert-bits", "3", "--base", "float8"), "leave it or --base float8 out"),
        (("--gpu-bytes", "24GB", "--cache", "5"), "--tokens 256 must be at most --cache 5"),
    ],
)
@pytest.mark.ci_cases("options[01234]*")
def test_what_does_not_fit_is_one_line(options, message, checkpoint, capsys):
    assert main(["--time", "--checkpoint", str(checkpoint), *options]) == 2
    assert re.search(message, (told := capsys.readouterr().err))
    assert told.count("\n") == 1
