"""Writing files of safetensors a tensor's part at a time, with the index that names them."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NamedTuple, Protocol
from uuid import uuid4

import numpy as np

from blaze_jax.checkpoints.errors import CheckpointError
from blaze_jax.checkpoints.folder import DTYPES, INDEX, SINGLE_FILE, Folder, Stored, TensorFile
from blaze_jax.checkpoints.header import METADATA
from blaze_jax.checkpoints.locked import locked
from blaze_jax.progress import counted

LARGEST_FILE = 5 << 30
"""Bytes of tensors after which another file begins."""

COPIED_BYTES = 64 << 20
"""What is copied at a time of a tensor that stays."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Parts(Protocol):
    """What gives a tensor's values, first to last, in arrays whose bytes follow one another."""

    def __call__(self) -> Iterable[np.ndarray]: ...


class NewTensor(NamedTuple):
    """A tensor to be written.

    Attributes:
      name: of the tensor.
      dtype: of its values.
      shape: of the whole.
      parts: gives the values, when they are written.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    parts: Parts

    @property
    def type_name(self) -> str:
        return _NAMES[self.dtype]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Copied(NamedTuple):
    """A tensor of a file that is written anew, of any type: its bytes."""

    stored: Stored

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint8)

    @property
    def type_name(self) -> str:
        return self.stored.dtype

    @property
    def bytes(self) -> int:
        return len(self.stored.raw())

    def parts(self) -> Iterator[np.ndarray]:
        raw = self.stored.raw()
        for start in range(0, len(raw), COPIED_BYTES):
            yield raw[start : start + COPIED_BYTES]


def write_tensors(
    folder: Path,
    tensors: Iterable[NewTensor],
    stem: str = "model",
    taken: tuple[str, ...] = (),
    *,
    overwrite: bool = False,
) -> list[Path]:
    """Adds tensors to a folder, in files named after `stem`, and names them in the folder's index.

    A folder of a single file gets them into that file, which is written anew. Files are complete when they get their
    names. The index comes after new files, and files that it no longer needs, or tensors in them, go last: a reader
    sees the folder as it was, or as it is afterwards. Several processes may write different tensors at the same time.

    Args:
      folder: made where it is missing.
      tensors: what is written.
      stem: how new files' names begin.
      taken: how the names of tensors begin whose place the new ones take.
      overwrite: whether tensors that are there give way, those of `taken` and of the same names; otherwise they are an
        error.

    Returns:
      The files that hold the tensors.

    Raises:
      CheckpointError: the folder is broken, or has what must not be there.
      ValueError: a type that the format does not have.
    """
    tensors = list(tensors)
    for tensor in tensors:
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{tensor.name} has dtype {tensor.dtype}, must be {', '.join(map(str, _NAMES))}")
    names = {tensor.name for tensor in tensors}

    def replaced(name: str) -> bool:
        return name in names or name.startswith(taken)

    def check() -> Folder | None:
        current = Folder(folder) if any((folder / file).exists() for file in (INDEX, SINGLE_FILE)) else None
        if current and not overwrite and (there := [name for name in current.names if replaced(name)]):
            raise CheckpointError(f"{folder}: has the tensor {there[0]!r} already")
        return current

    def checked() -> Folder | None:
        current = Folder(folder) if has_tensors(folder) else None
        if current and not overwrite and (there := [name for name in current.names if replaced(name)]):
            raise CheckpointError(f"{folder}: has the tensor {there[0]!r} already")
        return current

    folder.mkdir(parents=True, exist_ok=True)
    current = checked()  # before the work, and again when nobody else writes
    if current and current.origin.name == SINGLE_FILE:
        with locked(folder):
            current = checked()
            if current and SINGLE_FILE in current.files:
                file = current.files[SINGLE_FILE]
                _rewrite(file, [*_kept(file, replaced), *tensors])
                return [file.path]
    groups = list(_groups(tensors))
    with ExitStack() as stack:
        written = [stack.enter_context(_written(folder / stem, group)) for group in groups]
        stack.enter_context(locked(folder))
        current = checked()
        if current and SINGLE_FILE in current.files:
            raise CheckpointError(f"{current.origin}: was not there when the writing began")
        paths = _free_paths(folder / stem, groups, current)
        for source, path in zip(written, paths, strict=True):
            source.replace(path)
        index = {name: file for name, file in current.file_of.items() if not replaced(name)} if current else {}
        index |= {tensor.name: path.name for path, group in zip(paths, groups, strict=True) for tensor in group}
        if set(index.values()) != {SINGLE_FILE}:
            _write_index(folder, index)
        for file in current.files.values() if current and overwrite else ():
            kept = _kept(file, replaced)
            if not kept:
                file.path.unlink()
            elif len(kept) < len(file.tensors):
                _rewrite(file, kept)
    return paths


def has_tensors(folder: Path) -> bool:
    """Whether the folder has tensors, or what should say where they are."""
    return (folder / INDEX).exists() or (folder / SINGLE_FILE).exists()


def _free_paths(start: Path, groups: list[list[NewTensor]], current: Folder | None) -> list[Path]:
    """Where the files go: to free names, or those of files that a writer left who was stopped before the index."""
    paths = []
    names = {tensor.name for group in groups for tensor in group}
    for number, _ in enumerate(groups):
        of_many = f"-{number + 1:05}-of-{len(groups):05}" if len(groups) > 1 else ""
        tries = (
            start.with_name(f"{start.name}{of_many}{again}.safetensors")
            for again in chain([""], map("-{}".format, count(1)))
        )
        paths.append(next(path for path in tries if not path.exists() or _was_left(path, names, current)))
    return paths


def _was_left(path: Path, names: set[str], current: Folder | None) -> bool:
    if current and path.name in current.files:
        return False
    try:
        return TensorFile(path).tensors.keys() <= names
    except CheckpointError:
        return False


def _write_index(folder: Path, index: dict[str, str]) -> None:
    sizes = [(folder / file).stat().st_size for file in set(index.values()) if (folder / file).exists()]
    content = {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(index.items()))}
    with _unfinished(folder / INDEX) as unfinished:
        with unfinished.open("wb") as file:
            file.write(json.dumps(content, indent=1).encode())
            _to_disk(file)
        unfinished.replace(folder / INDEX)


def _groups(tensors: list[NewTensor]) -> Iterator[list[NewTensor]]:
    group: list[NewTensor] = []
    size = 0
    for tensor in tensors:
        if group and size + tensor.bytes > LARGEST_FILE:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor.bytes
    if group:
        yield group


def _kept(file: TensorFile, replaced: Callable[[str], bool]) -> list[Copied]:
    return [Copied(tensor) for name, tensor in file.tensors.items() if not replaced(name)]


def _rewrite(file: TensorFile, tensors: Sequence[NewTensor | Copied]) -> None:
    """Another content for the file, whose name it gets when it is on the disk."""
    with _written(file.path, tensors, file.metadata) as written:
        written.replace(file.path)


@contextmanager
def _written(
    path: Path, tensors: Sequence[NewTensor | Copied], metadata: Mapping[str, str] = MappingProxyType({"format": "pt"})
) -> Iterator[Path]:
    """A file beside `path` that holds the tensors, for the caller to give it a name; removed where it gets none."""
    tensors = sorted(tensors, key=lambda tensor: (-tensor.bytes // max(math.prod(tensor.shape), 1), tensor.name))
    header: dict[str, object] = {METADATA: dict(metadata)}
    offset = 0
    for tensor in tensors:  # in an order that aligns them all
        offsets = [offset, offset + tensor.bytes]
        header[tensor.name] = {"dtype": tensor.type_name, "shape": tensor.shape, "data_offsets": offsets}
        offset += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _unfinished(path) as unfinished:
        with unfinished.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor, _ in counted(tensors, "tensor"):
                start = file.tell()
                for part in tensor.parts():
                    file.write(np.ascontiguousarray(part, tensor.dtype).reshape(-1).view(np.uint8).data)
                if file.tell() - start != tensor.bytes:
                    raise ValueError(f"{tensor.name} has {file.tell() - start} bytes, must have {tensor.bytes}")
            _to_disk(file)
        yield unfinished


@contextmanager
def _unfinished(path: Path) -> Iterator[Path]:
    """A name beside `path` that nobody else has; what has it at the end is removed."""
    unfinished = path.with_name(f"{path.name}.{uuid4().hex}.unfinished")
    try:
        yield unfinished
    finally:
        unfinished.unlink(missing_ok=True)


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
