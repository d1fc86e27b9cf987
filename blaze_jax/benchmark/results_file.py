"""Results as JSON files: what was measured, on what, by which command."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

type Record = dict[str, Any]

_WHERE = ("--json", "--plot")

PUBLISHED = Path(__file__).parent / "published.json"
"""Figures of other implementations at the same sizes, from other runs."""


class ResultsFile:
    """Collects records, and writes all of them to a file after each: what was measured outlives a crash.

    Args:
      path: of the file, None for none; its folder is made.
      environment: what the measurement is taken on.

    Raises:
      ValueError: the file cannot be written, told before anything is measured.
    """

    def __init__(self, path: Path | None, environment: dict[str, str]):
        self.path, self.environment, self.records = path, environment, []
        self.command = command_line("blaze_jax.benchmark", sys.argv[1:])
        try:
            self._write()
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}; choose another file") from error

    @property
    def content(self) -> dict[str, Any]:
        """All of it."""
        return {"environment": self.environment, "command": self.command, "records": self.records}

    def add(self, record: Record) -> None:
        """Appends a record."""
        self.records.append(record)
        self._write()

    def _write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)


def command_line(module: str, arguments: Sequence[str]) -> str:
    """The command to type again, without the options that say where its results went."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and not argument.startswith(tuple(f"{name}=" for name in _WHERE)) and argument not in _WHERE:
            kept.append(argument)
        skip = argument in _WHERE
    return shlex.join(["python", "-m", module, *kept])


def read_results(path: Path) -> dict[str, Any]:
    """The content of a results file.

    Raises:
      ValueError: it is none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as results: {error}") from error
    if not isinstance(content, dict) or not {"environment", "command", "records"} <= content.keys():
        raise ValueError(f"{path} is no file of results: it must have environment, command and records")
    return content
