"""Tensors of a folder in the format safetensors: which file holds each, its type and shape, and parts of it.

`Folder` opens every file that is there and checks its header in full, before a byte of a tensor is read. Files are
mapped into memory, and parts of tensors are copied out of them.
"""

import math
import os
import sys
from collections.abc import Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from blaze_jax.checks import shown
from blaze_jax.json_file import LARGEST, CheckpointError, parse_json, read_json

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

METADATA = "__metadata__"
_MOST_AXES = 64

_WITHOUT_DESCRIPTOR = {"trackfd": False} if sys.version_info >= (3, 13) and os.name == "posix" else {}
"""Before Python 3.13 each mapping keeps a file descriptor; models have hundreds of files."""

DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
DTYPES |= {"F8_E4M3": jnp.float8_e4m3fn, "F8_E5M2": jnp.float8_e5m2, "BOOL": np.bool_}
DTYPES |= {f"{kind}{8 * size}": f"{kind.lower()}{size}" for kind in "IU" for size in (1, 2, 4, 8)}
DTYPES = {name: np.dtype(dtype) for name, dtype in DTYPES.items()}
"""Types that numpy and jax have, by the format's names."""

BITS = {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64}
BITS |= dict.fromkeys(["F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"], 8)
"""Bits of a number, for each type of the format."""


class MissingExtraError(ImportError):
    """Kept for programs that catch it: reading needed the package safetensors once, and needs none today."""


class Stored(NamedTuple):
    """A tensor in a file, not read yet.

    Attributes:
      name: the tensor's name.
      dtype: its type, by the name that the format gives it: "BF16".
      shape: its shape.
      path: the file that holds it.
      raw: its bytes, mapped.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    raw: np.ndarray

    def __str__(self):
        return f"{self.path}: tensor {self.name!r}"

    def require(self, dtypes: Sequence[str], shape: Sequence[int]) -> None:
        """Raises CheckpointError unless the tensor has that shape and one of those types."""
        if self.shape != tuple(shape):
            raise CheckpointError(f"{self} has shape {self.shape}, must have {tuple(shape)}")
        if self.dtype not in dtypes:
            raise CheckpointError(f"{self} has dtype {self.dtype}, must have {' or '.join(dtypes)}")

    def mapped(self) -> np.ndarray:
        """Returns the tensor where it is mapped, not read yet."""
        if self.dtype not in DTYPES:
            raise CheckpointError(f"{self} has dtype {self.dtype}, which numpy has not")
        return self.raw.view(DTYPES[self.dtype]).reshape(self.shape)

    def read(self, *index: int | slice) -> np.ndarray:
        """Reads a part of the tensor, `tensor[index]`, with whole slices for the axes not named, and nothing else."""
        return copied(self.mapped()[index])


def copied(mapped: np.ndarray) -> np.ndarray:
    """Reads a part of a mapped tensor; its axes lie in memory in the order that they have in the file."""
    bits = mapped.view(f"u{mapped.itemsize}")  # numpy copies runs of these, but other types number by number
    return np.array(bits).view(mapped.dtype)


class TensorFile:
    """One file of tensors, whose header is sound: each has the bytes that its type and shape need, for itself.

    Args:
      path: the file.

    Attributes:
      path: the file.
      tensors: what it holds, by name.
      metadata: what else its header says.

    Raises:
      CheckpointError: no such file, it cannot be read or is cut, its header is none, or a tensor's bytes are not there,
        are another's, too, or not as many as its type and shape say; the message names the file and the tensor.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file")
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > min(size - 8, LARGEST):
                    raise CheckpointError(f"{path}: has {size} bytes, and no whole header")
                header = parse_json(file.read(length), f"{path}: its header")
                # Mapped at once: who has opened a folder reads what it was, whatever a writer puts in its place.
                content = np.frombuffer(mmap(file.fileno(), 0, access=ACCESS_READ, **_WITHOUT_DESCRIPTOR), np.uint8)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        self.metadata = header.pop(METADATA, {})
        if not isinstance(self.metadata, dict):
            raise CheckpointError(f"{path}: {METADATA} must be an object")
        body = 8 + length
        entries = [(*_entry(entry, f"{path}: tensor {name!r}"), name) for name, entry in header.items()]
        self.tensors: dict[str, Stored] = {}
        at = body
        for start, stop, dtype, shape, name in sorted(entries):
            if body + start != at:
                raise CheckpointError(f"{path}: tensor {name!r} begins at byte {body + start}, must begin at {at}")
            at = body + stop
            if at > size:
                raise CheckpointError(f"{path}: tensor {name!r} ends at byte {at}, but the file has {size}")
            self.tensors[name] = Stored(name, dtype, shape, path, content[body + start : at])
        if at != size:
            raise CheckpointError(f"{path}: has {size} bytes, must have {at} for the tensors of its header")


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
        origins = [self.path / name for name in (SINGLE_FILE, INDEX) if (self.path / name).exists()]
        if len(origins) != 1:
            what = f"{SINGLE_FILE} and {INDEX}: which one counts?" if origins else f"neither {SINGLE_FILE} nor {INDEX}"
            raise CheckpointError(f"{self.path}: holds {what}")
        (self.origin,) = origins
        if self.origin.name == SINGLE_FILE:
            self.files = {SINGLE_FILE: TensorFile(self.origin)}
            self.file_of = dict.fromkeys(self.files[SINGLE_FILE].tensors, SINGLE_FILE)
            return
        self.file_of = self._index()
        files = sorted(set(self.file_of.values()))
        self.files = {file: TensorFile(self.path / file) for file in files if os.path.exists(self.path / file)}
        for name, file in self.file_of.items():
            if file in self.files and name not in self.files[file].tensors:
                raise CheckpointError(f"{self.path / file}: tensor {name!r} is missing, which {INDEX} says is there")

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
        """Reads the content of `config.json`."""
        return read_json(self.path / "config.json")

    def _index(self) -> dict[str, str]:
        names = read_json(self.origin).get("weight_map")
        if not isinstance(names, dict):
            raise CheckpointError(f"{self.origin}: weight_map must be an object from tensors to files")
        for file in set(map(str, names.values())):
            if not _stays_inside(file):
                raise CheckpointError(
                    f"{self.origin}: names the file {file!r}, must be a .safetensors inside the folder"
                )
        return {name: str(file) for name, file in names.items()}


def has_tensors(folder: Path) -> bool:
    """Tells whether the folder has tensors, or a file that should say where they are."""
    return (folder / INDEX).exists() or (folder / SINGLE_FILE).exists()


def _entry(value: Any, where: str) -> tuple[int, int, str, tuple[int, ...]]:
    """Returns first byte, end, type and shape of a header's entry."""
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, stop]} if len(shape) <= _MOST_AXES:
            if all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
                if dtype not in BITS:
                    raise CheckpointError(f"{where} has dtype {shown(dtype)}, must have one of {', '.join(BITS)}")
                if (size := stop - start) * 8 != math.prod(shape) * BITS[dtype]:
                    raise CheckpointError(f"{where} has {size} bytes, not those of {dtype} and shape {tuple(shape)}")
                return start, stop, dtype, tuple(shape)
    raise CheckpointError(f"{where} must have a dtype, a shape, and data_offsets from one byte to another")


def _stays_inside(file: str) -> bool:
    """Tells whether an index's name stays in its folder on any system. Links are the user's: caches consist of them."""
    paths = PurePosixPath(file), PureWindowsPath(file)
    leaves = any(path.anchor or ".." in path.parts for path in paths)
    return not leaves and file.endswith(".safetensors") and "\0" not in file
