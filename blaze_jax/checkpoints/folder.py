"""The tensors of a folder: which file holds each, its type and shape, and parts of it."""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from blaze_jax.checkpoints.errors import CheckpointError, import_safetensors
from blaze_jax.checkpoints.json_file import parse_json, read_json

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

    def read(self, *index: int | slice) -> np.ndarray:
        """A part of the tensor, `tensor[index]`, with whole slices for the axes not named; only it is read."""
        return self.file.read(self, index)


class TensorFile:
    """One file of safetensors, whose header that library has found sound.

    Args:
      path: the file.

    Raises:
      CheckpointError: no such file, or none that safetensors reads.
      MissingExtraError: safetensors is not installed.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file")
        self._open = _guarded(path, import_safetensors().safe_open, path, framework="numpy")
        self._offsets: dict[str, int] | None = None

    def tensors(self) -> dict[str, Stored]:
        """Every tensor, by name."""
        found = {}
        for name in self._open.keys():  # noqa: SIM118, the file is no mapping
            part = self._open.get_slice(name)
            found[name] = Stored(name, part.get_dtype(), tuple(part.get_shape()), self)
        return found

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
        if self._offsets is None:
            with self.path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = parse_json(file.read(length), self.path)
            self._offsets = {
                name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"
            }
        offset = self._offsets[tensor.name]
        mapped = np.memmap(self.path, DTYPES[tensor.dtype], mode="r", offset=offset, shape=tensor.shape)
        return np.array(mapped[index])


class Folder:
    """The tensors of a checkpoint: those of its one file, or those that its index names.

    Args:
      path: the folder, with `model.safetensors`, or with `model.safetensors.index.json` and the files it names.

    Raises:
      CheckpointError: neither is there, or both, or the index names what is not there, or leaves the folder.
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
        self._files: dict[str, dict[str, Stored]] = {}
        self._file_of = dict.fromkeys(self._tensors_of(SINGLE_FILE), SINGLE_FILE) if has_file else self._index()

    @property
    def names(self) -> list[str]:
        """Names of all tensors; only an index is read for them, or the one file's header."""
        return list(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> Stored:
        if name not in self._file_of:
            raise CheckpointError(f"{self.origin}: tensor {name!r} is missing")
        file = self._file_of[name]
        tensors = self._tensors_of(file)
        if name not in tensors:
            raise CheckpointError(f"{self.path / file}: tensor {name!r} is missing, which {INDEX} says is there")
        return tensors[name]

    def read_config(self) -> dict[str, Any]:
        """The content of `config.json`."""
        return read_json(self.path / "config.json")

    def _tensors_of(self, file: str) -> dict[str, Stored]:
        if file not in self._files:
            self._files[file] = TensorFile(self.path / file).tensors()
        return self._files[file]

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
