"""The tensors of a folder: which file holds each, its type and shape, and parts of it."""

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from blaze_jax.checkpoints.errors import CheckpointError, import_safetensors
from blaze_jax.checkpoints.header import read_header
from blaze_jax.checkpoints.json_file import read_json

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "U8": np.dtype(np.uint8),
}
"""Names of safetensors for the types that public checkpoints use."""


class Stored(NamedTuple):
    """A tensor in a file, not read yet.

    Attributes:
      name: of the tensor.
      dtype: its type, by the name that safetensors gives it: "BF16".
      shape: its shape.
      file: the file that holds it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: "TensorFile"

    def __str__(self):
        return f"{self.file.path}: tensor {self.name!r}"

    def require(self, dtypes: Sequence[str], shape: Sequence[int]) -> None:
        """Raises CheckpointError unless the tensor has that shape and one of those types."""
        if self.shape != tuple(shape):
            raise CheckpointError(f"{self} has shape {self.shape}, must have {tuple(shape)}")
        if self.dtype not in dtypes:
            raise CheckpointError(f"{self} has dtype {self.dtype}, must have {' or '.join(dtypes)}")

    def raw(self) -> np.ndarray:
        """The bytes, mapped."""
        return self.file.bytes_of(self.name)

    def read(self, *index: int | slice) -> np.ndarray:
        """A part of the tensor, `tensor[index]`, with whole slices for the axes not named; only it is read."""
        return self.file.read(self, index)


class TensorFile:
    """One file of safetensors, whose header this module and that library have found sound.

    Args:
      path: the file.

    Attributes:
      path: the file.
      tensors: what it holds, by name.
      metadata: what else its header says.

    Raises:
      CheckpointError: no such file, or none of safetensors; the message names the tensor where one is wrong.
      MissingExtraError: safetensors is not installed.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file")
        self._entries, self.metadata = read_header(path)
        self._open = _guarded(path, import_safetensors().safe_open, path, framework="numpy")
        self.tensors = {name: Stored(name, entry.dtype, entry.shape, self) for name, entry in self._entries.items()}

    def read(self, tensor: Stored, index: tuple[int | slice, ...]) -> np.ndarray:
        if tensor.dtype == "F8_E4M3":
            return self._read_float8(tensor, index)
        part = self._open.get_slice(tensor.name)
        # Slices of older releases ignore steps: numpy takes those.
        runs = tuple(slice(i.start, i.stop) if isinstance(i, slice) else i for i in index)
        steps = tuple(slice(None, None, i.step) for i in index if isinstance(i, slice))
        return _guarded(self.path, lambda: part[runs or slice(None)])[steps]

    def _read_float8(self, tensor: Stored, index: tuple[int | slice, ...]) -> np.ndarray:
        """Slices of safetensors know no type that numpy does not have: these bytes are mapped here."""
        values = self.bytes_of(tensor.name).view(DTYPES[tensor.dtype]).reshape(tensor.shape)
        return np.array(values[index])

    def bytes_of(self, name: str) -> np.ndarray:
        """The bytes of a tensor of any type, mapped."""
        entry = self._entries[name]
        if entry.start == entry.stop:  # which cannot be mapped
            return np.zeros(0, np.uint8)
        return np.memmap(self.path, np.uint8, mode="r", offset=entry.start, shape=(entry.stop - entry.start,))


class Folder:
    """The tensors of a checkpoint: those of its one file, or those that its index names.

    Args:
      path: the folder, with `model.safetensors`, or with `model.safetensors.index.json` and the files it names.

    Every file that is there is opened, and its header is checked. One that an index names and that is not there is an
    error when a tensor of it is asked for: a part of a large model may be on the disk.

    Attributes:
      path: the folder.
      origin: the file that says which tensors there are.
      files: those that are there, by name.
      file_of: the name of each tensor's file.

    Raises:
      CheckpointError: neither is there, or both, or the index leaves the folder, or names a tensor that its file has
        not, or a file is broken; the message names the file, and the tensor.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: no such folder")
        has_file, has_index = (self.path / SINGLE_FILE).exists(), (self.path / INDEX).exists()
        if has_file and has_index:
            raise CheckpointError(f"{self.path}: holds {SINGLE_FILE} and {INDEX}: which one counts?")
        if not has_file and not has_index:
            raise CheckpointError(f"{self.path}: holds neither {SINGLE_FILE} nor {INDEX}")
        self.origin = self.path / (SINGLE_FILE if has_file else INDEX)
        if has_file:
            self.files = {SINGLE_FILE: TensorFile(self.origin)}
            self.file_of = dict.fromkeys(self.files[SINGLE_FILE].tensors, SINGLE_FILE)
        else:
            self.file_of = self._index()
            files = sorted(set(self.file_of.values()))
            self.files = {file: TensorFile(self.path / file) for file in files if os.path.exists(self.path / file)}
            for name, file in self.file_of.items():
                if file in self.files and name not in self.files[file].tensors:
                    raise CheckpointError(
                        f"{self.path / file}: tensor {name!r} is missing, which {INDEX} says is there"
                    )

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self.file_of)

    def __contains__(self, name: str) -> bool:
        return name in self.file_of

    def __getitem__(self, name: str) -> Stored:
        if name not in self.file_of:
            raise CheckpointError(f"{self.origin}: tensor {name!r} is missing")
        file = self.file_of[name]
        if file not in self.files:
            raise CheckpointError(f"{self.path / file}: no such file, which {INDEX} says has the tensor {name!r}")
        return self.files[file].tensors[name]

    def read_config(self) -> dict[str, Any]:
        """The content of `config.json`."""
        return read_json(self.path / "config.json")

    def _index(self) -> dict[str, str]:
        path = self.path / INDEX
        names = read_json(path).get("weight_map")
        if not isinstance(names, dict):
            raise CheckpointError(f"{path}: weight_map must be an object from tensors to files")
        for file in set(map(str, names.values())):
            if not _stays_inside(file):
                raise CheckpointError(f"{path}: names the file {file!r}, must be a .safetensors inside the folder")
        return {name: str(file) for name, file in names.items()}


def _stays_inside(file: str) -> bool:
    """Whether a name of an index stays in its folder, on any system. Links are the user's: caches are full of them."""
    for path in (PurePosixPath(file), PureWindowsPath(file)):
        if path.is_absolute() or path.drive or path.root or ".." in path.parts:
            return False
    return file.endswith(".safetensors") and "\0" not in file


def _guarded(path: Path, function, *arguments, **options):
    """The result of a function of safetensors, whose errors become those of the file."""
    errors = (import_safetensors().SafetensorError, OSError, ValueError)
    try:
        return function(*arguments, **options)
    except errors as error:
        raise CheckpointError(f"{path}: safetensors cannot read it: {error}") from error
