"""Ctrl-C as a request to stop, not as an exception in the middle of a step."""

import os
import signal
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MESSAGE = b"\nfinishing this step, then saving; once more to stop at once\n"


class Interrupt:
    """Inside the context, the first SIGINT or SIGTERM only sets `requested`; a second one ends the program at once."""

    def __init__(self):
        self.requested = False

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._request) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        os.write(2, _MESSAGE)  # print may be at work already when a signal comes
