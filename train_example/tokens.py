"""Text as the tokens of a public model, by the tokenizer that lies beside its weights."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int32, UInt8

from train_example.data import ByteStream
from train_example.errors import UserError

_CHUNK = 2**20
_FILE = "tokenizer.json"


class TokenStream:
    """All tokens of a text, in memory: four bytes each.

    Args:
      text: the bytes.
      folder: of the model, with `tokenizer.json`.
      vocabulary: how many tokens the model knows.

    Attributes:
      unit: what the stream consists of.
      bytes_per_unit: of the text, a token's share.

    Raises:
      UserError: there is no tokenizer, or one that does not fit the model.
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
        ids = [self._tokenizer.encode(part, add_special_tokens=False).ids for part in _parts(text)]
        self._tokens = np.concatenate([np.asarray(part, np.int32) for part in ids])
        if self._tokens.size and self._tokens.max() >= vocabulary:
            raise UserError(f"{path} has the token {self._tokens.max()}, but the model only {vocabulary}")
        self.bytes_per_unit = len(text) / max(len(self), 1)

    def __len__(self) -> int:
        return self._tokens.size

    def read(self, start: int, length: int) -> Int32[np.ndarray, " N"]:
        """A copy of the tokens from `start` to `start + length`."""
        return self._tokens[start : start + length].copy()

    def decode(self, units: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self._tokenizer.decode(list(units), skip_special_tokens=False)


def _parts(text: ByteStream) -> Iterator[str]:
    """The text in parts of about a MiB that end with a line, where there are lines; a tokenizer splits there, too."""
    rest = b""
    for start in range(0, len(text), _CHUNK):
        part: UInt8[np.ndarray, " N"] = text.read(start, min(_CHUNK, len(text) - start))
        whole, newline, rest = (rest + part.tobytes()).rpartition(b"\n")
        if newline:
            yield (whole + newline).decode(errors="replace")
    yield rest.decode(errors="replace")
