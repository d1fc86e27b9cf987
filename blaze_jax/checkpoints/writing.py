"""Files of safetensors, written a tensor's part at a time, with the index that names them.

A reader may come at any moment: files get their names when they are on the disk, and the index comes after them.
Writers that meet in one folder take turns by a lock on it.
"""

import json
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import numpy as np

from blaze_jax.checkpoints.folder import BITS, INDEX, METADATA, SINGLE_FILE, Folder, TensorFile, has_tensors
from blaze_jax.json_file import CheckpointError
from blaze_jax.progress import counted

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = ".blaze_jax.lock"

LARGEST_FILE = 5 << 30
"""Bytes of tensors after which another file begins."""


class NewTensor(NamedTuple):
    """A tensor to be written.

    Attributes:
      name: the tensor's name.
      dtype: the type of its values, by the format's name.
      shape: the whole shape.
      parts: gives the values when they are written, first to last, in arrays whose bytes follow one another.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[np.ndarray]]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


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
    """
    tensors = list(tensors)
    names = {tensor.name for tensor in tensors}

    def replaced(name: str) -> bool:
        return name in names or name.startswith(taken)

    def checked() -> tuple[dict[str, TensorFile], dict[str, str]]:
        """Returns the files that are there, and the name of each tensor's."""
        if not has_tensors(folder):
            return {}, {}
        current = Folder(folder)
        if not overwrite and (there := [name for name in current.names if replaced(name)]):
            raise CheckpointError(f"{folder}: has the tensor {there[0]!r} already")
        return current.files, current.file_of

    folder.mkdir(parents=True, exist_ok=True)
    checked()  # before the work, and again when nobody else writes
    if (folder / SINGLE_FILE).exists():
        with locked(folder):
            files, _ = checked()
            if file := files.get(SINGLE_FILE):
                _rewrite(file, [*_kept(file, replaced), *tensors])
                return [file.path]
    groups, paths = _groups(tensors), []
    with ExitStack() as stack:
        contents = [file_content(group, {"format": "pt"}) for group in groups]
        complete = [stack.enter_context(written(folder / stem, content)) for content in contents]
        stack.enter_context(locked(folder))
        files, file_of = checked()
        if SINGLE_FILE in files:
            raise CheckpointError(f"{folder / SINGLE_FILE}: was not there when the writing began")
        index = {name: file for name, file in file_of.items() if not replaced(name)}
        for number, (group, unfinished) in enumerate(zip(groups, complete, strict=True), start=1):
            of_many = f"-{number:05}-of-{len(groups):05}" if len(groups) > 1 else ""
            paths.append(_free_path(folder / f"{stem}{of_many}", names, files))
            rename(unfinished, paths[-1])
            index |= {tensor.name: paths[-1].name for tensor in group}
        if set(index.values()) != {SINGLE_FILE}:
            _write_index(folder, index)
        for file in files.values() if overwrite else ():
            kept = _kept(file, replaced)
            if not kept:
                file.path.unlink()
            elif len(kept) < len(file.tensors):
                _rewrite(file, kept)
    return paths


def _free_path(start: Path, names: set[str], files: Collection[str]) -> Path:
    """Returns where a file goes: to a free name, or that of one that a writer left who was stopped before the index."""

    def is_free(path: Path) -> bool:
        try:
            return not path.exists() or (path.name not in files and TensorFile(path).tensors.keys() <= names)
        except CheckpointError:
            return False

    ends = chain([""], map("-{}".format, count(1)))
    return next(filter(is_free, (start.with_name(f"{start.name}{end}.safetensors") for end in ends)))


def _write_index(folder: Path, index: dict[str, str]) -> None:
    sizes = [(folder / file).stat().st_size for file in set(index.values()) if (folder / file).exists()]
    content = {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(index.items()))}
    with written(folder / INDEX, [json.dumps(content, indent=1).encode()]) as unfinished:
        rename(unfinished, folder / INDEX)


def _groups(tensors: list[NewTensor]) -> list[list[NewTensor]]:
    """Returns the tensors of each file."""
    groups, size = [], math.inf
    for tensor in tensors:
        if size + tensor.bytes > LARGEST_FILE:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.bytes
    return groups


def _kept(file: TensorFile, replaced: Callable[[str], bool]) -> list[NewTensor]:
    """Returns the tensors of a file that stay, of any type: their bytes."""
    return [
        NewTensor(name, tensor.dtype, tensor.shape, lambda raw=tensor.raw: [raw])
        for name, tensor in file.tensors.items()
        if not replaced(name)
    ]


def _rewrite(file: TensorFile, tensors: Sequence[NewTensor]) -> None:
    """Gives the file another content, which gets its name when it is on the disk."""
    with written(file.path, file_content(tensors, file.metadata)) as unfinished:
        rename(unfinished, file.path)


def file_content(tensors: Sequence[NewTensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a file of the tensors."""
    tensors = sorted(tensors, key=lambda tensor: (-BITS[tensor.dtype], tensor.name))  # so that all are aligned
    header: dict[str, object] = {METADATA: dict(metadata)}
    offset = 0
    for tensor in tensors:
        offsets = [offset, offset + tensor.bytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        offset += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor, _ in counted(tensors, "tensor"):
        size = 0
        for part in tensor.parts():
            size += part.nbytes
            yield np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
        if size != tensor.bytes:
            raise ValueError(f"{tensor.name} has {size} bytes, must have {tensor.bytes}")


@contextmanager
def written(path: Path, content: Iterable[bytes | memoryview]) -> Iterator[Path]:
    """Writes a file beside `path`, under a name that nobody else has, for the caller to rename; else it is removed."""
    unfinished = path.with_name(f"{path.name}.{uuid4().hex}.unfinished")
    try:
        with unfinished.open("wb") as file:
            for part in content:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        yield unfinished
    finally:
        unfinished.unlink(missing_ok=True)


def rename(unfinished: Path, path: Path) -> None:
    """Gives a file its name, which is on the disk afterwards, where the system can say so of folders."""
    unfinished.replace(path)
    with suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Waits until nobody else is in this block with the folder. The lock's file is there only meanwhile.

    Where the system or the folder's disk has no such locks, a warning says so, and only one process may write.
    """
    if fcntl is None:
        _warn(folder, "this system has no flock")
        yield
        return
    path = folder / LOCK
    while True:
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                if not _is_at(path, file.fileno()):
                    continue
            except OSError as error:
                _warn(folder, str(error))
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _warn(folder: Path, reason: str) -> None:
    warnings.warn(f"{folder} cannot be locked ({reason}): let one process at a time write into it", stacklevel=4)


def _is_at(path: Path, file: int) -> bool:
    """Tells whether the open file has that name still: who had the lock removed it, and another may have a new one."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
