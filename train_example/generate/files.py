"""Prompts or texts from a file, through the model in batches, results into another file; a stopped run goes on.

The batches are those of the whole file each time: what is left has the same neighbours, and so the same bits.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from train_example.config import UserError
from train_example.generate.decoding import Generator
from train_example.generate.models import Text
from train_example.generate.replay import Recorded, write_recorded
from train_example.program.metrics import read_metrics

type Record = dict[str, Any]

_SETTINGS = ".settings"
_EXPERTS = ".experts"


class Item(NamedTuple):
    """A line of a file of prompts or texts.

    Attributes:
      prompt: what the model is given.
      text: what is scored behind it; None where it is to be generated.
      prompt_tokens: the tokens of the prompt.
      tokens: the tokens of both.
    """

    prompt: str
    text: str | None
    prompt_tokens: list[int]
    tokens: list[int]


def read_items(path: Path, text: Text, *, scored: bool) -> list[Item]:
    """The lines of a file: each a text, or in a file *.jsonl an object with "prompt", or if `scored` with "text".

    Raises:
      UserError: it cannot be read, or a line has nothing.
    """
    name, items = "text" if scored else "prompt", []
    for number, line in enumerate(_lines(path), 1):
        given = {name: line}
        if path.suffix == ".jsonl":
            try:
                given = json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}, line {number}: is no JSON ({error})") from error
            wanted = ("prompt", "text") if scored else ("prompt",)
            if (
                not isinstance(given, dict)
                or name not in given
                or any(type(given.get(n, "")) is not str for n in wanted)
            ):
                raise UserError(f"{path}, line {number}: must be an object with a string {name!r}")
        if not given[name]:
            raise UserError(f"{path}, line {number}: the {name} is empty, must have one token at least")
        prompt, scored_text = given.get("prompt", ""), given["text"] if scored else None
        tokens = text.encode(prompt)
        items.append(Item(prompt, scored_text, tokens, tokens + text.encode(scored_text or "")))
    if not items:
        raise UserError(f"{path} is empty, must have a {name} on each line")
    return items


def recorded_items(recorded: Sequence[Recorded], text: Text) -> list[Item]:
    """What is scored of recorded sequences."""
    pairs = [(one.tokens[: one.prompt].tolist(), one.tokens.tolist()) for one in recorded]
    return [Item(text.decode(p), text.decode(tokens[len(p) :]), p, tokens) for p, tokens in pairs]


def generate_file(
    generator: Generator, text: Text, items: Sequence[Item], most: int, results: "Results"
) -> Iterator[Record]:
    """Generates for what is not done, and yields each record when it is on the disk.

    A generator that records leaves its sequences in the folder `results.experts` first.
    """

    def run(batch: list[int]) -> list[Record]:
        prompts = [items[i].tokens for i in batch]
        if generator.record:
            sequences = generator.recorded(prompts, most, batch)
            for i, recorded in zip(batch, sequences, strict=True):
                write_recorded(results.experts, i, recorded)
            found = [recorded.tokens[recorded.prompt :].tolist() for recorded in sequences]
        else:
            found = generator.generate(prompts, most, batch)
        return [_generated(i, items[i], tokens, text, generator.stops) for i, tokens in zip(batch, found, strict=True)]

    return _in_batches(items, generator.batch, results, run)


def score_file(
    generator: Generator, items: Sequence[Item], results: "Results", recorded: Sequence[Recorded] | None = None
) -> Iterator[Record]:
    """Scores what is not done, with the experts that are `recorded`, and yields each record when it is on the disk."""

    def run(batch: list[int]) -> list[Record]:
        taken = None if recorded is None else [recorded[i] for i in batch]
        found = generator.score([items[i].tokens for i in batch], taken)
        return [_scored(i, items[i], scores) for i, scores in zip(batch, found, strict=True)]

    return _in_batches(items, generator.batch, results, run)


class Results:
    """A file of records, one JSON object a line, and beside it the settings that they belong to.

    Args:
      path: the file.
      settings: what decides the results.
      resume: whether to go on with what is there.
      record: whether there is a folder of recorded sequences, which is made when missing.

    Attributes:
      records: all records, by index.
      experts: that folder, beside the file.

    Raises:
      UserError: the file is there and not to be gone on with, or it is of other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any], *, resume: bool, record: bool = False):
        beside = path.with_name(path.name + _SETTINGS)
        written = json.dumps(settings, indent=1)
        self.records: dict[int, Record] = {}
        self.experts = path.with_name(path.name + _EXPERTS)
        try:
            check_out(path, resume=resume)
            if resume:
                before = json.loads(beside.read_text())
                other = [n for n in settings.keys() | before.keys() if settings.get(n) != before.get(n)]
                for name in sorted(other):
                    raise UserError(
                        f"{path} is of {name} {before.get(name)}, cannot be resumed with {settings.get(name)}: choose "
                        "another --out"
                    )
                self.records = {record["index"]: record for record in read_metrics(path)}
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                beside.write_text(written)
            if record:
                self.experts.mkdir(exist_ok=True)
            self._path = path
            self._replace()
            self._file = path.open("a", buffering=1, encoding="utf-8")
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"--out {path} cannot be used: {error}") from error

    def write(self, records: Sequence[Record]) -> None:
        """Appends them; they outlive the process."""
        self.records |= {record["index"]: record for record in records}
        self._file.write("".join(map(_line, records)))

    def close(self) -> None:
        """Leaves the records in the order of their index."""
        self._file.close()
        self._replace()

    def _replace(self) -> None:
        unfinished = self._path.with_name(self._path.name + ".unfinished")
        unfinished.write_text("".join(_line(self.records[i]) for i in sorted(self.records)), encoding="utf-8")
        os.replace(unfinished, self._path)


def check_out(path: Path, *, resume: bool) -> None:
    """Raises UserError if the file is there, or with `resume` if it is not."""
    if path.is_dir():
        raise UserError(f"--out {path} is a folder, must be a file")
    if path.exists() and not resume:
        raise UserError(f"--out {path} is there already: go on with it by --resume, or choose another file")
    if resume and not (path.exists() and path.with_name(path.name + _SETTINGS).exists()):
        raise UserError(f"nothing to resume: {path} or {path.name}{_SETTINGS} is missing; leave --resume out")


def digest(path: Path) -> str:
    """The SHA-256 of a file, or of the records in a folder, one after the other."""
    found = hashlib.sha256()
    for file in sorted(path.glob("*.npz")) if path.is_dir() else [path]:
        found.update(file.read_bytes())
    return found.hexdigest()


def _in_batches(
    items: Sequence[Item], size: int, results: Results, run: Callable[[list[int]], list[Record]]
) -> Iterator[Record]:
    by_length = sorted(range(len(items)), key=lambda i: (-len(items[i].tokens), i))  # the least padding
    batches = [by_length[start : start + size] for start in range(0, len(items), size)]
    with tqdm(total=len(items), initial=len(results.records), unit="line", disable=None, dynamic_ncols=True) as bar:
        for batch in batches:
            if missing := set(batch) - results.records.keys():
                records = [record for record in run(batch) if record["index"] in missing]
                results.write(records)
                bar.update(len(records))
                yield from records


def _generated(index: int, item: Item, tokens: list[int], text: Text, stops: np.ndarray) -> Record:
    stopped = bool(tokens) and tokens[-1] in stops
    written = text.decode(tokens[:-1] if stopped else tokens)
    return {"index": index, "prompt": item.prompt, "text": written, "tokens": len(tokens), "stopped": stopped}


def _scored(index: int, item: Item, scores: np.ndarray) -> Record:
    scores = scores[max(len(item.prompt_tokens) - 1, 0) :].astype(np.float64)
    told = {"prompt": item.prompt} if item.prompt else {}
    return {"index": index, **told, "text": item.text, "tokens": scores.size, "log_likelihood": float(scores.sum())}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n") if path.stat().st_size else []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n"
