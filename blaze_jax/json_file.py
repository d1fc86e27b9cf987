"""JSON of a checkpoint: `config.json`, the index of its files, and their headers.

Strangers write these files, so that size, nesting and repeated names are checked. `CheckpointError` names what is wrong
in any file of a checkpoint.
"""

import json
from pathlib import Path
from typing import Any

from blaze_jax.checks import shown

LARGEST = 100 << 20
"""Bytes of JSON, the limit of safetensors; the index of the largest public model has a tenth of it."""


class CheckpointError(ValueError):
    """A file of a checkpoint is not what it should be; the message names it, and the tensor or the field."""


def read_json(path: Path) -> dict[str, Any]:
    """Reads the object in a file.

    Raises:
      CheckpointError: no such file, none of JSON, no object, a name twice, or too large a file.
    """
    if path.exists() and not path.is_file():  # a pipe would wait for a writer
        raise CheckpointError(f"{path}: is no file")
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if len(text) > LARGEST:
        raise CheckpointError(f"{path}: has more than {LARGEST} bytes")
    return parse_json(text, f"{path}:")


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """Returns the object in `text`; CheckpointError where there is none, whose message begins with `where`."""
    try:
        value = json.loads(text, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must hold a JSON object, holds {type(value).__name__}")
    return value


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = {}
    for name, content in pairs:
        if name in value:
            raise ValueError(f"{shown(name)} stands there twice")
        value[name] = content
    return value
