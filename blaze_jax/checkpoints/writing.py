"""Writing files of safetensors a tensor's part at a time, with the index that names them."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np

from blaze_jax.checkpoints.errors import CheckpointError
from blaze_jax.checkpoints.folder import DTYPES, INDEX, SINGLE_FILE, Folder
from blaze_jax.checkpoints.json_file import read_json
from blaze_jax.progress import counted

LARGEST_FILE = 5 << 30
"""Bytes of tensors after which another file begins."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Parts(Protocol):
    """What gives a tensor's values, first to last, in arrays of its type whose bytes follow one another."""

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
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def write_tensors(
    folder: Path, tensors: Iterable[NewTensor], stem: str = "model", taken: tuple[str, ...] = ()
) -> list[Path]:
    """Adds tensors to a folder, in files named after `stem`, and names them in the folder's index.

    Files are complete when they get their names. The index comes last: until then a reader sees the folder as it was.

    Raises:
      CheckpointError: the folder has one of the tensors, or one whose name starts as one of `taken`, or a file that
        would be overwritten.
      ValueError: a type that the format does not have.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = list(tensors)
    index = _index(folder)
    for tensor in tensors:
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{tensor.name} has dtype {tensor.dtype}, must be {', '.join(map(str, _NAMES))}")
        if tensor.name in index:
            raise CheckpointError(f"{folder}: has the tensor {tensor.name!r} already")
    if there := [name for name in index if name.startswith(taken)]:
        raise CheckpointError(f"{folder}: has the tensor {there[0]!r} of that layer already")
    groups = list(_groups(tensors))
    paths = []
    for number, group in enumerate(groups):
        of_many = f"-{number + 1:05}-of-{len(groups):05}" if len(groups) > 1 else ""
        path = folder / f"{stem}{of_many}.safetensors"
        if path.exists():
            raise CheckpointError(f"{path}: is there already")
        _write_file(path, group)
        index |= {tensor.name: path.name for tensor in group}
        paths.append(path)
    if set(index.values()) != {SINGLE_FILE}:
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        content = {"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))}
        with _complete_file(folder / INDEX) as file:
            file.write(json.dumps(content, indent=1).encode())
    return paths


def _index(folder: Path) -> dict[str, str]:
    if (folder / INDEX).exists():
        Folder(folder)  # which checks it
        return dict(read_json(folder / INDEX)["weight_map"])
    if (folder / SINGLE_FILE).exists():
        raise CheckpointError(f"{folder / SINGLE_FILE}: is there already, and must hold the whole model")
    return {}


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


def _write_file(path: Path, tensors: list[NewTensor]) -> None:
    tensors = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))  # which aligns all
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        entry = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [offset, offset + tensor.bytes]}
        header[tensor.name] = entry
        offset += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _complete_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor, _ in counted(tensors, "tensor"):
            start = file.tell()
            for part in tensor.parts():
                file.write(np.ascontiguousarray(part, tensor.dtype).reshape(-1).view(np.uint8).data)
            if file.tell() - start != tensor.bytes:
                raise ValueError(f"{tensor.name} has {file.tell() - start} bytes, must have {tensor.bytes}")


@contextmanager
def _complete_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which gets its name, in the place of what had it, once all of it is on the disk."""
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
