"""Whole public models: logits and gradients are transformers', and what is saved is what was read."""

import json
import shutil
import subprocess
import sys
from pydoc_data.topics import topics

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from blaze_jax.quantized import WEIGHTS
from tests.blaze_jax.checkpoints.models import FIXTURES, expected, tensors_of, write
from tests.numerics import assert_close, assert_same_bits
from tests.train_example.small import ROOT
from tests.train_example.tiny_checkpoint import write_tiny_checkpoint
from train_example.__main__ import main
from train_example.config import UserError
from train_example.program.devices import parallelism, state_shardings
from train_example.program.metrics import read_metrics
from train_example.public_models.config import public_config
from train_example.public_models.gpt_oss import decoder_class
from train_example.public_models.weights import load_params, save_model
from train_example.step import cross_entropy


def decoder(folder):
    config = public_config(folder)
    return decoder_class(config)(config, config.moe(), jnp.float32)


@pytest.mark.slow
@pytest.mark.ci_cases("qwen3_moe", "gpt_oss-model")
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "gpt_oss-model"])
def test_loss_logits_and_gradients_are_those_of_transformers(family):
    model, wanted = decoder(FIXTURES / family), expected(family)
    params = load_params(FIXTURES / family, model)

    @jax.jit
    def run(params):
        def loss(params):
            logits = model.apply({"params": params}, wanted["ids"])
            return cross_entropy(logits[:, :-1], wanted["ids"]), logits

        return jax.value_and_grad(loss, has_aux=True)(params)

    (loss, logits), gradients = run(params)
    assert_close(logits, wanted["logits"], 1e-5)
    np.testing.assert_allclose(loss, wanted["loss"], rtol=1e-5)
    assert_close(gradients, load_params(FIXTURES / f"{family.removesuffix('-model')}-model-gradients", model), 1e-4)


@pytest.mark.parametrize("name", ["olmoe", "olmoe-bfloat16", "qwen3_moe", "qwen3_moe-bfloat16", "gpt_oss-model"])
def test_what_is_saved_is_what_was_read(tmp_path, name):
    origin = shutil.copytree(FIXTURES / name, tmp_path / "origin", ignore=shutil.ignore_patterns("expected*"))
    (origin / "tokenizer.json").write_text("{}")
    (origin / "pytorch_model.bin").write_text("no weights twice")
    model = decoder(origin)
    params = load_params(origin, model)
    assert all(value.dtype == jnp.float32 for value in jax.tree.leaves(params))
    save_model(tmp_path / "saved", origin, model, params)
    assert_same_bits(tensors_of(tmp_path / "saved"), tensors_of(origin))
    assert_same_bits(load_params(tmp_path / "saved", model), params)
    assert {path.name for path in (tmp_path / "saved").iterdir() if path.suffix != ".safetensors"} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
    }
    with pytest.raises(UserError, match="saved is there already"):
        save_model(tmp_path / "saved", origin, model, params)


@pytest.mark.slow
def test_compressed_experts_are_read_bit_by_bit_and_saved_in_full(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "model", "gpt_oss-model", mxfp4=True)
    model = decoder(folder)
    kept, full = (load_params(folder, model, base=base)["moe_blocks"]["moe"] for base in ("mxfp4", None))
    stored = tensors_of(folder)["model.layers.1.mlp.experts.down_proj_blocks"]
    np.testing.assert_array_equal(kept["w_down"].values[1], stored.reshape(*stored.shape[:2], -1).swapaxes(1, 2))
    assert_same_bits({name: kept[name].astype(jnp.float32) for name in WEIGHTS}, {name: full[name] for name in WEIGHTS})
    params = load_params(folder, model)
    save_model(tmp_path / "saved", folder, model, params)
    assert_same_bits(load_params(tmp_path / "saved", model), params)
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert tensors_of(tmp_path / "saved")["model.layers.1.mlp.experts.down_proj"].dtype == jnp.bfloat16


def test_each_tensor_is_saved_under_its_name_and_in_its_own_type(tmp_path):
    """A router and an expert in float32 beside bfloat16, and a layer that has all experts in one tensor."""
    tensors, fused = tensors_of(FIXTURES / "qwen3_moe-bfloat16"), tensors_of(FIXTURES / "qwen3_moe-fused")
    for name in ("mlp.gate.weight", "mlp.experts.3.up_proj.weight"):
        tensors[f"model.layers.0.{name}"] = tensors[f"model.layers.0.{name}"].astype(np.float32)
    of_last = {name: value for name, value in fused.items() if name.startswith("model.layers.2.mlp.")}
    assert any(name.endswith("experts.gate_up_proj") for name in of_last)
    tensors = {name: value for name, value in tensors.items() if not name.startswith("model.layers.2.mlp.")} | of_last
    write(tmp_path / "origin", tensors)
    model = decoder(FIXTURES / "qwen3_moe")
    assert model.config.stacks() == {"moe_blocks": [0], "dense_blocks": [1], "moe_blocks_1": [2]}
    save_model(tmp_path / "saved", tmp_path / "origin", model, load_params(tmp_path / "origin", model))
    assert_same_bits(tensors_of(tmp_path / "saved"), tensors)


def test_parameters_are_read_to_the_devices_that_keep_them():
    model = decoder(FIXTURES / "olmoe")
    shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))["params"]
    shardings = state_shardings(parallelism({"fsdp": 2, "expert": 2}), shapes, model.moe, model.config.width)
    split = load_params(FIXTURES / "olmoe", model, shardings)
    assert_same_bits(split, load_params(FIXTURES / "olmoe", model))
    assert jax.tree.map(lambda array: array.sharding, split) == shardings
    w_up = split["moe_blocks"]["moe"]["w_up"]
    assert w_up.addressable_shards[0].data.size == w_up.size // 4


def test_tensors_that_do_not_fit(tmp_path):
    for name, value, message in (
        ("model.layers.0.self_attn.q_proj.bias", np.zeros(16, np.float32), "q_proj.bias' has no place in the model"),
        ("model.norm.weight", np.zeros(17, np.float32), r"'model.norm.weight' has shape \(17,\), must have \(16,\)"),
        ("lm_head.weight", None, "tensor 'lm_head.weight' is missing"),
    ):
        tensors = tensors_of(FIXTURES / "olmoe") | {name: value}
        write(tmp_path, {name: value for name, value in tensors.items() if value is not None})
        with pytest.raises(UserError, match=message):
            load_params(tmp_path, decoder(FIXTURES / "olmoe"))


@pytest.mark.compile_only
@pytest.mark.slow
def test_the_memory_of_a_step_is_planned_without_weights(tmp_path, capsys):
    shutil.copy(FIXTURES / "olmoe" / "config.json", tmp_path)
    arguments = ["--checkpoint", str(tmp_path), "--compile-only", "h200", "--trained", "experts"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert "4 × 64 tokens a step, trained: experts: 0.0 GB (0.0 GiB), of which" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


OPTIONS = "--steps 4 --batch-size 4 --sequence-length 16 --learning-rate 0.01 --dtype float32 --evaluate-every 2"


@pytest.mark.slow
def test_the_experts_alone_are_trained(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "model", "olmoe")
    text = tmp_path / "text"
    text.write_text(topics["lambda"] + topics["lists"])
    out = tmp_path / "out"
    arguments = ["--checkpoint", str(folder), "--data", str(text), "--out", str(out), "--trained", "experts"]
    assert main([*arguments, *OPTIONS.split()]) == 0
    before, after = tensors_of(folder), tensors_of(out / "model")
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert changed
    assert all(".mlp.experts." in name for name in changed)
    assert len(changed) > 0.9 * sum(".mlp.experts." in name for name in before)


@pytest.mark.slow
def test_the_program_runs_from_a_checkpoint_to_a_saved_file_on_one_device_and_on_a_mesh(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "model")
    out, over_mesh = tmp_path / "out", tmp_path / "over mesh"
    command = [sys.executable, "-m", "train_example", "--checkpoint", str(folder), "--out", str(out), *OPTIONS.split()]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"the model is in {out / 'model'}" in run.stdout
    records = read_metrics(out / "metrics.jsonl")
    assert [("held_out" in record) for record in records] == [False, True, False, True]
    assert (out / "sample.txt").stat().st_size > 64
    model = decoder(out / "model")
    trained, fresh = (flatten_dict(load_params(path, model)) for path in (out / "model", folder))
    assert all((trained[path] != fresh[path]).any() for path in fresh)
    mesh = ["--checkpoint", str(folder), "--out", str(over_mesh), "--mesh", "fsdp=2,expert=2"]
    assert main([*mesh, *OPTIONS.split()]) == 0
    # Both sum in other orders. Adam's first step has the gradient's sign, so where that is as small as its rounding
    # (1 of 512 elements, of 8e-9 and some 6e-8), weights part by twice the learning rate: 1.6% of a matrix's change.
    others = read_metrics(over_mesh / "metrics.jsonl")
    np.testing.assert_allclose(others[0]["gradient_norm"], records[0]["gradient_norm"], rtol=1e-5)
    np.testing.assert_allclose([o["loss"] for o in others], [one["loss"] for one in records], rtol=1e-4)
    begin, end, end_over_mesh = (tensors_of(path) for path in (folder, out / "model", over_mesh / "model"))
    change, change_over_mesh = ({name: x[name] - begin[name] for name in begin} for x in (end, end_over_mesh))
    assert_close(change_over_mesh, change, 0.05)
