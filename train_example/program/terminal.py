"""A run at a terminal: a bar and a line per evaluation show it, Ctrl-C stops it."""

import os
import signal
import sys
from contextlib import AbstractContextManager, ExitStack
from types import FrameType
from typing import Self

from tqdm import tqdm

from train_example.loop import Record

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MESSAGE = b"\nfinishing this step, then saving; once more to stop at once\n"


class Interrupt(ExitStack):
    """Inside the context, the first SIGINT or SIGTERM only sets `requested`; a second one ends the program at once."""

    requested = False

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self.callback(signal.signal, number, signal.signal(number, self._request))
        return self

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        os.write(2, _MESSAGE)  # print may be at work already when a signal comes


class Progress(AbstractContextManager):
    """A live bar on stderr where that is a terminal, and lines on stdout that do not disturb it."""

    def __init__(self, first_step: int, steps: int):
        self._compiling = True
        self._bar = tqdm(
            desc="compiling",
            total=steps,
            initial=first_step,
            unit="step",
            file=sys.stderr,
            disable=None,  # unless it is a terminal
            dynamic_ncols=True,
        )

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, record: Record) -> None:
        """Shows a step's metrics. The bar's clock starts with the first, which compiling came before."""
        if self._compiling:
            self._compiling = False
            self._bar.set_description_str("")
            self._bar.initial = record["step"] - 1
            self._bar.unpause()
        self._bar.set_postfix_str(_summary(record), refresh=False)
        self._bar.update()
        if "held_out" in record:
            self._bar.write(f"step {record['step']}: {_summary(record)}, held-out {record['held_out']:.3f}", sys.stdout)
            sys.stdout.flush()


def _summary(record: Record) -> str:
    return (
        f"loss {record['loss']:.3f}, {record['tokens_per_second']:,.0f} tokens/s, "
        f"busiest expert {record['balance']:.2f}× its share"
    )
