"""A lock on a folder, for processes and threads that write into it."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = ".blaze_jax.lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Waits until nobody else is in this block with the folder. The lock's file is there only meanwhile.

    Where the system or the folder's disk has no such locks, a warning says so, and only one process may write.
    """
    if fcntl is None:
        _warn(folder, "this system has no flock")
        yield
        return
    path = folder / LOCK
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            while not _is_at(path, file):
                os.close(file)
                file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            _warn(folder, str(error))
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(file)


def _warn(folder: Path, reason: str) -> None:
    warnings.warn(f"{folder} cannot be locked ({reason}): let one process at a time write into it", stacklevel=4)


def _is_at(path: Path, file: int) -> bool:
    """Whether the open file has that name still: who had the lock before removed it, and another may have a new one."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
