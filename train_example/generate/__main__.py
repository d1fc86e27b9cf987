"""`python -m train_example.generate`."""

import argparse
import errno
import io
import json
import math
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from train_example.config import UserError
from train_example.generate.decoding import Generator
from train_example.generate.files import (
    Results,
    check_out,
    digest,
    generate_file,
    read_items,
    recorded_items,
    score_file,
)
from train_example.generate.models import Source, Text, generating_config, open_model, printable
from train_example.generate.offload import Offload, memory_size
from train_example.generate.replay import read_recorded
from train_example.generate.sampling import Sampling
from train_example.generate.timing import time_generation
from train_example.program.arguments import Parser, add_options, number, real, whole
from train_example.program.devices import allow_all_memory

_USER_ERROR = 2
_INTERRUPTED = 130
_TOKENS = 256
_BATCH = 16
_OPTIONS = ("dtype", "implementation", "attention", "adapter_from", "base")
_SLOTS = 128
"""The cache is a multiple of this long, so that prompts of similar lengths run the same program."""


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a text may have characters that the terminal lacks
    out = None
    try:
        arguments = _parse(argv)
        out = arguments.out
        allow_all_memory()
        _run(arguments)
    except UserError as error:
        print(f"train_example.generate: {' '.join(str(error).split())}", file=sys.stderr)
        return _USER_ERROR
    except OSError as error:
        if out is None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(
            f"train_example.generate: {out} cannot be written: {error.strerror}; make room, then --resume",
            file=sys.stderr,
        )
        return _USER_ERROR
    except KeyboardInterrupt:
        if out is not None:
            print(f"stopped; what is done is in {out}: go on with the same command and --resume", file=sys.stderr)
        return _INTERRUPTED
    return 0


def _run(arguments: argparse.Namespace) -> None:
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    given = {n: getattr(arguments, n) for n in _OPTIONS if hasattr(arguments, n)}
    offload = None if arguments.gpu_bytes is None else Offload(arguments.gpu_bytes, arguments.expert_bits)
    if arguments.time:
        model = {n: str(v) for n in ("checkpoint", "preset") if (v := getattr(arguments, n, None)) is not None}
        batch, most = arguments.batch_size or 1, arguments.tokens or _TOKENS
        slots = arguments.cache or 2 * most
        if most + (arguments.prompt_tokens or 1) - 1 > slots:
            beside = f" beside --prompt-tokens {arguments.prompt_tokens}" if arguments.prompt_tokens else ""
            raise UserError(f"--tokens {most} must be at most --cache {slots}{beside}")
        config = generating_config({**model, **given, "seed": arguments.seed})
        print(json.dumps(time_generation(config, batch, slots, most, sampling, _say, offload, arguments.prompt_tokens)))
        return
    source = open_model(arguments.run, arguments.checkpoint, given, offload)
    stops = (*source.text.ends, *map(source.text.token, arguments.stop))
    _say(f"{source.name}: stops at {', '.join(repr(source.text.decode([s])) for s in stops) or 'nothing'}")
    if arguments.prompt is not None:
        prompt = source.text.encode(arguments.prompt)
        if not prompt:
            raise UserError("--prompt is empty, must have one token at least")
        most, slots = _sizes(source, arguments, [prompt])
        generator = _generator(source, offload, 1, slots, len(prompt), sampling, stops, arguments.seed)
        _stream(generator, source.text, arguments.prompt, prompt, most)
        return
    path, scored, recorded = arguments.score or arguments.replay or arguments.prompts, arguments.prompts is None, None
    if arguments.replay is not None:
        recorded = read_recorded(path, source.model)
        items = recorded_items(recorded, source.text)
    else:
        items = read_items(path, source.text, scored=scored)
    batch = arguments.batch_size or min(_BATCH, len(items))
    most, slots = _sizes(source, arguments, [item.tokens for item in items])
    settings: dict[str, Any] = {"model": source.name, "file": digest(path), "dtype": str(source.model.dtype)}
    settings |= {"batch-size": batch, "cache": slots}
    if not scored:
        settings |= {**asdict(sampling), "tokens": most, "stops": list(stops), "seed": arguments.seed}
        settings |= {"record-experts": True} if arguments.record_experts else {}
    longest = max(len(item.tokens) for item in items)
    record = arguments.record_experts
    generator = _generator(source, offload, batch, slots, batch * longest, sampling, stops, arguments.seed, record)
    with closing(Results(arguments.out, settings, resume=arguments.resume, record=record)) as results:
        if scored:
            for _ in score_file(generator, items, results, recorded):
                pass
        else:
            for _ in generate_file(generator, source.text, items, most, results):
                pass
        records = results.records.values()
    tokens = sum(record["tokens"] for record in records)
    if scored:
        nats = -sum(record["log_likelihood"] for record in records) / max(tokens, 1)
        told = f"{nats:.4f} nats each, perplexity {math.exp(min(nats, 700)):.3f}"
        print(f"{len(items)} texts, {tokens:,} {source.text.unit} scored: {told}; in {arguments.out}")
    else:
        print(f"{len(items)} prompts, {tokens:,} {source.text.unit} generated; in {arguments.out}")


def _generator(
    source: Source,
    offload: Offload | None,
    batch: int,
    slots: int,
    prompt_tokens: int,
    sampling: Sampling,
    stops: Sequence[int],
    seed: int,
    record: bool = False,
) -> Generator:
    """The generator of the model; with experts from the host where `offload` says how much the GPU has."""
    if offload is None or source.experts is None:
        return Generator(source.model, source.variables, batch, slots, sampling, stops, seed, record)
    plan = offload.plan(source.model, source.variables, batch, slots, prompt_tokens, source.base)
    _say(str(plan))
    options: dict[str, Any] = {"sampling": sampling, "stops": stops, "seed": seed}
    return offload.generator(plan, source.model, source.variables, source.experts(), slots, **options)


def _sizes(source: Source, arguments: argparse.Namespace, sequences: Sequence[Sequence[int]]) -> tuple[int, int]:
    """How many tokens each may get, and how many slots the cache has; UserError where they do not fit."""
    limit, unit = source.limit or math.inf, source.text.unit
    if arguments.cache is not None and arguments.cache > limit:
        raise UserError(f"--cache {arguments.cache} must be at most {limit}, the max_position_embeddings of the model")
    room, longest = arguments.cache or source.positions, max(map(len, sequences))
    at = [len(sequence) for sequence in sequences].index(longest) + 1
    which = "the prompt" if arguments.prompt is not None else f"line {at}"
    if longest > room:
        raise UserError(f"{which} has {longest} {unit}, must have at most the {room} of the cache (--cache)")
    if arguments.prompts is None and arguments.prompt is None:
        needed, most = longest, 0
    else:
        most = min(_TOKENS, room + 1 - longest) if arguments.tokens is None else arguments.tokens
        needed = longest + most - 1  # nothing looks at the last one
    if needed > room:
        raise UserError(
            f"{which} has {longest} {unit}, so that --tokens must be at most {room + 1 - longest} in a cache of {room} "
            f"(--cache), not {most}"
        )
    return most, arguments.cache or min(-(-needed // _SLOTS) * _SLOTS, room)


def _stream(generator: Generator, text: Text, prompt: str, tokens: list[int], most: int) -> None:
    """Prints the prompt and each piece of text behind it as soon as it is one."""
    print(printable(prompt), end="", flush=True)
    start, times = time.perf_counter(), []
    found: list[int] = []
    told = 0
    for (token,) in generator.stream([tokens], most):
        times.append(time.perf_counter())
        if token in generator.stops:
            break
        found.append(int(token))
        written = text.decode(found)
        if not written.endswith("\N{REPLACEMENT CHARACTER}"):  # perhaps a character that is not complete
            print(printable(written[told:]), end="", flush=True)
            told = len(written)
    print(printable(text.decode(found)[told:]), flush=True)
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
    _say(f"{len(times)} {text.unit}, the first after {times[0] - start:.2f} s, then {rate:.1f}/s")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    arguments = _parser().parse_args(argv)
    preset = hasattr(arguments, "preset")
    if [arguments.run is not None, arguments.checkpoint is not None, preset].count(True) != 1:
        raise UserError("one model is needed: --run FOLDER of a run, --checkpoint FOLDER, or with --time --preset")
    if preset and not arguments.time:
        raise UserError("--preset has no weights but random ones, for --time: give --run FOLDER or --checkpoint FOLDER")
    if arguments.time and arguments.run is not None:
        raise UserError("--time draws random weights: give --preset or --checkpoint, of which it reads config.json")
    to_file = any(given is not None for given in (arguments.prompts, arguments.score, arguments.replay))
    if to_file != (arguments.out is not None):
        raise UserError("--out FILE is needed with --prompts, --score and --replay, and with nothing else")
    if arguments.resume and not to_file:
        raise UserError("--resume goes on with --prompts, --score or --replay, and their --out")
    if arguments.record_experts and arguments.prompts is None:
        raise UserError("--record-experts is for --prompts: what it generates can be replayed")
    if arguments.gpu_bytes is not None and (arguments.record_experts or arguments.replay is not None):
        raise UserError("--record-experts and --replay need all experts on the device: leave --gpu-bytes out")
    if hasattr(arguments, "adapter_from"):
        if arguments.checkpoint is None or arguments.time:
            raise UserError("--adapter-from is put on a public model: give --checkpoint FOLDER, and what to generate")
        if arguments.gpu_bytes is not None:
            raise UserError("--adapter-from needs all experts on the device: leave --gpu-bytes out")
    if arguments.prompt_tokens is not None and not arguments.time:
        raise UserError("--prompt-tokens is for --time, whose prompts are drawn")
    if arguments.expert_bits is not None and arguments.gpu_bytes is None:
        raise UserError("--expert-bits compresses experts in host memory: give --gpu-bytes, such as 24GB, too")
    if arguments.expert_bits is not None and getattr(arguments, "base", "bf16") != "bf16":
        raise UserError(f"--expert-bits compresses bfloat16, leave it or --base {arguments.base} out")
    if arguments.out is not None:
        check_out(arguments.out, resume=arguments.resume)  # before a large model is read
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m train_example.generate",
        description="Generates text with a model, or scores texts by their likelihood.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--run", type=Path, metavar="FOLDER", help="the model of a run: its newest checkpoint")
    add("--checkpoint", type=Path, metavar="FOLDER", help="a public model: OLMoE, Qwen3-MoE or gpt-oss")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="text to go on with, on the terminal")
    what.add_argument("--prompts", type=Path, metavar="FILE", help='a prompt a line; in *.jsonl {"prompt": ...}')
    what.add_argument(
        "--score", type=Path, metavar="FILE", help='a text a line; in *.jsonl {"text": ..., "prompt": ...}'
    )
    what.add_argument(
        "--replay", type=Path, metavar="FOLDER", help="score what --record-experts left, with the experts of then"
    )
    what.add_argument("--time", action="store_true", help="only time it, with random weights: config.json will do")
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="where results of --prompts, --score or --replay go, JSON objects a line",
    )
    add("--resume", action="store_true", help="go on with the results that are in --out")
    add(
        "--record-experts",
        action="store_true",
        help="leave each sequence's tokens and experts in the folder OUT.experts",
    )
    add("--tokens", type=whole(1), metavar="N", help=f"the most to generate ({_TOKENS}, or what fits)")
    add("--temperature", type=number, default=1.0, metavar="T", help="what logits are divided by; 0 is greedy (1)")
    add("--top-k", type=whole(1), metavar="K", help="draw from the K likeliest tokens (all)")
    share = real(lambda value: 0 < value <= 1, "above 0, at most 1")
    add("--top-p", type=share, default=1.0, metavar="P", help="draw from the likeliest ones of that probability (1)")
    add("--stop", action="append", default=[], metavar="TEXT", help="a token that ends a text, beside the model's own")
    add("--seed", type=whole(0), default=0, metavar="N", help="seeds the choices (0)")
    add("--batch-size", type=whole(1), metavar="N", help=f"sequences at a time (at most {_BATCH}; with --time 1)")
    add("--cache", type=whole(1), metavar="N", help="the most tokens of a sequence (what is needed)")
    add("--prompt-tokens", type=whole(1), metavar="N", help="of each prompt of --time (what --tokens leave of --cache)")
    add("--gpu-bytes", type=memory_size, metavar="SIZE", help="what may be used of the GPU; other experts are streamed")
    add("--expert-bits", type=int, choices=(3, 4), help="exponents of streamed experts, compressed without loss")
    add_options(parser, *_OPTIONS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
