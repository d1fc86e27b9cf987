"""The header of a file of safetensors, checked in full: what each tensor is, and which bytes are its own."""

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from blaze_jax.checkpoints.errors import CheckpointError
from blaze_jax.checkpoints.json_file import LARGEST, parse_json
from blaze_jax.checks import shown

METADATA = "__metadata__"
MOST_AXES = 64

_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64}
_BITS |= dict.fromkeys(["BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"], 8)
_BITS |= {kind + str(bits): bits for kind in ("U", "I", "F") for bits in (16, 32, 64)} | {"BF16": 16}
"""Of each type of the format."""


class Entry(NamedTuple):
    """What a header says of a tensor.

    Attributes:
      dtype: its type, by the format's name.
      shape: its shape.
      start: where its first byte is in the file.
      stop: where the first byte after it is.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, Any]]:
    """The entries by tensor, and the metadata.

    Raises:
      CheckpointError: the file cannot be read or is cut, its header is none, or a tensor's bytes are not as many as its
        type and shape say, are another's, too, or are not there; the message names the file and the tensor.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LARGEST):
                raise CheckpointError(f"{path}: has {size} bytes, and no whole header")
            header = parse_json(file.read(length), f"{path}: its header")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: {METADATA} must be an object")
    entries = {name: _entry(value, 8 + length, f"{path}: tensor {name!r}") for name, value in header.items()}
    at = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.start != at:
            raise CheckpointError(f"{path}: tensor {name!r} begins at byte {entry.start}, must begin at {at}")
        at = entry.stop
        if at > size:
            raise CheckpointError(f"{path}: tensor {name!r} ends at byte {at}, but the file has {size}")
    if at != size:
        raise CheckpointError(f"{path}: has {size} bytes, must have {at} for the tensors of its header")
    return entries, metadata


def _entry(value: Any, body: int, where: str) -> Entry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, stop]}:
            if len(shape) <= MOST_AXES and all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
                if dtype not in _BITS:
                    raise CheckpointError(f"{where} has dtype {shown(dtype)}, must have one of {', '.join(_BITS)}")
                if (stop - start) * 8 != math.prod(shape) * _BITS[dtype]:
                    raise CheckpointError(
                        f"{where} has {stop - start} bytes, not those of {dtype} and shape {tuple(shape)}"
                    )
                return Entry(dtype, tuple(shape), body + start, body + stop)
    raise CheckpointError(f"{where} must have a dtype, a shape, and data_offsets from one byte to another")
