"""Layers and tensors, written: as files of safetensors, a part of a tensor at a time, with the index that names them.

`save` says which tensors the layers are in the public formats, and `write_tensors` writes them. A reader may come at
any moment: files get their names when they are on the disk, and the index comes after them. Writers that meet in one
folder take turns by a lock on it.
"""

import json
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import jax
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from blaze_jax.checkpoints.folder import BITS, DTYPES, INDEX, METADATA, SINGLE_FILE, Folder, TensorFile, has_tensors
from blaze_jax.checkpoints.layouts import (
    LAYOUTS,
    PLAIN,
    PREFIXES,
    SCALES,
    SELECTION_BIAS,
    Layout,
    Tensor,
    block_names,
    entries,
)
from blaze_jax.checkpoints.loading import Layer, values_of
from blaze_jax.checks import check_booleans, check_integers
from blaze_jax.config import MoEConfig, Parameter, check_config
from blaze_jax.json_file import CheckpointError
from blaze_jax.progress import counted

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = ".blaze_jax.lock"

LARGEST_FILE = 5 << 30
"""Bytes of tensors after which another file begins."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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


def save(
    folder: str | Path,
    layers: Mapping[int, Layer],
    config: MoEConfig,
    *,
    dtype: DTypeLike | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Writes layers in the public formats that they name.

    Each call adds files, and their tensors to the folder's `model.safetensors.index.json`; a folder of a single
    `model.safetensors` gets them into that file, which is written anew. One expert's matrix is fetched from the devices
    at a time. What was read compressed is written in the type that it has now. A reader sees all layers of a call as
    they were, or all as they are afterwards.

    Several processes may save different layers into one folder at the same time. Where arrays lie on devices of several
    processes, gather them first, and let one process save each layer.

    Args:
      folder: to write into; made where it is missing.
      layers: by their numbers in the model.
      config: the layers' configuration. A selection bias of zeros is left out of a layout that has no place for one.
      dtype: the tensors' type, float32, float16 or bfloat16; None for each array's own. A selection bias stays float32.
      overwrite: whether the layers take the place of those that are there, whatever their layout; files that hold other
        tensors, too, are written anew without them. Otherwise a layer that is there is an error.

    Returns:
      The files that hold the layers.

    Raises:
      ValueError: a layer is not what the configuration says, does not fit its layout, or lies on devices of several
        processes.
      CheckpointError: the folder holds tensors of one of the layers' blocks already, or is broken.
    """
    check_config(config)
    check_integers(**{f"layers[{number!r}]": number for number in layers})
    check_booleans(overwrite=overwrite)
    folder = Path(folder)
    there = Folder(folder).names if has_tensors(folder) else []
    prefix = PREFIXES[1] if any(name.startswith(PREFIXES[1].partition("{")[0]) for name in there) else PREFIXES[0]
    tensors = [
        tensor for number, layer in layers.items() for tensor in layer_tensors(number, layer, config, dtype, prefix)
    ]
    starts = tuple(start for number in layers for start in block_names(number))
    if overwrite and any(name.startswith(starts) and name.endswith(SCALES) for name in there):
        warnings.warn(
            f"{folder} had layers {', '.join(map(str, layers))} compressed, and has them in full now: the "
            "quantization_config of its config.json does not say so",
            stacklevel=2,
        )
    stem = "-".join(["layers", *(f"{number:05}" for number in layers)][:9])
    return write_tensors(folder, tensors, stem, starts, overwrite=overwrite)


def layer_tensors(
    number: int, layer: Layer, config: MoEConfig, dtype: DTypeLike | None = None, prefix: str = PREFIXES[0]
) -> list[NewTensor]:
    """Returns the tensors of one layer, as `save` writes them; for the arguments and errors see there."""
    writable = [name for name, layout in LAYOUTS.items() if not any(tensor.mxfp4 for tensor in layout.tensors)]
    if layer.layout not in writable:
        raise ValueError(f"layout={layer.layout!r} must be one of {', '.join(writable)}")
    layout, values = LAYOUTS[layer.layout], values_of(layer)
    expected = _checked_entries(values, layout, config)
    if SELECTION_BIAS in expected and not layout.of([SELECTION_BIAS]):
        if np.any(np.asarray(values[SELECTION_BIAS])):
            raise ValueError(
                f"the layout {layout.name!r} has no place for the layer's selection_bias, which is not zero; by_expert "
                "and fused have one, of layers without b_down"
            )
        del expected[SELECTION_BIAS]  # a zero one changes nothing, and is what `load` makes of none
    tensors = []
    for tensor in layout.of(expected):
        arrays = tuple(values[name] for name in tensor.parameters)
        chosen = np.dtype(arrays[0].dtype if dtype is None else dtype)
        if tensor.parameters == (SELECTION_BIAS,):
            chosen = np.dtype(np.float32)
        if _NAMES.get(chosen) not in PLAIN:
            raise ValueError(f"dtype={chosen} must be one of {', '.join(str(DTYPES[name]) for name in PLAIN)}")
        shape = tensor.shape(expected[tensor.parameters[0]])
        together = range(config.num_experts) if arrays[0].ndim == 3 else [None]
        for expert, name in enumerate(tensor.names(config.num_experts)):
            parts = partial(_parts, tensor, arrays, [expert] if tensor.of_one_expert else together, chosen)
            name = f"{prefix.format(layer=number)}{layout.block}.{name}"
            tensors.append(NewTensor(name, _NAMES[chosen], shape, parts))
    return tensors


def _parts(
    tensor: Tensor, arrays: tuple[Array, ...], experts: Sequence[int | None], dtype: np.dtype
) -> Iterator[np.ndarray]:
    return (np.asarray(_as_stored(tensor, arrays, expert, dtype)) for expert in experts)


@partial(jax.jit, static_argnums=(0, 3))
def _as_stored(tensor: Tensor, arrays: tuple[Array, ...], expert, dtype: np.dtype) -> Array:
    """Returns the matrix of one expert, or the whole entry, as the file has it."""
    if expert is not None:
        arrays = tuple(lax.dynamic_index_in_dim(array, expert, keepdims=False) for array in arrays)
    return tensor.join(arrays).astype(dtype)


def _checked_entries(values: Mapping[str, Array], layout: Layout, config: MoEConfig) -> dict[str, Parameter]:
    """Returns the entries that the layer must have; ValueError unless it has them, and the layout has room for them."""
    if getattr(values.get("w_router"), "ndim", 0) != 2:
        raise ValueError("the layer has no matrix 'w_router'")
    expected = entries(config, values["w_router"].shape[0], "b_down" in values)
    if wrong := sorted(expected.keys() ^ values.keys()):
        raise ValueError(f"the layer has {', '.join(values)}, must have {', '.join(expected)}: {wrong[0]}")
    for name, parameter in expected.items():
        if values[name].shape != parameter.shape:
            raise ValueError(f"the layer's {name} has shape {values[name].shape}, must be {parameter.shape}")
        if not getattr(values[name], "is_fully_addressable", True):
            raise ValueError(
                f"the layer's {name} lies on devices of several processes, must be gathered in one, "
                "which then saves it: jax.experimental.multihost_utils.process_allgather(array, tiled=True)"
            )
    room = layout.parameters | {SELECTION_BIAS}  # see there
    joined = {name for tensor in layout.of(expected) for name in tensor.parameters}
    if wrong := sorted((expected.keys() - room) | (joined - expected.keys())):
        raise ValueError(f"the layout {layout.name!r} does not fit a layer with {', '.join(expected)}: {wrong[0]}")
    return expected


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
        contents = [_content(group, {"format": "pt"}) for group in groups]
        written = [stack.enter_context(_written(folder / stem, content)) for content in contents]
        stack.enter_context(locked(folder))
        files, file_of = checked()
        if SINGLE_FILE in files:
            raise CheckpointError(f"{folder / SINGLE_FILE}: was not there when the writing began")
        index = {name: file for name, file in file_of.items() if not replaced(name)}
        for number, (group, unfinished) in enumerate(zip(groups, written, strict=True), start=1):
            of_many = f"-{number:05}-of-{len(groups):05}" if len(groups) > 1 else ""
            paths.append(_free_path(folder / f"{stem}{of_many}", names, files))
            unfinished.replace(paths[-1])
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
    with _written(folder / INDEX, [json.dumps(content, indent=1).encode()]) as unfinished:
        unfinished.replace(folder / INDEX)


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
    with _written(file.path, _content(tensors, file.metadata)) as unfinished:
        unfinished.replace(file.path)


def _content(tensors: Sequence[NewTensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
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
def _written(path: Path, content: Iterable[bytes | memoryview]) -> Iterator[Path]:
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
