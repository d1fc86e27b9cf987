"""Generation with a cache: what recomputing the whole context gives; choices by their definition in NumPy; files."""

import json
import re
from dataclasses import replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.blaze_jax.checkpoints.models import FIXTURES
from tests.numerics import assert_close, assert_same_bits
from tests.train_example.small import MODEL, decoder, initial_variables, windows
from tests.train_example.tiny_checkpoint import write_tiny_checkpoint
from train_example.config import UserError
from train_example.generate import decoding
from train_example.generate.__main__ import main
from train_example.generate.decoding import Generator
from train_example.generate.files import Results
from train_example.generate.sampling import Sampling, candidates, choose
from train_example.layers import Context
from train_example.model import layers_apart
from train_example.public_models.config import public_config
from train_example.public_models.gpt_oss import decoder_class
from train_example.public_models.weights import load_params

PROMPTS = [windows(length, seed=length).tolist() for length in (3, 20, 9)]
MOST = 6
OWN = replace(MODEL, num_layers=2, shared_width=8, bias_update_rate=0.1)  # qwen3_moe has a dense block
GREEDY = Sampling(temperature=0)
NOTHING = np.array([-1], np.int32)  # never comes: such a program is that of one with a stop token


@lru_cache
def model_and_variables(name):
    if name == "own":
        return decoder(OWN), initial_variables(OWN)
    config = public_config(FIXTURES / name)
    model = decoder_class(config)(config, config.moe(), jnp.float32)
    return model, {"params": load_params(FIXTURES / name, model)}


def prompts_of(model):
    return [[token % model.config.vocabulary for token in prompt] for prompt in PROMPTS]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Prompts take several chunks, which end anywhere in them."""
    monkeypatch.setattr(decoding, "_CHUNK", 8)


def apart(model, variables):
    return {kind: layers_apart(model.config, of_kind) for kind, of_kind in variables.items()}


def generator(name="own", sampling=GREEDY, **options):
    model, variables = model_and_variables(name)
    return Generator(model, apart(model, variables), 4, 32, sampling, NOTHING, **options)


def whole_context(model, variables, tokens):
    return jax.jit(model.apply)(variables, np.pad(tokens, (0, 32 - len(tokens)))[None])[0, : len(tokens)]


@pytest.mark.slow
@pytest.mark.ci_cases("own", "gpt_oss-model")
@pytest.mark.parametrize("name", ["own", "qwen3_moe", "olmoe", "gpt_oss-model"])
def test_what_comes_is_what_the_whole_context_gives(name):
    model, variables = model_and_variables(name)
    generating, prompts = generator(name), prompts_of(model)
    found = generating.generate(prompts, MOST)
    logits = generating.prefilled(prompts, MOST).logits
    scores = generating.score([prompt + tokens for prompt, tokens in zip(prompts, found, strict=True)])
    for prompt, tokens, after_prompt, score in zip(prompts, found, logits, scores, strict=False):
        expected = whole_context(model, variables, prompt + tokens)
        assert_close(after_prompt, expected[len(prompt) - 1], 1e-5)
        assert tokens == expected[len(prompt) - 1 : -1].argmax(-1).tolist()
        wanted = jax.nn.log_softmax(expected)[np.arange(len(score)), (prompt + tokens)[1:]]
        np.testing.assert_allclose(score, wanted, rtol=1e-5, atol=1e-5)


def test_each_later_tokens_logits_are_those_of_the_whole_context_and_a_stopped_sequence_changes_nothing():
    model, variables = model_and_variables("own")
    generating = generator()
    decode = partial(decoding._decode, generating.model, GREEDY)
    state = generating.prefilled(PROMPTS, MOST)
    _, first = decode(generating.variables, jax.tree.map(jnp.copy, state), NOTHING)
    stopping, stops = jax.tree.map(jnp.copy, state), np.asarray(first[1:2])
    assert stops[0] not in (int(first[0]), int(first[2]))
    sequences, stopped_at = [list(prompt) for prompt in PROMPTS], []
    for _ in range(MOST - 1):
        state, tokens = decode(generating.variables, state, NOTHING)
        stopping, others = decode(generating.variables, stopping, stops)
        stopped_at.append(others.tolist())
        for at, sequence in enumerate(sequences):
            sequence.append(int(tokens[at]))
            assert_close(state.logits[at], whole_context(model, variables, sequence)[-1], 1e-5)
        assert state.filled.tolist() == [*map(len, sequences), 0]
    assert [row[1] for row in stopped_at] == [stops[0]] + [-1] * (MOST - 2)
    assert stopping.filled.tolist()[1] == len(PROMPTS[1])
    for at in (0, 2):
        if stops[0] not in sequences[at][len(PROMPTS[at]) :]:
            assert [row[at] for row in stopped_at] == sequences[at][len(PROMPTS[at]) :]
            assert_same_bits(stopping.logits[at], state.logits[at])


@pytest.mark.slow
def test_one_sequence_alone_up_to_the_last_slot_is_that_among_others():
    model, variables = model_and_variables("own")
    alone = Generator(model, apart(model, variables), 1, 32, GREEDY, NOTHING, record=True)
    prompt = PROMPTS[0]
    most = alone.slots + 1 - len(prompt)
    (found,) = alone.generate([prompt], most)
    assert found == generator().generate([prompt], most)[0]
    expected = whole_context(model, variables, (prompt + found)[:-1])
    assert found == expected[len(prompt) - 1 :].argmax(-1).tolist()
    (recorded,) = alone.recorded([prompt], most)
    (other,) = generator(record=True).recorded([prompt], most)
    assert np.array_equal(recorded.experts, other.experts)


def test_padding_goes_to_no_expert():
    model, variables = model_and_variables("own")
    cache = {name: jnp.zeros((2, 3, 2, 16, 8)) for name in ("key", "value")}
    context = Context(jnp.array([5, 0, 9]), jnp.array([2, 4, 0]))
    given = {**variables, "cache": {"moe_blocks": {"attention": cache}}}
    apply = jax.jit(partial(model.apply, mutable=["cache", "intermediates"]))
    _, sown = apply(given, np.zeros((3, 4), np.int32), context=context)
    (load,) = sown["intermediates"]["moe_blocks"]["moe"]["tokens_per_expert"]
    assert load.sum(1).tolist() == [6 * OWN.experts_per_token] * 2


def test_choices_depend_on_seed_number_and_tokens_and_on_no_neighbour_and_no_length_compiles_anew():
    sampling = Sampling(temperature=1.5, top_k=50, top_p=0.9)
    generating = generator(sampling=sampling)
    found = generating.generate(PROMPTS, MOST, [7, 8, 9])
    compiled = decoding._decode._cache_size(), decoding._prefill._cache_size()
    assert generating.generate(PROMPTS, MOST, [7, 8, 9]) == found
    assert [generating.generate([prompt], MOST, [n])[0] for n, prompt in enumerate(PROMPTS, 7)] == found
    assert generating.generate(PROMPTS, MOST, [8, 7, 9])[:2] != found[:2]
    assert generator(sampling=sampling, seed=1).generate(PROMPTS, MOST, [7, 8, 9]) != found
    assert len(generating.beyond(PROMPTS[1], 100)) == 100
    assert generating.beyond(PROMPTS[1] * 2, 60)[:40] == PROMPTS[1] * 2
    assert (decoding._decode._cache_size(), decoding._prefill._cache_size()) == compiled
    for prompts, most in ((PROMPTS, 14), ([*PROMPTS, [1], [1]], 1), ([[]], 1)):
        with pytest.raises(ValueError, match="prompts must be 1 to 4 of 1 to"):
            generating.generate(prompts, most)


@pytest.mark.slow
def test_no_weights_are_stacked_and_the_cache_stays_in_its_place():
    generating = generator()
    state = generating.prefilled(PROMPTS, MOST)
    compiled = decoding._decode.lower(generating.model, GREEDY, generating.variables, state, generating.stops).compile()
    widths = re.findall(r"= \w+\[([\d,]+)\]\S* concatenate\(", compiled.as_text())
    assert all(np.prod([int(n) for n in width.split(",")]) <= 4 * OWN.width for width in widths)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache))
    assert compiled.memory_analysis().alias_size_in_bytes >= size


@pytest.mark.slow
def test_bfloat16_is_float32_within_rounding():
    model, variables = model_and_variables("own")
    expected = generator().prefilled(PROMPTS, 1).logits[:3]
    half = Generator(model.clone(dtype=jnp.bfloat16), apart(model, variables), 4, 32)
    assert_close(half.prefilled(PROMPTS, 1).logits[:3], expected, 0.03)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.7, 5, 0.8), Sampling(1.0, None, 0.3), Sampling(2.0, 3), Sampling(1.0, None, 1e-9), Sampling()],
)
@pytest.mark.default_cases("*")
def test_what_may_be_drawn_is_as_defined(sampling):
    logits = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)
    logits[1, 5:9] = logits[1].max()  # as likely
    values, tokens = candidates(jnp.asarray(logits), sampling)
    tokens = np.tile(np.arange(40), (3, 1)) if tokens is None else np.asarray(tokens)
    for row, found, ids in zip(
        logits.astype(np.float64) / sampling.temperature, np.asarray(values), tokens, strict=True
    ):
        order = np.argsort(-row, kind="stable")[: sampling.top_k]
        likely = np.exp(row[order]) / np.exp(row[order]).sum()
        kept = order[: 1 + np.searchsorted(np.cumsum(likely), sampling.top_p - 1e-7)]
        assert set(ids[found > -np.inf]) == set(kept)
        np.testing.assert_allclose(found[found > -np.inf], row[ids[found > -np.inf]], rtol=1e-6)


def test_tokens_are_drawn_by_their_probability_and_the_likeliest_without_a_temperature():
    logits, draws = np.log(np.array([0.5, 0.05, 0.3, 0.15], np.float32)), 4000
    keys, rows = jax.random.split(jax.random.key(0), draws), jnp.tile(logits, (draws, 1))
    assert (choose(rows, keys, GREEDY) == 0).all()
    for sampling, expected in ((Sampling(), np.exp(logits)), (Sampling(top_k=3, top_p=0.7), [0.625, 0, 0.375, 0])):
        share = np.bincount(choose(rows, keys, sampling), minlength=4) / draws
        np.testing.assert_allclose(share, expected, atol=0.03)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("generate") / "model", "olmoe")


def test_a_prompt_goes_on_at_the_terminal(folder, capsys):
    options = ["--checkpoint", str(folder), "--prompt", "The list", "--dtype", "float32", "--seed", "3"]
    assert main([*options, "--tokens", "9"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("The list")
    assert said.err.splitlines()[0].endswith("stops at '<|end|>'")
    assert re.fullmatch(r"\d tokens, the first after [\d.]+ s, then [\d.]+/s", said.err.splitlines()[-1])
    assert main([*options, "--tokens", "9"]) == 0
    assert capsys.readouterr().out == said.out


@pytest.mark.slow
def test_a_stopped_file_of_prompts_goes_on_with_the_same_bits(folder, tmp_path, monkeypatch, capsys):
    prompts, whole, stopped = tmp_path / "prompts.jsonl", tmp_path / "whole.jsonl", tmp_path / "stopped.jsonl"
    texts = ["The list", "A dictionary of", "x", "for one in two: pass", "\n"]
    prompts.write_text("".join(json.dumps({"prompt": text, "id": 1}) + "\n" for text in texts))
    options = ["--checkpoint", str(folder), "--prompts", str(prompts), "--tokens", "6", "--batch-size", "2"]
    assert main([*options, "--out", str(whole)]) == 0
    records = [json.loads(line) for line in whole.read_text().splitlines()]
    assert [record["prompt"] for record in records] == texts
    assert all(record["stopped"] or record["tokens"] == 6 for record in records)

    write, calls = Results.write, []

    def interrupted(results, records):
        write(results, records)
        calls.append(len(records))
        if len(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Results, "write", interrupted)
        assert main([*options, "--out", str(stopped)]) == 130
    assert "go on with the same command and --resume" in capsys.readouterr().err
    with stopped.open("a") as file:
        file.write('{"index": 2, "te')  # as if killed while writing
    assert main([*options, "--out", str(stopped)]) == 2
    assert "is there already: go on with it by --resume" in capsys.readouterr().err
    assert main([*options, "--out", str(stopped), "--resume", "--seed", "1"]) == 2
    assert "is of seed 0, cannot be resumed with 1" in capsys.readouterr().err
    assert main([*options, "--out", str(stopped), "--resume"]) == 0
    assert stopped.read_text() == whole.read_text()
    assert sum(calls) == 4


@pytest.mark.slow
def test_texts_are_scored_behind_their_prompts(folder, tmp_path, capsys):
    texts, plain, out = tmp_path / "texts.jsonl", tmp_path / "plain", tmp_path / "out.jsonl"
    texts.write_text(json.dumps({"prompt": "A list", "text": " of"}) + "\n" + json.dumps({"text": "A list of"}) + "\n")
    options = ["--checkpoint", str(folder), "--dtype", "float32", "--out", str(out)]
    assert main([*options, "--score", str(texts)]) == 0
    behind, alone = (json.loads(line) for line in out.read_text().splitlines())
    assert behind["tokens"] < alone["tokens"]
    assert alone["log_likelihood"] < behind["log_likelihood"] < 0
    said = capsys.readouterr().out
    assert re.match(rf"2 texts, {behind['tokens'] + alone['tokens']} tokens scored: [\d.]+ nats each, perplexity", said)
    out.unlink()
    plain.write_text("A list of\n")
    assert main([*options, "--score", str(plain)]) == 0
    (again,) = (json.loads(line) for line in out.read_text().splitlines())
    assert again["log_likelihood"] == pytest.approx(alone["log_likelihood"], rel=1e-5)


@pytest.mark.slow
def test_it_is_timed_with_random_weights_and_config_json_alone(tmp_path, capsys):
    (tmp_path / "config.json").write_bytes((FIXTURES / "olmoe" / "config.json").read_bytes())
    assert main(["--time", "--checkpoint", str(tmp_path), "--tokens", "4", "--batch-size", "2", "--cache", "16"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["batch"], record["prompt"], record["slots"]) == (2, 13, 16)
    assert record["decode_tokens_per_second"] > 0


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--prompt hi --temperature -1", "-1 must be a number of at least 0"),
        ("--prompt hi --top-p 0", "0 must be a number above 0, at most 1"),
        ("--prompt hi --top-p 1.5", "1.5 must be a number above 0, at most 1"),
        ("--prompt hi --top-k 0", "0 must be a whole number from 1"),
        ("--prompt=", "--prompt is empty, must have one token at least"),
        ("--prompt hi --stop the_stop", "--stop 'the_stop' must be one of the model's tokens, it is "),
        ("--prompt hi --tokens 99", "the prompt has 2 tokens, so that --tokens must be at most 63 in a cache of 64"),
        ("--prompt hi --cache 1", "the prompt has 2 tokens, must have at most the 1 of the cache (--cache)"),
        ("--prompt hi --cache 65", "--cache 65 must be at most 64, the max_position_embeddings of the model"),
        ("--prompt hi --out x", "--out FILE is needed with --prompts, --score and --replay, and with nothing else"),
        ("--prompt hi --resume", "--resume goes on with --prompts, --score or --replay"),
        ("--prompts empty --out x", "empty is empty, must have a prompt on each line"),
        ("--prompts gap --out x", "gap, line 2: the prompt is empty, must have one token at least"),
        ("--prompts bad.jsonl --out x", "bad.jsonl, line 1: must be an object with a string 'prompt'"),
        ("--prompts missing --out x", "missing cannot be read: No such file"),
        ("--score gap --out .", "--out . is a folder, must be a file"),
        ("--score gap", "--out FILE is needed"),
        ("--prompts one --out x --resume", "nothing to resume: x or x.settings is missing"),
        ("--prompts long --out x", "line 2 has 101 tokens, must have at most the 64 of the cache"),
        ("--prompt hi --run .", "one model is needed"),
        ("", "one of the arguments --prompt --prompts --score --replay --time is required"),
    ],
)
def test_bad_input_is_told_in_one_line(folder, options, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "empty": "",
        "gap": "a\n\nb\n",
        "bad.jsonl": "[1]\n",
        "one": "a\n",
        "long": "a\n" + "\x01" * 101,
    }.items():
        (tmp_path / name).write_text(text)
    before = sorted(tmp_path.rglob("*"))
    assert main(["--checkpoint", str(folder), *options.split()]) == 2
    said = capsys.readouterr()
    assert message in said.err.splitlines()[-1]
    assert said.out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_a_model_without_tokenizer_or_without_weights(tmp_path, capsys):
    (tmp_path / "config.json").write_bytes((FIXTURES / "olmoe" / "config.json").read_bytes())
    assert main(["--checkpoint", str(tmp_path), "--prompt", "hi"]) == 2
    assert "tokenizer.json cannot be read" in capsys.readouterr().err
    assert main(["--run", str(tmp_path), "--prompt", "hi"]) == 2
    assert "has no checkpoints, must be the folder of a run" in capsys.readouterr().err
    with pytest.raises(UserError, match="cannot be used"):
        Results(tmp_path / "config.json" / "x", {}, resume=False)
