"""Text as the tokens of a public model, by the tokenizer that lies beside its weights."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from blaze_jax.checkpoints import CheckpointError
from blaze_jax.json_file import read_json
from train_example.config import UserError
from train_example.data import Stream

_CHUNK = 2**20
_FILE = "tokenizer.json"
_NAMES_THE_END = {
    "config.json": "eos_token_id",
    "generation_config.json": "eos_token_id",
    "tokenizer_config.json": "eos_token",
}


def token_stream(text: Stream, folder: str | Path, vocabulary: int) -> Stream:
    """All tokens of a text, in memory: four bytes each. Every document ends with the end token that the model names.

    Args:
      text: the bytes, UTF-8.
      folder: the model's folder, with `tokenizer.json`.
      vocabulary: how many tokens the model knows.

    Raises:
      UserError: there is no tokenizer, or one that does not fit the model, or the text is no UTF-8.
    """
    path = Path(folder) / _FILE
    tokenizer = open_tokenizer(folder)
    end = next(iter(end_tokens(folder, tokenizer)), None)
    documents = []
    for document in range(len(text.documents)):
        pieces = [tokenizer.encode(part, add_special_tokens=False).ids for part in _parts(text, document)]
        pieces.append([] if end is None else [end])
        documents.append(np.concatenate([np.asarray(piece, np.int32) for piece in pieces]))
    largest = max(tokens.max(initial=0) for tokens in documents)
    if largest >= vocabulary:
        raise UserError(f"{path} has the token {largest}, but the model only {vocabulary}")
    bytes_per_token = len(text) / max(sum(tokens.size for tokens in documents), 1)
    return Stream(documents, "tokens", bytes_per_token, end, partial(tokenizer.decode, skip_special_tokens=False))


def open_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer beside a public model's weights; UserError where there is none."""
    path = Path(folder) / _FILE
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower one
        raise UserError(f"--checkpoint {folder}: {path.name} cannot be read: {error}") from error
    # Files are published with those of whoever used the tokenizer last.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_tokens(folder: str | Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids of the tokens that end a text, by the first file that names any; empty where none does.

    Raises:
      UserError: a file cannot be read, or names what is no token.
    """
    for name, field in _NAMES_THE_END.items():
        path = Path(folder) / name
        try:
            named = read_json(path).get(field) if path.exists() else None
        except CheckpointError as error:
            raise UserError(f"--checkpoint {folder}: {error}") from error
        found = []
        for end in named if isinstance(named, list) else [named]:
            end = end.get("content") if isinstance(end, dict) else end
            if end is None:
                continue
            token = tokenizer.token_to_id(end) if isinstance(end, str) else end
            if type(token) is not int or not 0 <= token < 2**32 or tokenizer.id_to_token(token) is None:
                raise UserError(f"--checkpoint {folder}: {name} has {field}={end!r}, which {_FILE} has not")
            found.append(token)
        if found:
            return tuple(found)
    return ()


def _parts(text: Stream, document: int) -> Iterator[str]:
    """A document in parts of about a MiB that end with a line, where there are lines; a tokenizer splits there, too."""
    end = int(text.ends[document])
    first = int(text.ends[document - 1]) if document else 0
    rest = b""
    try:
        for start in range(first, end, _CHUNK):
            part = text.read(start, min(_CHUNK, end - start))
            whole, newline, rest = (rest + part.tobytes()).rpartition(b"\n")
            if newline:
                yield (whole + newline).decode()
        yield rest.decode()
    except UnicodeDecodeError as error:
        found = f"{error.reason}: {error.object[error.start : error.end]!r}"
        raise UserError(
            f"--data: {text.documents[document]} is not UTF-8 ({found}): convert it, for instance with iconv, or leave "
            "it out"
        ) from error
