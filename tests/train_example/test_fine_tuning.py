"""Adapters beside the frozen base of a whole model: what they compute, what is trained, and what is written."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file

from blaze_jax import LoRA, checkpoints
from blaze_jax.adapters import is_adapter
from blaze_jax.quantized import decoded, is_quantized, quantize
from tests.blaze_jax.checkpoints.models import FIXTURES, expected, tensors_of
from tests.numerics import assert_close, assert_same_bits
from tests.train_example.small import windows
from tests.train_example.tiny_checkpoint import write_tiny_checkpoint
from train_example.__main__ import main
from train_example.config import UserError
from train_example.generate.__main__ import main as generate
from train_example.model import Decoder, adapters_of, together
from train_example.program.adapters import load_adapters, parse_adapter
from train_example.program.arguments import new_config
from train_example.program.metrics import read_metrics
from train_example.program.model import first_state, make_model
from train_example.public_models.adapted import ADAPTED, AdaptedProjection
from train_example.public_models.config import public_config
from train_example.public_models.gpt_oss import decoder_class
from train_example.public_models.weights import load_params, params_like, random_params, save_model
from train_example.step import cross_entropy, cross_entropy_in_parts, init_state, make_train_step

OPTIONS = "--batch-size 4 --sequence-length 16 --learning-rate 0.01 --evaluate-every 2 --checkpoint-every 2"


def drawn(tree, seed=0):
    """Numbers of that tree's shapes, so that no adapter is zero."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape) / 4, a.dtype), tree)


@pytest.mark.slow
@pytest.mark.parametrize(("base", "tolerance"), [(None, 1e-5), ("float8", 2e-2)])
@pytest.mark.parametrize(("family", "shared"), [("qwen3_moe", True), ("olmoe", False), ("gpt_oss-model", True)])
@pytest.mark.ci_cases("qwen3_moe-True-float8-0.02")
def test_a_model_with_adapters_computes_as_the_merged_one_that_is_saved(tmp_path, family, shared, base, tolerance):
    config, ids = public_config(FIXTURES / family), expected(family)["ids"]
    targets = ("gate", "up", "down", "router")
    moe = config.moe(adapter=LoRA(rank=2, alpha=1, targets=targets, shared=shared), implementation="xla")
    projection = partial(AdaptedProjection, adapter=moe.adapter, adapted=tuple(ADAPTED.values()))
    model, plain = (
        decoder_class(config)(config, moe, jnp.float32, projection=projection),
        decoder_class(config)(config, config.moe(), jnp.float32),
    )
    dtype = jnp.float32 if base is None else jnp.bfloat16
    frozen = load_params(FIXTURES / family, model, dtype=dtype, base=base)
    assert is_quantized(frozen["moe_blocks"]["moe"]["w_up"]) == (base is not None)
    variables = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), ids))
    params = together(drawn(adapters_of(variables["params"])), frozen)
    save_model(tmp_path / "merged", FIXTURES / family, model, params)
    logits = jax.jit(model.apply)({"params": params}, ids)
    merged = load_params(tmp_path / "merged", plain)
    assert_close(logits, jax.jit(plain.apply)({"params": merged}, ids), tolerance)
    before = jax.jit(plain.apply)({"params": load_params(FIXTURES / family, plain)}, ids)
    assert np.abs(logits - before).max() > 0.1 * np.abs(before).max()


@pytest.mark.slow
@pytest.mark.parametrize("base", ["bf16", "float8", "mxfp4", "nf4"])
@pytest.mark.ci_cases("nf4")
def test_a_step_trains_adapters_alone(base):
    """And its loss and gradients, in parts and with recomputation, are those of decoded weights without either."""
    config = new_config({"preset": "tiny", "adapter": "rank=4,targets=gate+down,shared", "base": base})
    sizes = replace(config.model, width=64, num_layers=2, num_experts=4, experts_per_token=2, vocabulary=300)
    config = replace(config, model=sizes, batch_size=2, sequence_length=16, dtype="float32", learning_rate=0.1)
    model = make_model(config)
    state = first_state(config, model, None)
    state = state._replace(params=drawn(state.params))
    layers, (d, n, experts) = config.model.num_layers, (64, 64, 4)
    trained = layers * 4 * (d + experts * n + n + experts * d)
    assert sum(leaf.size for leaf in jax.tree.leaves(state.params)) == trained
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer_state) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * trained
    assert is_quantized(state.frozen["moe_blocks"]["moe"]["w_down"]) == (base != "bf16")

    batch = windows(1, 2, 17)
    after, metrics = jax.jit(make_train_step(config, model))(state, batch)
    assert_same_bits(after.frozen, state.frozen)
    assert all(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (after.params, state.params)), strict=True))

    @jax.jit
    def reference(params, frozen):
        params = together(params, decoded(frozen, jnp.float32))
        logits, sown = model.clone(remat="none").apply({"params": params}, batch[0, :, :-1], mutable=["losses"])
        loss = cross_entropy(logits, batch[0])
        return loss + sum(leaf.sum() for leaf in jax.tree.leaves(sown)), loss

    gradients, loss = jax.grad(reference, has_aux=True)(state.params, state.frozen)
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
    norm = np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(gradients)))
    np.testing.assert_allclose(metrics.gradient_norm, norm, rtol=1e-4)


def test_the_loss_in_parts_is_the_loss(monkeypatch):
    rng, windows = np.random.default_rng(0), np.random.default_rng(1).integers(0, 50, (2, 7))
    hidden, head = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 6, 8), (8, 50)))
    monkeypatch.setattr("train_example.step._LOGITS", 150)  # three tokens at a time
    in_parts = jax.value_and_grad(cross_entropy_in_parts)(hidden, head, windows)
    assert "f32[12,50]" not in str(jax.make_jaxpr(jax.grad(cross_entropy_in_parts))(hidden, head, windows))
    whole = jax.value_and_grad(lambda hidden: cross_entropy(hidden @ head, windows))(hidden)
    assert_close(in_parts, whole, 1e-5)


@pytest.mark.slow
def test_adapters_of_attention_begin_as_nothing_and_have_the_gradients_of_their_definition():
    """That is, of a model whose projections are `W + scale · A · B`; dense layers' attention has them, too."""
    config = public_config(FIXTURES / "qwen3_moe")
    adapter, adapted = parse_adapter("rank=2,alpha=3,targets=gate+q+k+v+o")
    assert adapter.targets == ("gate",)
    projection = partial(AdaptedProjection, adapter=adapter, adapted=adapted)
    model = Decoder(config, config.moe(adapter=adapter, implementation="xla"), jnp.float32, projection=projection)
    plain = model.clone(projection=nn.DenseGeneral)
    ids = expected("qwen3_moe")["ids"]
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), ids))["params"]
    assert_same_bits(*(jax.jit(m.apply)({"params": params}, ids) for m in (model, plain)))

    base = unflatten_dict({path: leaf for path, leaf in flatten_dict(params).items() if not is_adapter(path[-1])})
    adapters = drawn(adapters_of(params))
    of_attention = [path for path in flatten_dict(adapters) if path[1] == "attention"]
    assert len(of_attention) == 2 * 4 * len(config.stacks())

    def of_definition(adapters):
        flat = flatten_dict(together(adapters, base))
        for path in (path for path in of_attention if path[-1].endswith("_a")):
            kernel = (*path[:3], "kernel")
            b = adapters[path[0]]["attention"][path[2]]["kernel_lora_b"]
            change = 1.5 * jnp.einsum("lir,lro->lio", flat[path], b, precision="highest")
            flat[kernel] = flat[kernel] + change.reshape(flat[kernel].shape)
        return plain.apply({"params": unflatten_dict(flat)}, ids)

    weights = jnp.asarray(np.random.default_rng(1).standard_normal((*ids.shape, config.vocabulary)), jnp.float32)
    ours = jax.jit(jax.grad(lambda own: jnp.sum(weights * model.apply({"params": together(own, base)}, ids))))(adapters)
    theirs = jax.jit(jax.grad(lambda own: jnp.sum(weights * of_definition(own))))(adapters)
    assert_close(ours, theirs, 1e-4)


@pytest.mark.parametrize("family", ["gpt_oss-model", "qwen3_moe"])
def test_a_model_with_what_peft_has_trained_computes_what_peft_computes(family):
    """Of all of Qwen3-MoE's blocks, and of gpt-oss' attention alone; `make_peft_fixtures.py` has made them."""
    folder = FIXTURES / f"{family.removesuffix('-model')}-model-peft"
    options = {"checkpoint": str(FIXTURES / family), "adapter_from": str(folder), "dtype": "float32"}
    model = make_model(new_config(options))
    adapters = load_adapters(folder, model)
    params = together(adapters, load_params(FIXTURES / family, model))
    ids = expected(family)["ids"]
    logits = jax.jit(model.apply)({"params": params}, ids)
    assert_close(logits, load_file(folder / "expected.safetensors")["logits"], 1e-5)
    like = jax.eval_shape(partial(init_state, new_config(options), model)).params
    assert jax.tree.map(jnp.shape, adapters) == jax.tree.map(jnp.shape, like)


def test_an_adapter_of_what_the_model_has_not_is_named(tmp_path):
    folder = shutil.copytree(FIXTURES / "gpt_oss-model-peft", tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    config = new_config({"checkpoint": str(FIXTURES / "gpt_oss-model"), "adapter_from": str(folder)})
    model = make_model(config)
    start = "base_model.model.model.layers."

    def refused(message, changed):
        save_file(changed, folder / "adapter_model.safetensors")
        with pytest.raises(UserError, match=re.escape(message)):
            load_adapters(folder, model)

    fourth = {name.replace("layers.2.", "layers.3."): tensor for name, tensor in tensors.items()}
    refused("model.layers.3.self_attn.k_proj has an adapter, which has no place in the model", tensors | fourth)
    without = {name: tensor for name, tensor in tensors.items() if "2.self_attn.k_proj" not in name}
    refused("layer 2: attention.key.kernel_lora_a is missing, must be of shape (32, 4)", without)
    narrow = {f"{start}0.self_attn.q_proj.lora_A.weight": np.zeros((4, 8), np.float32)}
    wrong = "layer 0: attention.query.kernel_lora_a is of shape (8, 4), must be of shape (32, 4)"
    refused(wrong, tensors | narrow)
    head = {f"base_model.model.lm_head.lora_{end}.weight": np.zeros((4, 4), np.float32) for end in "AB"}
    refused("lm_head has an adapter, which has no place in the model", tensors | head)
    save_file(head, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match="has lm_head, must have some of gate, up, down, router, q, k, v, o"):
        new_config({"checkpoint": str(FIXTURES / "gpt_oss-model"), "adapter_from": str(folder)})
    router = {f"{start}7.mlp.router.lora_{end}.weight": np.zeros((4, 4), np.float32) for end in "AB"}
    refused("model.layers.7.mlp has an adapter, which has no place in the model", tensors | router)
    router = {name.replace("7", "1"): tensor for name, tensor in router.items()}
    refused(
        "layers.1.mlp.router.lora_A.weight' is an adapter that LoRA(rank=4, alpha=6.0, targets=()", tensors | router
    )
    other = make_model(replace(config, adapter="rank=4,alpha=8,targets=q+k+v+o"))
    with pytest.raises(UserError, match=r"rank=4 and alpha=6 must be --adapter's 4 and 8.0"):
        load_adapters(folder, other)
    other = make_model(replace(config, adapter="rank=4,alpha=6,targets=q+k+v"))
    shutil.copy(FIXTURES / "gpt_oss-model-peft" / "adapter_model.safetensors", folder)
    with pytest.raises(UserError, match=r"layer 0: attention.out.kernel_lora_a is of shape .64, 4., must be missing"):
        load_adapters(folder, other)


@pytest.mark.slow
def test_a_run_of_attention_alone_goes_on_from_its_file_and_generates_with_it(tmp_path, capsys):
    folder = write_tiny_checkpoint(tmp_path / "model")
    given = ["--checkpoint", str(folder), *OPTIONS.split(), "--steps", "2"]
    first, second = tmp_path / "first", tmp_path / "second"
    assert main([*given, "--adapter", "rank=2,targets=q+k+v+o", "--base", "float8", "--out", str(first)]) == 0
    fields = json.loads((first / "adapter" / "adapter_config.json").read_text())
    assert (fields["r"], fields["target_parameters"]) == (2, [])
    written = load_file(first / "adapter" / "adapter_model.safetensors")
    assert len(written) == 2 * 4 * 3
    assert all(np.any(tensor) for tensor in written.values())
    assert main([*given, "--adapter-from", str(first / "adapter"), "--out", str(second), "--merge"]) == 0
    (first / "adapter").rename(first / "moved")  # a run that has begun needs it no more
    assert main(["--resume", "--out", str(second), "--steps", "4"]) == 0
    losses = [read_metrics(out / "metrics.jsonl")[0]["loss"] for out in (first, second)]
    assert losses[1] < losses[0]
    after = load_file(second / "adapter" / "adapter_model.safetensors")
    assert after.keys() == written.keys()

    capsys.readouterr()
    said = []
    adapted = ["--checkpoint", str(folder), "--adapter-from", str(second / "adapter")]
    for source in (["--run", str(second)], adapted):
        assert generate([*source, "--prompt", "lists", "--tokens", "8", "--temperature", "0"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert said[0].startswith("lists")
    assert generate(["--run", str(first), *adapted[2:], "--prompt", "lists"]) == 2
    assert "--adapter-from is put on a public model: give --checkpoint FOLDER" in capsys.readouterr().err
    assert generate([*adapted, "--prompt", "lists", "--gpu-bytes", "1GB"]) == 2
    assert "--adapter-from needs all experts on the device: leave --gpu-bytes out" in capsys.readouterr().err


@pytest.mark.slow
def test_the_program_resumes_bit_by_bit_and_writes_adapters_and_a_merged_model(tmp_path, capsys):
    folder = write_tiny_checkpoint(tmp_path / "model")
    given = ["--checkpoint", str(folder), *OPTIONS.split(), "--schedule-steps", "4"]
    given += ["--adapter", "rank=2,alpha=4,targets=gate+up+router+q+o", "--base", "float8", "--merge"]
    given += ["--base-attention", "float8", "--optimizer", "adam8"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*given, "--out", str(whole), "--steps", "4"]) == 0
    said = capsys.readouterr().out
    assert "beside a base in float8\n" in said
    assert f"the adapters are in {whole / 'adapter'}, in PEFT's format" in said
    assert main([*given, "--out", str(parts), "--steps", "2"]) == 0
    assert main(["--resume", "--out", str(parts), "--steps", "4"]) == 0
    for file in ("adapter/adapter_model.safetensors", "adapter/adapter_config.json", "model/layer-00002.safetensors"):
        assert (whole / file).read_bytes() == (parts / file).read_bytes()
    losses = [[record["loss"] for record in read_metrics(out / "metrics.jsonl")] for out in (whole, parts)]
    assert losses[0] == losses[1]

    adapter = checkpoints.read_adapter(whole / "adapter")
    assert (adapter.rank, adapter.alpha, adapter.targets) == (2, 4, ("gate", "up", "router"))
    assert json.loads((whole / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)
    moe = public_config(folder).moe(adapter=adapter)
    plain = replace(moe, adapter=None)
    modules = checkpoints.load_module_adapters(whole / "adapter")
    for layer in (0, 2):  # the model's layers of experts
        read = checkpoints.load_adapters(whole / "adapter", layer, moe, modules=modules)
        base = checkpoints.load(folder, layer, plain, base="float8").params
        merged = checkpoints.load(whole / "model", layer, plain).params["w_up"]
        change = moe.adapter.scale * np.matmul(read["w_up_lora_a"], read["w_up_lora_b"])
        assert np.any(change)
        assert_close(merged, base["w_up"].astype(jnp.float32) + change, 1e-2)
    before, after = tensors_of(folder), tensors_of(whole / "model")
    fields = json.loads((whole / "adapter" / "adapter_config.json").read_text())
    assert fields["target_modules"] == ["o_proj", "q_proj"]
    written = load_file(whole / "adapter" / "adapter_model.safetensors")
    for name in (f"model.layers.{layer}.self_attn.{part}_proj" for layer in range(3) for part in "qo"):
        a, b = (written[f"base_model.model.{name}.lora_{end}.weight"] for end in "AB")
        assert np.any(b)
        kept = quantize(jnp.asarray(before[f"{name}.weight"], jnp.bfloat16).T, "float8").astype(jnp.float32).T
        assert_close(after[f"{name}.weight"], kept + moe.adapter.scale * b @ a, 1e-2)
    assert before.keys() == after.keys()
    assert "model.layers.1.mlp.up_proj.weight" in before
    others = [name for name in before if "layernorm" in name]
    assert_same_bits({name: after[name] for name in others}, {name: before[name] for name in others})

    capsys.readouterr()
    assert generate(["--run", str(whole), "--prompt", "lists", "--tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("lists")


@pytest.mark.slow
def test_adam8_trains_all_parameters_of_a_public_model_and_resumes_bit_by_bit(tmp_path, capsys):
    folder = write_tiny_checkpoint(tmp_path / "model")
    given = ["--checkpoint", str(folder), *OPTIONS.split(), "--schedule-steps", "4", "--optimizer", "adam8"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*given, "--out", str(whole), "--steps", "4"]) == 0
    assert main([*given, "--out", str(parts), "--steps", "2"]) == 0
    assert main(["--resume", "--out", str(parts), "--steps", "4"]) == 0
    losses = [record["loss"] for record in read_metrics(whole / "metrics.jsonl")]
    assert losses[-1] < losses[0]
    before, after, resumed = (tensors_of(of) for of in (folder, whole / "model", parts / "model"))
    assert_same_bits(after, resumed)
    assert before.keys() == after.keys()
    unchanged = [name for name in before if np.array_equal(after[name], before[name].astype(jnp.bfloat16))]
    assert not unchanged
    capsys.readouterr()
    said = []
    for source in (["--run", str(whole)], ["--checkpoint", str(whole / "model")]):
        assert generate([*source, "--prompt", "lists", "--tokens", "4", "--temperature", "0"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert said[0].startswith("lists")


@pytest.mark.slow
def test_gpt_oss_trains_on_its_compressed_files_and_is_saved_in_full(tmp_path, capsys):
    folder = write_tiny_checkpoint(tmp_path / "model", "gpt_oss-model", mxfp4=True)
    given = ["--checkpoint", str(folder), *OPTIONS.split(), "--adapter", "rank=2,shared", "--base", "mxfp4", "--merge"]
    out = tmp_path / "out"
    assert main([*given, "--steps", "4", "--out", str(out)]) == 0
    losses = [record["loss"] for record in read_metrics(out / "metrics.jsonl")]
    assert losses[-1] < losses[0]
    moe = public_config(folder).moe(adapter=replace(checkpoints.read_adapter(out / "adapter"), shared=True))
    read = checkpoints.load_adapters(out / "adapter", 2, moe, layout="gpt_oss")
    options = {"checkpoint": str(folder), "adapter": "rank=2,shared", "adapter_from": str(out / "adapter")}
    again = load_adapters(out / "adapter", make_model(new_config(options)))["moe_blocks"]["moe"]
    assert_same_bits({name: again[name][2] for name in read}, read)
    plain = replace(moe, adapter=None)
    base, merged = (checkpoints.load(path, 2, plain).params["w_up"] for path in (folder, out / "model"))
    change = moe.adapter.scale * np.matmul(read["w_up_lora_a"], read["w_up_lora_b"])
    assert np.any(change)
    assert_close(merged, base.astype(jnp.float32) + change, 1e-2)
    capsys.readouterr()
    for source in (["--run", str(out)], ["--checkpoint", str(out / "model")]):
        assert generate([*source, "--prompt", "lists", "--tokens", "4", "--temperature", "0"]) == 0
        assert capsys.readouterr().out.startswith("lists")


@pytest.mark.slow
def test_a_compressed_attention_computes_with_the_numbers_of_its_kernels():
    options = {"adapter": "rank=4,targets=gate+q+o", "base": "float8", "base_attention": "nf4"}
    config = new_config({"preset": "tiny"} | options)
    config = replace(config, model=replace(config.model, num_layers=2), batch_size=2, sequence_length=16)
    model = make_model(config)
    state = first_state(config, model, None)
    state, compressed = state._replace(params=drawn(state.params)), state.frozen["moe_blocks"]["attention"]
    like = params_like(model, None, jnp.bfloat16)
    kernels = {}
    for name in ADAPTED.values():
        kernel, shape = compressed[name]["kernel"], like["moe_blocks", "attention", name, "kernel"].shape
        assert kernel.form == "nf4"
        bits = sum(leaf.nbytes for leaf in jax.tree.leaves(kernel)) * 8 / np.prod(shape)
        assert bits == 4.25
        kernels[name] = compressed[name] | {"kernel": kernel.astype(jnp.bfloat16).reshape(shape)}
    blocks = state.frozen["moe_blocks"]
    plain = state.frozen | {"moe_blocks": blocks | {"attention": blocks["attention"] | kernels}}
    step = jax.jit(make_train_step(config, model))
    (after, metrics), (of_plain, others) = (
        step(state, windows(1, 2, 17)),
        step(state._replace(frozen=plain), windows(1, 2, 17)),
    )
    assert_same_bits((after.params, metrics), (of_plain.params, others))


@pytest.mark.slow
def test_adapters_train_with_moments_in_8_bits():
    losses = {}
    for optimizer in ("adam", "adam8"):
        config = new_config({"preset": "tiny", "adapter": "rank=4", "optimizer": optimizer, "learning_rate": 1e-2})
        sizes = replace(config.model, num_layers=1, width=64, num_experts=4, experts_per_token=2)
        config = replace(config, model=sizes, batch_size=4, sequence_length=16, accumulate=2)
        model = make_model(config)
        state, step = first_state(config, model, None), jax.jit(make_train_step(config, model))
        found = []
        for at in range(30):
            state, metrics = step(state, windows(2, 2, 17, seed=at % 3))
            found.append(float(metrics.loss))
        losses[optimizer] = found
        dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(state.params)}
        held = sum(leaf.nbytes for leaf in jax.tree.leaves((state.params, state.optimizer_state)))
        held /= sum(leaf.size for leaf in jax.tree.leaves(state.params))
        assert dtypes == {"float32" if optimizer == "adam" else "bfloat16"}
        assert held == pytest.approx(12 if optimizer == "adam" else 4, rel=0.02)
    before, after = np.array(losses["adam"]), np.array(losses["adam8"])
    fell = before[:3].mean() - before[-3:].mean()
    assert fell > 0.1
    assert abs(before[-3:].mean() - after[-3:].mean()) < 0.05 * fell


@pytest.mark.slow
def test_an_embedding_on_the_host_changes_no_bit():
    found = []
    for where in ("device", "host"):
        config = new_config({"preset": "tiny", "adapter": "rank=4,shared", "embedding": where})
        config = replace(config, model=replace(config.model, num_layers=1), batch_size=2, sequence_length=16)
        model = make_model(config)
        state = first_state(config, model, None)
        on_device = {leaf.shape for leaf in jax.tree.leaves(state.frozen)}
        assert ((256, 128) in on_device) == (where == "device")
        found.append(jax.jit(make_train_step(config, model))(state, windows(1, 2, 17)))
        assert np.asarray(state.frozen["embedding"]).shape == (256, 128)  # as it is saved
    (after, metrics), (of_host, others) = found
    assert_same_bits((of_host.params, others), (after.params, metrics))


@pytest.mark.slow
def test_a_random_base_is_made_in_its_form():
    config = new_config({"preset": "tiny", "adapter": "rank=4", "base": "nf4"})
    model = make_model(replace(config, model=replace(config.model, num_layers=2, width=64, num_experts=4)))
    params = random_params(model, dtype=jnp.bfloat16, base="nf4")
    weight = params["moe_blocks"]["moe"]["w_up"]
    assert (weight.form, weight.shape) == ("nf4", (2, 4, 64, 64))
    values = np.asarray(weight.astype(jnp.float32))
    assert abs(values.std() / 0.02 - 1) < 0.05
    assert np.any(values[0] != values[1])
    assert not adapters_of(params)
    like = jax.eval_shape(partial(init_state, config, model)).params
    assert like.keys() == {"moe_blocks"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--adapter rank=0", "--adapter rank=0: rank=0 must be at least 1"),
        ("--adapter rank", "--adapter rank: 'rank' must be one of rank=N, alpha=NUMBER, targets="),
        ("--adapter size=4", "'size=4' must be one of rank=N"),
        ("--adapter rank=4,shared=no", "'shared=no' must be one of rank=N"),
        ("--adapter rank=4,targets=", "targets= must be different ones of gate, up, down, router, q, k, v, o"),
        (
            "--adapter rank=4,targets=gate+head",
            "targets=gate+head must be different ones of gate, up, down, router, q, k, v, o",
        ),
        ("--base nf4", "--base nf4 is of a frozen base, which is not trained: say --adapter rank=16, too"),
        ("--base-attention nf4", "--base-attention nf4 is of a frozen base, which is not trained: say --adapter"),
        ("--adapter rank=4 --base int4", "argument --base: invalid choice: 'int4'"),
        ("--adapter rank=4 --unroll", "in a loop: leave --unroll out"),
        ("--adapter rank=4 --trained experts", "leave --trained experts out"),
        (
            f"--checkpoint {FIXTURES / 'olmoe'} --adapter rank=4 --base nf4",
            "scales of 64 inputs, must divide the model's",
        ),
        (
            f"--checkpoint {FIXTURES / 'olmoe'} --adapter rank=4 --base-attention mxfp4",
            "--base-attention mxfp4 has scales of 32 inputs, must divide the model's width 16 and its heads",
        ),
        ("--adapter rank=4 --mesh data=1", "--adapter trains on one device: leave --mesh out"),
        ("--embedding host", "that of this model is trained: say --adapter rank=16, too"),
        (
            f"--checkpoint {FIXTURES / 'qwen3_moe'} --adapter rank=4 --embedding host",
            "for a frozen embedding that is no head, but that of this model is the head, too",
        ),
        ("--preset gpt-oss-20b --optimizer adam8", "--optimizer adam8 has blocks that are alike"),
        ("--preset gpt-oss-20b --experts-layer dense-twin", "dense-twin has no clamped_swiglu, only swiglu"),
        ("--compile-only b100", "argument --compile-only: invalid choice"),
        ("--merge", "--merge is of a public model's adapters: say --checkpoint and --adapter, too"),
        ("--adapter-from nowhere", "--adapter-from is of a public model's adapters: say --checkpoint, too"),
        (
            f"--checkpoint {FIXTURES / 'qwen3_moe'} --adapter-from nowhere",
            "nowhere/adapter_config.json",
        ),
    ],
)
@pytest.mark.default_cases("*")
def test_what_does_not_fit_is_told_in_one_line(options, message, tmp_path, capsys):
    assert main([*options.split(), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_files_that_do_not_fit_are_named(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    config = new_config({"checkpoint": str(folder), "adapter": "rank=2", "base": "float8"})
    with pytest.raises(UserError, match=r"model\.safetensors"):
        first_state(config, make_model(config), None)


@pytest.mark.compile_only
@pytest.mark.slow
def test_a_step_is_planned_for_an_absent_gpu(capsys):
    assert main(["--preset", "tiny", "--adapter", "rank=4,shared", "--base", "nf4", "--compile-only", "h100"]) == 0
    planned = capsys.readouterr().out
    assert "trained: adapters of 0 million parameters beside a base in nf4: 0." in planned
    assert planned.endswith("fits on one H100\n")
