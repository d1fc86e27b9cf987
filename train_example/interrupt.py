"""Ctrl-C as a request to stop, not as an exception in the middle of a step."""

import os
import signal
from contextlib import ExitStack
from types import FrameType
from typing import Self

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
