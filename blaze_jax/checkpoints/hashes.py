"""A file of hashes beside the files of a folder, which tells of bits that flipped on a disk or on the way.

The format safetensors has no checksums: whatever the bytes of a tensor are, they are numbers.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blaze_jax.checkpoints.writing import rename, written
from blaze_jax.json_file import CheckpointError, read_json

HASHES = "sha256.json"


def write_hashes(folder: str | Path) -> Path:
    """Writes `sha256.json`, the SHA-256 of each file of a folder by its path there; call it again after a `save`."""
    path = Path(folder) / HASHES
    files = [file for file in sorted(path.parent.rglob("*")) if file.is_file() and not file.name.startswith(HASHES)]
    with ThreadPoolExecutor() as pool:
        names = [file.relative_to(path.parent).as_posix() for file in files]
        text = json.dumps(dict(zip(names, pool.map(_hash, files), strict=True)), indent=1)
    with written(path, [text.encode()]) as unfinished:
        rename(unfinished, path)
    return path


def check_hashes(folder: str | Path) -> None:
    """Reads all files that `sha256.json` names.

    Raises:
      CheckpointError: one is not there or not as it was, whose path the message has, or there is no such list.
    """
    path = Path(folder) / HASHES
    saved = read_json(path)
    with ThreadPoolExecutor() as pool:
        for name, digest in zip(saved, pool.map(_hash, map(path.parent.joinpath, saved)), strict=True):
            if digest != saved[name]:
                raise CheckpointError(f"{path.parent / name}: is not as it was when {HASHES} was written")


def _hash(path: Path) -> str:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
