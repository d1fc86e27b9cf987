"""Which parameters a call of a kernel gets: its own, the user's, the package's, or a rule's.

Rules serve every GPU and size (`parameters`). A file of the package keeps what an H200 gains beyond them, and the
user's file, which `python -m blaze_jax.tune` writes, what another card does.

Files are JSON: `{"format": 1, "tunings": {GPU: {kernel: {shape: {"tuning": {parameter: value}, "measured": {...}}}}}}`.
What was measured is for people to read. A file that cannot be read, and an entry that is not valid, are left out with a
warning.
"""

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pallas_kernels.tuning.parameters import H200, Tuning, checked, heuristic, nvidia_gpu, parse, shape_key

USER_FILE_VARIABLE = "BLAZE_JAX_TUNING"
"""Environment variable: another path for the user's file, or empty for none."""

FORMAT = 1

type Place = tuple[str, str, str]
"""GPU, kernel, shape."""


@dataclass(frozen=True, eq=False)
class Trial:
    """Parameters that calls of some kernels get for once, and what the calls in the block were.

    Attributes:
      tunings: parameters by the name of a kernel.
      shapes: the `shape_key` of each kernel that was looked up, its last one.
    """

    tunings: Mapping[str, Tuning]
    shapes: dict[str, str] = field(default_factory=dict)


_trial: ContextVar[Trial | None] = ContextVar("trial", default=None)


@contextmanager
def tried(tunings: Mapping[str, Tuning]) -> Iterator[Trial]:
    """Has kernels that are traced in the block take `tunings`, before any table; a trace from before is not used."""
    token = _trial.set(trial := Trial(tunings))
    try:
        yield trial
    finally:
        _trial.reset(token)


def find_tuning(kernel: str, own: Tuning | None, rows: int, dtype, **sizes: int) -> Any:
    """The parameters of a call: `own` if there are, else the user's, else the package's, else the heuristic.

    Args:
      kernel: a name of `KINDS`, which says of which class they are.
      own: parameters that the caller asks for.
      rows: the call's, as `shape_key` takes them; and so are the others.
      dtype: the rows'.
      sizes: other sizes by name.

    Raises:
      ValueError: `own` is of another class, or not for this kernel.
    """
    if own is not None:
        return checked(kernel, own)
    shape = shape_key(rows, dtype, **sizes)
    if (trial := _trial.get()) is not None:
        trial.shapes[kernel] = shape
        if kernel in trial.tunings:
            return trial.tunings[kernel]
    for path in (user_file(), *package_files()):
        if tuning := _tunings(*_version(path)).get((_gpu(), kernel, shape)):
            return tuning
    return heuristic(kernel, shape)


def tables_in_use() -> tuple:
    """A value that stays the same as long as `find_tuning` finds the same."""
    return _gpu(), *_version(user_file()), _trial.get()


def _gpu() -> str:
    """The GPU whose table is read."""
    return nvidia_gpu() or H200


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


def _version(path: Path | None) -> tuple[Path | None, int]:
    """The file, or None if there is none, and when it changed last."""
    try:
        return path, path.stat().st_mtime_ns if path else 0
    except FileNotFoundError:
        return None, 0
    except OSError:
        return path, 0  # reading it says why it cannot be


@cache
def _tunings(path: Path | None, changed: int) -> Mapping[Place, Tuning]:
    """The valid entries of a file as of a change, a warning for each problem."""
    del changed
    tunings, problems = read_tunings(path) if path else ({}, [])
    for problem in problems:
        warnings.warn(f"tuned parameters left out: {problem}", stacklevel=2)
    return tunings


def read_tunings(path: Path) -> tuple[dict[Place, Tuning], list[str]]:
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
