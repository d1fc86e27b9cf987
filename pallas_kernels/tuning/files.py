"""Files of tuned parameters: the package's, by GPU, and the user's, which `python -m blaze_jax.tune` writes.

JSON: `{"format": 1, "tunings": {GPU: {kernel: {shape: {"tuning": {parameter: value}, "measured": {...}}}}}}`; what was
measured is for people to read. A file that cannot be read, and an entry that is not valid, are left out with a warning.
"""

import json
import os
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

USER_FILE_VARIABLE = "BLAZE_JAX_TUNING"
"""Environment variable: another path for the user's file, or empty for none."""

FORMAT = 1

type Place = tuple[str, str, str]
"""GPU, kernel, shape."""

type Parse = Callable[[str, Any], Any]
"""From a kernel's name and its values in the file to its parameters; raises ValueError."""


def user_file() -> Path | None:
    """The user's file: `$BLAZE_JAX_TUNING`, or `blaze_jax/tuning.json` in the user's cache folder; None for none.

    The cache folder is `$XDG_CACHE_HOME`, or else `~/.cache`. The file need not exist.
    """
    named = os.environ.get(USER_FILE_VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named else None
    folder = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(folder) if folder else Path.home() / ".cache") / "blaze_jax" / "tuning.json"
    except RuntimeError:  # there is no home
        return None


def package_files() -> list[Path]:
    """The package's own: the JSON files next to this module."""
    return sorted(Path(__file__).parent.glob("*.json"))


def user_version() -> tuple[Path | None, int]:
    """The user's file, or None if there is none, and when it changed last."""
    path = user_file()
    try:
        return path, path.stat().st_mtime_ns if path is not None else 0
    except FileNotFoundError:
        return None, 0
    except OSError:
        return path, 0  # reading it says why it cannot be


def user_tunings(parse: Parse) -> Mapping[Place, Any]:
    """Entries of the user's file; read again when it has changed."""
    path, changed = user_version()
    return {} if path is None else _as_of(path, changed, parse)


@cache
def package_tunings(parse: Parse) -> Mapping[Place, Any]:
    """Entries of the package's files."""
    return {place: t for path in package_files() for place, t in _valid_tunings(path, parse).items()}


@cache
def _as_of(path: Path, changed: int, parse: Parse) -> Mapping[Place, Any]:
    del changed  # a later change is another entry of the cache
    return _valid_tunings(path, parse)


def _valid_tunings(path: Path, parse: Parse) -> Mapping[Place, Any]:
    """The valid entries of a file, a warning for each problem."""
    tunings, problems = read_tunings(path, parse)
    for problem in problems:
        warnings.warn(f"tuned parameters left out: {problem}", stacklevel=2)
    return tunings


def read_tunings(path: Path, parse: Parse) -> tuple[dict[Place, Any], list[str]]:
    """The valid entries of a file, and what is wrong with the rest of it, in a line each."""
    try:
        content = _read(path)
    except ValueError as error:
        return {}, [str(error)]
    tunings, problems = {}, []
    for gpu, kernels in content.items():
        for kernel, shapes in kernels.items():
            for shape, entry in shapes.items():
                try:
                    tunings[gpu, kernel, shape] = parse(kernel, entry.get("tuning"))
                except ValueError as error:
                    problems.append(f"{path}, {gpu}, {shape}: {error}")
    return tunings, problems


def add_tunings(path: Path, entries: Mapping[Place, Mapping[str, Any]]) -> None:
    """Writes entries `{"tuning": ..., "measured": ...}` into a file, and keeps those of other places.

    Raises:
      ValueError: there is a file which is not one of tuned parameters, or it cannot be written.
    """
    content = _read(path) if path.exists() else {}
    for (gpu, kernel, shape), entry in entries.items():
        content.setdefault(gpu, {}).setdefault(kernel, {})[shape] = dict(entry)
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"format": FORMAT, "tunings": content}, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}; choose another file") from error


def _read(path: Path) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """The tunings of a file as they stand there, down to the entries.

    Raises:
      ValueError: there are none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or "tunings" not in content:
        raise ValueError(f"{path} is no file of tuned parameters: it has no 'tunings'")
    if content.get("format") != FORMAT:
        raise ValueError(f"{path} has format {content.get('format')!r}, this version reads {FORMAT}")
    if not _nested(content["tunings"], 3):
        raise ValueError(f"{path} is no file of tuned parameters: 'tunings' must hold GPU, kernel, shape, entry")
    return content["tunings"]


def _nested(value: Any, levels: int) -> bool:
    """Whether it is a dict of dicts, and so on, so many levels deep."""
    return isinstance(value, dict) and (levels == 0 or all(_nested(v, levels - 1) for v in value.values()))
