"""The text: any number of bytes on disk, or tokens, as one stream, batches and the held-out part of it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from jaxtyping import Int, Integer

from train_example.config import VOCABULARY, UserError

type Units = Integer[np.ndarray, " N"]

_MAX_HELD_OUT = 16 * 2**20


def _text_of_bytes(units: Sequence[int]) -> str:
    return bytes(units).decode(errors="replace")


@dataclass
class Stream:
    """Documents laid end to end, as numbers. Files are read where they are asked for, never whole.

    Attributes:
      documents: arrays of numbers, and paths of files that consist of bytes and are not empty.
      unit: what a number stands for.
      bytes_per_unit: how many bytes of text that is, in the mean.
      end: the number that ends each document; None where none does.
      decode: the text of numbers, with what is no text replaced.
      ends: where each document ends.
    """

    documents: Sequence[Units | Path]
    unit: str = "bytes"
    bytes_per_unit: float = 1.0
    end: int | None = None
    decode: Callable[[Sequence[int]], str] = _text_of_bytes

    def __post_init__(self):
        sizes = [one.stat().st_size if isinstance(one, Path) else one.size for one in self.documents]
        self.ends: Int[np.ndarray, " documents"] = np.cumsum(sizes, dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, start: int, length: int) -> Units:
        """A copy of the numbers from `start` to `start + length`; UserError for a file that has changed its size."""
        pieces, stop = [], start + length
        document = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            source, end = self.documents[document], int(self.ends[document])
            first = int(self.ends[document - 1]) if document else 0
            part = slice(start - first, min(stop, end) - first)
            pieces.append(_read(source, end - first, part) if isinstance(source, Path) else source[part])
            start = end
            document += 1
        return np.concatenate(pieces)


class Corpus:
    """A stream split into a training part and the held-out part that ends it: a tenth, 16 Mi units at most.

    Attributes:
      stream: all of the text.
      sequence_length: S.
      vocabulary: one more than the largest number in the stream can be.
      training_units: size of the part that batches are drawn from.

    Raises:
      UserError: a part is shorter than one sequence and the byte after it.
    """

    def __init__(self, stream: Stream, sequence_length: int, vocabulary: int = VOCABULARY):
        window = sequence_length + 1
        if len(stream) < 2 * window:
            raise UserError(
                f"the text has {len(stream)} {stream.unit}, must have at least {2 * window} for sequences of "
                f"{sequence_length}: give more text or a smaller --sequence-length"
            )
        self.stream = stream
        self.sequence_length = sequence_length
        self.vocabulary = vocabulary
        self.training_units = len(stream) - max(window, min(len(stream) // 10, _MAX_HELD_OUT))

    def batch_starts(self, seed: int, step: int, batch_size: int) -> Int[np.ndarray, " B"]:
        """Where the windows of a step's batch start, anywhere in the training part; the same for equal arguments."""
        last = self.training_units - self.sequence_length - 1
        return np.random.default_rng((seed, step)).integers(last, size=batch_size, dtype=np.int64, endpoint=True)

    def held_out_starts(self, most: int, multiple: int) -> Int[np.ndarray, " N"]:
        """Starts of evenly spaced windows that cover the held-out part, or of `most`; N is rounded up to a multiple."""
        count = -(-min(most, math.ceil(self.held_out_units / self.sequence_length)) // multiple) * multiple
        last = len(self.stream) - self.sequence_length - 1
        return np.linspace(self.training_units, last, count).astype(np.int64)

    @property
    def held_out_units(self) -> int:
        return len(self.stream) - self.training_units

    def windows(self, starts: Int[np.ndarray, "*B"]) -> Integer[np.ndarray, "*B S+1"]:
        """A sequence and the byte after it from each start."""
        windows = [self.stream.read(start, self.sequence_length + 1) for start in starts.ravel().tolist()]
        return np.stack(windows).reshape(*starts.shape, -1)


def open_text(path: str | None) -> Stream:
    """A file; all files below a folder, in order of their paths, not the hidden or empty ones; or Python's own topics.

    Args:
      path: the file or folder; None for the reference texts that `help()` shows, half a megabyte of English.

    Raises:
      UserError: there is nothing to read at `path`.
    """
    if path is None:
        text = "\n".join(topics[name] for name in sorted(topics))
        return Stream([np.frombuffer(text.encode(), np.uint8)])
    root = Path(path)
    try:
        if not root.exists():
            raise UserError(f"--data {path} does not exist, must be a file or folder of text")
        files = [root] if root.is_file() else sorted(_visible_files(root)) if root.is_dir() else []
        files = [file for file in files if file.stat().st_size]
        if not files:
            raise UserError(f"--data {path} holds no text, must be a file that is not empty or a folder of such files")
        for file in files:
            file.open("rb").close()
    except OSError as error:
        raise UserError(f"--data cannot be read: {error.filename}: {error.strerror}") from error
    return Stream(files)


def _visible_files(root: Path) -> list[Path]:
    found = []
    for folder, folders, files in root.walk():
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [folder / name for name in files if not name.startswith(".") and (folder / name).is_file()]
    return found


def _read(path: Path, size: int, part: slice) -> Units:
    """Bytes of a file of that size. They are not mapped: who maps a file that is cut then is killed."""
    try:
        if path.stat().st_size == size:
            found = np.fromfile(path, np.uint8, part.stop - part.start, offset=part.start)
            if found.size == part.stop - part.start:
                return found
    except OSError as error:
        raise UserError(f"--data {path} cannot be read any more: {error.strerror}") from error
    raise UserError(f"--data {path} has another size than when it was opened: let texts be as they are during a run")
