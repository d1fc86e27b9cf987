"""A progress bar on a terminal, where tqdm is installed; nothing otherwise."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

type Say = Callable[[str], Any]


def counted[T](items: Sequence[T], unit: str = "config") -> Iterator[tuple[T, Say]]:
    """Each item with a function that says what is being done for it, on a bar that counts them."""
    if tqdm is None:
        yield from ((item, lambda what: None) for item in items)
        return
    with tqdm(items, file=sys.stderr, disable=None, leave=False, unit=unit) as bar:
        for item in bar:
            yield item, bar.set_postfix_str


def write(text: str) -> None:
    """Prints above the bar."""
    (tqdm.write if tqdm else print)(text, file=sys.stdout)
    sys.stdout.flush()
