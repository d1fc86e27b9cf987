"""The metrics of a run: one JSON object a line in a file, and a bar and a line per evaluation on a terminal."""

import io
import json
import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from tqdm import tqdm

from train_example.config import UserError
from train_example.loop import Record


class MetricsLog(AbstractContextManager):
    """Appends records to a file; what was written outlives the process, however that ends.

    Args:
      path: the file; None to keep the records to oneself, as all processes but one do.
      last_step: records up to this step stay, later ones and a half-written line go; 0 starts afresh.

    Attributes:
      records: all records, in order.

    Raises:
      UserError: the file cannot be written, or does not reach to `last_step`.
    """

    def __init__(self, path: Path | None, last_step: int):
        if path is None:
            self.records, self._file = [], io.StringIO()
            return
        try:
            self.records = [r for r in read_metrics(path) if r["step"] <= last_step] if last_step else []
            if last_step and [r["step"] for r in self.records] != list(range(1, last_step + 1)):
                raise UserError(f"{path} lacks steps before {last_step}, where the checkpoint is: put them back")
            partial = path.with_suffix(".partial")
            partial.write_text("".join(map(_line, self.records)))
            os.replace(partial, path)
            self._file = path.open("a", buffering=1)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}; free it, or choose another --out") from error

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, record: Record) -> None:
        """Appends one record."""
        self.records.append(record)
        self._file.write(_line(record))


def read_metrics(path: Path) -> list[Record]:
    """All whole records of a file, in order; none where there is no file.

    Raises:
      UserError: a line of it is no record.
    """
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    try:
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except ValueError as error:
        raise UserError(f"{path} has a line that is no JSON: remove it ({error})") from error


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def progress_bar(first_step: int, steps: int) -> tqdm:
    """A live bar on stderr where that is a terminal, for `show`; the program is being compiled until the first step."""
    return tqdm(desc="compiling", total=steps, initial=first_step, unit="step", disable=None, dynamic_ncols=True)


def show(bar: tqdm, record: Record) -> None:
    """Shows a step's metrics on the bar, and an evaluation in a line on stdout, which does not disturb it."""
    if not bar.disable and bar.desc:  # the first: compiling came before, and the clock starts now
        bar.set_description_str("", refresh=False)
        bar.unpause()
    summary = (
        f"loss {record['loss']:.3f}, {record['tokens_per_second']:,.0f} tokens/s, "
        f"busiest expert {record['balance']:.2f}× its share"
    )
    bar.set_postfix_str(summary, refresh=False)
    bar.update()
    if "held_out" in record:
        bar.write(f"step {record['step']}: {summary}, held-out {record['held_out']:.3f}", sys.stdout)
        sys.stdout.flush()
