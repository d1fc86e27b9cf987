"""Training block by block: equal to the ordinary step, the numbers of its 8-bit optimizer, and what it refuses."""

import re
from dataclasses import replace
from functools import lru_cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import train_example.step
from blaze_jax.benchmark.results import read_results
from tests.numerics import assert_close
from tests.train_example.small import CONFIG, FULL_MODEL, metrics, windows
from train_example import compare_precisions
from train_example.__main__ import main
from train_example.config import UserError
from train_example.model import layers_apart
from train_example.program.arguments import checked, new_config
from train_example.program.devices import parallelism
from train_example.program.layerwise import Layerwise, block_by_block
from train_example.program.model import make_model
from train_example.program.presets import PRESETS
from train_example.program.small_adam import (
    BLOCK,
    apply_updates,
    decode,
    encode,
    encode_positive,
    largest,
    random_bits,
    round_by_chance,
    scale_by_small_adam,
)
from train_example.step import init_state, make_optimizer, make_train_step

RATE = 1e-2


def config(tied_head=False, **options):
    model = replace(FULL_MODEL, tied_head=tied_head)
    return replace(CONFIG, model=model, dtype="float32", optimizer="adam8", **options)


@lru_cache
def ordinary(tied_head):
    """The ordinary model, its first state, and the gradients and metrics of a step."""
    own = replace(config(tied_head), optimizer="adam", unroll=True)
    model = make_model(own)
    return own, model, init_state(own, model)


@pytest.mark.slow
@pytest.mark.parametrize("tied_head", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_of_each_part_are_those_of_the_ordinary_step(tied_head):
    # Plain descent with no clipping shows the gradients themselves, where Adam would divide their sizes out.
    own, model, first = ordinary(tied_head)
    batch = windows(1, 4, 17)
    layerwise = Layerwise(config(tied_head), model, optax.sgd(RATE))
    begun = layerwise.begin(jax.tree.map(jnp.copy, first.params), layers_apart(model.config, first.router_state))
    before = jax.tree.map(np.asarray, begun.params)
    step, evaluate = block_by_block(config(tied_head), model, begun, batch, optimizer=optax.sgd(RATE))
    loss_before = evaluate(begun, batch)
    after, found = step(begun, batch)

    expected, wanted = jax.jit(make_train_step(own, model))(first, batch)
    np.testing.assert_allclose(found.loss, wanted.loss, rtol=1e-6)
    np.testing.assert_allclose(found.loss, loss_before, rtol=1e-6)
    np.testing.assert_allclose(found.auxiliary_loss, wanted.auxiliary_loss, rtol=1e-5)
    np.testing.assert_allclose(found.gradient_norm, wanted.gradient_norm, rtol=1e-5)
    np.testing.assert_array_equal(found.tokens_per_expert, wanted.tokens_per_expert)
    chex.assert_trees_all_equal(after.router_state, layers_apart(model.config, expected.router_state))
    # Adam's first mean is a tenth of the clipped gradient.
    clip = min(1.0, 1.0 / float(wanted.gradient_norm))
    gradients = jax.tree.map(lambda mean: mean * 10 / clip, expected.optimizer_state[1][0].mu)
    steps = jax.tree.map(lambda old, new: (old - new) / RATE, before, after.params)
    assert jax.tree.structure(steps) == jax.tree.structure(gradients)
    for ours, theirs in zip(jax.tree.leaves(steps), jax.tree.leaves(gradients), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-3 * np.linalg.norm(theirs) + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("tied_head", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_steps_of_plain_adam_are_the_ordinary_ones(tied_head, monkeypatch):
    monkeypatch.setattr(train_example.step, "CLIP_NORM", 1e9)  # parts clip by themselves
    own, model, state = ordinary(tied_head)
    adam, step = make_optimizer(own), jax.jit(make_train_step(own, model))
    params = jax.tree.map(jnp.copy, state.params)
    begun = Layerwise(config(tied_head), model, adam).begin(params, layers_apart(model.config, state.router_state))
    blocks, _ = block_by_block(config(tied_head), model, begun, windows(1, 4, 17), optimizer=adam)
    for at in range(5):
        batch = windows(1, 4, 17, seed=at)
        (begun, found), (state, wanted) = blocks(begun, batch), step(state, batch)
        np.testing.assert_allclose(found.loss, wanted.loss, rtol=1e-6)
    assert_close(begun.params, state.params, tolerance=1e-5)
    chex.assert_trees_all_equal(begun.router_state, layers_apart(model.config, state.router_state))


@pytest.mark.slow
@pytest.mark.parametrize("against", ["adam8", "fp8"])
def test_one_command_compares_precisions(against, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", replace(CONFIG, model=FULL_MODEL))
    file = tmp_path / "precisions.json"
    options = f"--against {against} --preset tiny --steps 40 --seeds 2 --json {file}"
    assert compare_precisions.main(options.split()) == 0
    before, after = read_results(file)["records"][0]["precisions"].items()
    assert [before[0], after[0]] == (["adam", "adam8"] if against == "adam8" else ["bfloat16", "fp8"])
    for of_ordinary, of_other in zip(before[1]["losses"], after[1]["losses"], strict=True):
        np.testing.assert_allclose(of_other[0], of_ordinary[0], rtol=5e-3)  # from the same parameters, but rounded
        assert of_other[-1] < of_other[0] - 2
        assert of_other != of_ordinary
    assert abs(after[1]["difference"]) < 0.1
    assert after[0] in capsys.readouterr().out
    assert compare_precisions.main(["--against", "adam8", "--remat", "full", "--seeds", "2"]) == 2
    assert "--remat full must be none" in capsys.readouterr().err


@pytest.mark.compile_only
@pytest.mark.slow
def test_all_of_qwen3_30b_a3b_fits_one_h200(capsys):
    options = "--preset qwen3-30b-a3b --batch-size 1 --sequence-length 4096 --compile-only h200"
    assert main(options.split()) == 0
    (gib,) = re.findall(r"\(([\d.]+) GiB\)", capsys.readouterr().out)
    assert 115 < float(gib) < 123  # parameters and moments alone are 114.7


def test_codes_are_near_what_they_are_of():
    x = jax.random.normal(jax.random.key(0), (4, BLOCK)) * jnp.array([1e-12, 1.0, 1e12, 0.0])[:, None]
    scales = largest(x)
    back = decode(encode(x, scales), x.shape)
    # Codes are multiples of 1/127 of the cube root: at the largest number they are 3/127 apart.
    assert jnp.all(jnp.abs(back - x) <= 1.5 / 127 * 1.01 * scales[:, None])
    np.testing.assert_array_equal(back[3], 0)
    fine = encode_positive(jnp.abs(x), scales, random_bits(jax.random.key(1), x.shape))
    assert jnp.all(jnp.abs(decode(fine, x.shape) - jnp.abs(x)) <= 3.0 / 255 * 1.01 * scales[:, None])
    assert jnp.all((fine.codes > 0) == (jnp.abs(x) > 0))


def test_rounding_by_chance_has_the_right_mean_and_loses_no_infinity():
    x = jnp.full((1 << 16,), 1 + 1 / 512)  # a quarter of the way from 1 to the next bfloat16
    rounded = round_by_chance(x, random_bits(jax.random.key(3), x.shape))
    assert set(np.unique(rounded.astype(jnp.float32))) == {1.0, 1 + 1 / 128}
    up = float(jnp.mean(rounded == 1 + 1 / 128))
    assert abs(up - 0.25) < 4 * (0.25 * 0.75 / x.size) ** 0.5
    odd = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 0.0])
    rounded = round_by_chance(odd, jnp.full(4, 0xFFFFFFFF, jnp.uint32))
    np.testing.assert_array_equal(rounded.astype(jnp.float32), odd)
    params = {"w": jnp.ones(BLOCK, jnp.bfloat16)}
    twice = [apply_updates(params, {"w": jnp.full(BLOCK, 1e-3)}, jax.random.key(5)) for _ in range(2)]
    chex.assert_trees_all_equal(*twice)
    assert jnp.any(twice[0]["w"] > 1)


@pytest.mark.slow
def test_small_adam_stays_near_adam():
    params = {"w": jnp.zeros((8, BLOCK)), "odd": jnp.zeros(7)}
    small, adam = scale_by_small_adam(0.9, 0.95), optax.scale_by_adam(0.9, 0.95)
    state, wanted = small.init(params), adam.init(params)
    for at in range(10):
        key = jax.random.key(at)
        gradients = jax.tree.map(lambda leaf, key=key: jax.random.normal(key, leaf.shape), params)
        ours, state = small.update(gradients, state, key=key)
        theirs, wanted = adam.update(gradients, wanted)
        error = jnp.linalg.norm(ours["w"] - theirs["w"]) / jnp.linalg.norm(theirs["w"])
        assert error < 0.06
        np.testing.assert_allclose(ours["odd"], theirs["odd"], rtol=1e-5)  # not in codes
    assert state.mean["w"].codes.dtype == jnp.int8
    assert state.root["w"].codes.dtype == jnp.uint8


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"accumulate": 2}, "--accumulate 2 must be 1"),
        ({"remat": "full"}, "--remat full must be none"),
        ({"momentum_dtype": "bfloat16"}, "keeps both moments in 8 bits: leave --momentum-dtype out"),
        ({"adapter": "rank=4", "momentum_dtype": "bfloat16"}, "keeps both moments in 8 bits"),
    ],
)
def test_what_does_not_go_together_is_one_clear_line(given, message):
    with pytest.raises(UserError, match=message):
        checked(new_config({"preset": "tiny", "optimizer": "adam8"} | given))


def test_a_mesh_is_refused():
    with pytest.raises(UserError, match="--optimizer adam8 trains on one device: leave --mesh out"):
        make_model(config(), parallelism({"data": 2}))


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", CONFIG)
    options = ["--preset", "tiny", "--optimizer", "adam8", "--evaluate-every", "6"]
    assert main([*options, "--out", str(tmp_path / "whole"), "--steps", "6"]) == 0
    assert main([*options, "--out", str(tmp_path / "parts"), "--steps", "3", "--schedule-steps", "6"]) == 0
    assert main(["--resume", "--out", str(tmp_path / "parts"), "--steps", "6"]) == 0
    losses = [[record["loss"] for record in metrics(tmp_path / run) if "loss" in record] for run in ("whole", "parts")]
    assert len(losses[0]) == 6
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
