"""A progress bar on a terminal, where tqdm is installed; nothing otherwise."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Bar:
    """Counts items, and says what is being done for the present one.

    Args:
      total: number of items.
      unit: what an item is called.
    """

    def __init__(self, total: int, unit: str = "config"):
        try:
            from tqdm import tqdm
        except ImportError:
            self._bar = None
        else:
            self._bar = tqdm(total=total, file=sys.stderr, disable=None, leave=False, unit=unit)

    def say(self, what: str = "") -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(what)

    def next(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Out of the way of what is printed."""
        if self._bar is not None:
            self._bar.clear()
        yield
        if self._bar is not None and not self._bar.disable:
            self._bar.refresh()


def counted[T](items: Sequence[T], unit: str = "config") -> Iterator[tuple[T, Bar]]:
    """Each item with the bar that counts them."""
    bar = Bar(len(items), unit)
    try:
        for item in items:
            yield item, bar
            bar.next()
    finally:
        bar.close()
