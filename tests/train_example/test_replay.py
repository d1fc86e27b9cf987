"""Experts that are recorded while a text is generated, and taken again: the same ids, likelihoods and gradients."""

import json
from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.numerics import assert_close, assert_same_bits
from tests.train_example.small import MODEL, decoder, initial_variables, windows
from tests.train_example.tiny_checkpoint import write_tiny_checkpoint
from train_example.config import UserError
from train_example.generate.__main__ import main
from train_example.generate.decoding import Generator, log_likelihood
from train_example.generate.files import Results
from train_example.generate.replay import Recorded, experts_in, read_recorded, replay_of, write_recorded
from train_example.model import layers_apart

OWN = replace(
    MODEL, num_layers=3, dense_layers=(1,), dense_width=16, load_balancing_weight=0.0
)  # two stacks of experts
SLOTS = 24
PROMPTS = [windows(length, seed=length).tolist() for length in (3, 11)]


def generator(variables, record=False, stops=(7,)):
    apart = {kind: layers_apart(OWN, of_kind) for kind, of_kind in variables.items()}
    return Generator(decoder(OWN), apart, 3, SLOTS, stops=stops, record=record)


@lru_cache
def recorded():
    """Sequences of a generator with one that stops early, and the variables."""
    variables = initial_variables(OWN)
    (first, _) = generator(variables, record=True).generate(PROMPTS, 8)
    generating = generator(variables, record=True, stops=(first[2],))
    return generating.recorded(PROMPTS, 8), variables


def otherwise(variables):
    """Weights that choose other experts."""
    return jax.tree.map(lambda p: p + 0.3 * jax.random.normal(jax.random.key(1), p.shape), variables)


@jax.jit
def loss_of(variables, tokens, targets, generated, routing):
    """The mean likelihood of generated tokens, its gradient, and what the layers chose; `routing` may be empty."""
    model, given = decoder(OWN), {**variables, **routing}

    def loss(params):
        collections = ["losses", "intermediates", *([] if routing else ["routing"])]
        logits, sown = model.apply({**given, "params": params}, tokens, train=True, mutable=collections)
        scores = jnp.where(generated, log_likelihood(logits, targets), 0)
        return -scores.sum() / generated.sum(), (scores, sown)

    return jax.value_and_grad(loss, has_aux=True)(variables["params"])


@pytest.mark.slow
def test_the_same_weights_choose_what_was_recorded_and_replayed_have_the_same_gradients():
    sequences, variables = recorded()
    generated = [len(one.tokens) - one.prompt for one in sequences]
    assert generated[0] <= 3 < generated[1] == 8  # one has stopped
    replay = replay_of(decoder(OWN), sequences)
    assert replay.generated.sum() == sum(generated)
    (value, (scores, _)), gradients = loss_of(variables, *replay)
    (ref_value, (ref_scores, sown)), ref_gradients = loss_of(variables, *replay._replace(variables={}))
    for one, chosen in zip(sequences, experts_in(OWN, sown["routing"]).swapaxes(0, 1), strict=True):
        assert_same_bits(one.experts.astype(np.int32), chosen[:, : one.experts.shape[1]])
    assert_close((value, scores), (ref_value, ref_scores))
    assert_close(gradients, ref_gradients)


@pytest.mark.slow
def test_replayed_by_other_weights_tokens_go_where_they_went_and_gradients_flow():
    sequences, variables = recorded()
    other, replay = otherwise(variables), replay_of(decoder(OWN), sequences)
    (_, (scores, sown)), gradients = loss_of(other, *replay)
    for name, at in (("moe_blocks", 0), ("moe_blocks_1", 1)):
        (load,) = sown["intermediates"][name]["moe"]["tokens_per_expert"]
        went = np.concatenate([one.experts[at].ravel() for one in sequences])
        assert load[0].tolist() == np.bincount(went, minlength=OWN.num_experts).tolist()
        assert jnp.abs(gradients[name]["moe"]["w_router"]).max() > 0
    _, (free, chosen) = loss_of(other, *replay._replace(variables={}))[0]
    assert not np.array_equal(experts_in(OWN, chosen["routing"])[:, 1, :18], sequences[1].experts)
    assert jnp.abs(free - scores).max() > 1e-3
    replayed = generator(other).score([one.tokens.tolist() for one in sequences], sequences)
    for one, row, of_cache in zip(sequences, scores, replayed, strict=True):
        generated = slice(one.prompt - 1, len(one.tokens) - 1)
        assert_close(of_cache[generated], row[generated], 1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("replay") / "model", "olmoe")


@pytest.mark.slow
def test_a_stopped_run_goes_on_and_its_record_is_replayed(folder, tmp_path, monkeypatch, capsys):
    prompts, out, scores = tmp_path / "prompts", tmp_path / "out.jsonl", tmp_path / "scores.jsonl"
    prompts.write_text("The list\nA\nfor one in two\n")
    model = ["--checkpoint", str(folder), "--dtype", "float32", "--batch-size", "2"]
    command = [*model, "--prompts", str(prompts), "--tokens", "5", "--record-experts", "--out", str(out)]
    write = Results.write

    def interrupted(results, records):
        write(results, records)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Results, "write", interrupted)
        assert main(command) == 130
    replay = [*model, "--replay", f"{out}.experts", "--out", str(scores)]
    assert main(replay) == 2
    assert "1.npz is missing: go on with the run that records it by --resume" in capsys.readouterr().err
    assert main([*(option for option in command if option != "--record-experts"), "--resume"]) == 2
    assert "is of record-experts True, cannot be resumed with None" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    assert main(replay) == 0
    found = [json.loads(line) for line in scores.read_text().splitlines()]
    texts = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(one["prompt"], one["tokens"]) for one in found] == [(one["prompt"], one["tokens"]) for one in texts]
    assert all(one["log_likelihood"] < 0 for one in found)


def test_a_record_of_another_model_or_damaged_is_named(tmp_path):
    experts = np.zeros((2, 4, 2), np.int8)
    good = Recorded(2, np.arange(5, dtype=np.int32), experts)
    for wrong, message in (
        (
            good._replace(experts=experts[:1]),
            r"0.npz: experts has dtype int8, shape \(1, 4, 2\) and numbers up to 0, must",
        ),
        (good._replace(experts=experts + 8), r"numbers up to 8, must be integers of shape \(2, 4, 2\) .* from -1 to 7"),
        (good._replace(experts=experts * 1.0), "experts has dtype float64"),
        (good._replace(tokens=good.tokens + 252), "tokens must be numbers from 0 to 255, is it of another model"),
    ):
        write_recorded(tmp_path, 0, wrong)
        with pytest.raises(UserError, match=message):
            read_recorded(tmp_path, decoder(OWN))
    write_recorded(tmp_path, 0, good)
    assert_same_bits(read_recorded(tmp_path, decoder(OWN)), [good])
    (tmp_path / "0.npz").write_bytes((tmp_path / "0.npz").read_bytes()[:90])
    with pytest.raises(UserError, match=r"0.npz cannot be read, is it whole"):
        read_recorded(tmp_path, decoder(OWN))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no sequences, must be a folder that --record-experts has left"):
        read_recorded(tmp_path / "empty", decoder(OWN))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--prompt hi --record-experts", "--record-experts is for --prompts"),
        ("--replay x --out y --gpu-bytes 1GB", "need all experts on the device: leave --gpu-bytes out"),
    ],
)
@pytest.mark.default_cases("*")
def test_options_that_do_not_fit_are_named(options, message, capsys):
    assert main(["--checkpoint", "nowhere", *options.split()]) == 2
    assert message in capsys.readouterr().err
