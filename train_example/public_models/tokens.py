"""Text as the tokens of a public model, by the tokenizer that lies beside its weights."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from blaze_jax.checkpoints import CheckpointError
from blaze_jax.json_file import read_json
from train_example.config import UserError
from train_example.data import ByteStream

_CHUNK = 2**20
_FILE = "tokenizer.json"
_NAMES_THE_END = {
    "config.json": "eos_token_id",
    "generation_config.json": "eos_token_id",
    "tokenizer_config.json": "eos_token",
}


class TokenStream:
    """All tokens of a text, in memory: four bytes each. Every document ends with the model's own end token.

    Args:
      text: the bytes, UTF-8.
      folder: the model's folder, with `tokenizer.json`.
      vocabulary: how many tokens the model knows.

    Attributes:
      unit: what the stream consists of.
      bytes_per_unit: how many bytes of text a token stands for.
      documents: how many there are.
      end: the token that ends each; None where the model's files name none.

    Raises:
      UserError: there is no tokenizer, or one that does not fit the model, or the text is no UTF-8.
    """

    unit = "tokens"

    def __init__(self, text: ByteStream, folder: str | Path, vocabulary: int):
        path = Path(folder) / _FILE
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise UserError("--checkpoint needs the package tokenizers: install the extra train") from error
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower one
            raise UserError(f"--checkpoint {folder}: {path.name} cannot be read: {error}") from error
        # Files are published with those of whoever used the tokenizer last.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.end = _end_token(Path(folder), self._tokenizer)
        pieces = []
        for document in range(text.documents):
            pieces += [self._tokenizer.encode(part, add_special_tokens=False).ids for part in _parts(text, document)]
            pieces.append([] if self.end is None else [self.end])
        self._tokens = np.concatenate([np.asarray(piece, np.int32) for piece in pieces])
        if self._tokens.size and self._tokens.max() >= vocabulary:
            raise UserError(f"{path} has the token {self._tokens.max()}, but the model only {vocabulary}")
        self.documents = text.documents
        self.bytes_per_unit = len(text) / max(len(self), 1)

    def __len__(self) -> int:
        return self._tokens.size

    def read(self, start: int, length: int) -> Int32[np.ndarray, " N"]:
        """A copy of the tokens from `start` to `start + length`."""
        return self._tokens[start : start + length].copy()

    def decode(self, units: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self._tokenizer.decode(list(units), skip_special_tokens=False)


def _end_token(folder: Path, tokenizer: Any) -> int | None:
    """The id of the token that ends a text, the first where there are several; None where no file names one.

    Raises:
      UserError: a file cannot be read, or names what is no token.
    """
    for name, field in _NAMES_THE_END.items():
        try:
            end = read_json(folder / name).get(field) if (folder / name).exists() else None
        except CheckpointError as error:
            raise UserError(f"--checkpoint {folder}: {error}") from error
        end = end[0] if isinstance(end, list) and end else end.get("content") if isinstance(end, dict) else end
        if end is None:
            continue
        found = tokenizer.token_to_id(end) if isinstance(end, str) else end
        if type(found) is not int or not 0 <= found < 2**32 or tokenizer.id_to_token(found) is None:
            raise UserError(f"--checkpoint {folder}: {name} has {field}={end!r}, which {_FILE} has not")
        return found
    return None


def _parts(text: ByteStream, document: int) -> Iterator[str]:
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
        raise UserError(
            f"--data: {text.parts[document]} is not UTF-8 ({error.reason}: {error.object[error.start : error.end]!r}): "
            "convert it, for instance with iconv, or leave it out"
        ) from error
