"""Warnings that are given once."""

import warnings
from functools import cache


@cache
def warn_once(message: str) -> None:
    """Warns of `message`, the first time that it is given in this process."""
    warnings.warn(message, stacklevel=2)
