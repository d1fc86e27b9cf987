"""Checkpoints of a run: the training state, and a description of the run in JSON; the newest few stay."""

import errno
import gc
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from train_example.config import UserError
from train_example.step import TrainState

_KEPT = 3
_SECONDS_UNDER_WAY = 1.0
_NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def open_folder(folder: Path) -> ocp.CheckpointManager:
    """The checkpoints in a folder, which is made when missing. A save is complete, on disk, when it returns."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=_KEPT, enable_async_checkpointing=False, cleanup_tmp_directories=True
    )
    return ocp.CheckpointManager(folder.absolute(), options=options)


def save(manager: ocp.CheckpointManager, step: int, state: TrainState, description: dict[str, Any]) -> None:
    """Saves the state after `step` steps.

    Raises:
      UserError: it cannot be written, as on a full disk.
    """
    items = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(description))
    with _one_message():
        try:
            manager.save(step, args=items, force=True)
            return
        except (OSError, ValueError) as error:
            reason = next((text for text in _NO_ROOM if text in str(error)), " ".join(str(error).split())[:300])
        gc.collect()  # writes that did not begin
        time.sleep(_SECONDS_UNDER_WAY)  # those that did tell of it when they end
    raise UserError(
        f"checkpoint {step} in {manager.directory} cannot be written: {reason}; make room, and --resume goes on from "
        "the newest one that is whole"
    )


def description(manager: ocp.CheckpointManager, step: int) -> dict[str, Any]:
    """The description that `save` was given.

    Raises:
      UserError: it cannot be read.
    """
    return _restore(manager, step, run=ocp.args.JsonRestore())


def restore(manager: ocp.CheckpointManager, step: int, like: TrainState) -> TrainState:
    """The state, bit for bit, where `like` is, which has its shapes and dtypes; by default on the first device.

    Raises:
      UserError: it cannot be read.
    """
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or device), like)
    return _restore(manager, step, state=ocp.args.StandardRestore(abstract))


def _restore(manager: ocp.CheckpointManager, step: int, **item: Any) -> Any:
    try:
        (restored,) = manager.restore(step, args=ocp.args.Composite(**item)).values()
    except (KeyError, ValueError, OSError) as error:
        raise UserError(
            f"checkpoint {step} in {manager.directory} cannot be read, is it of this program and whole? {error}"
        ) from error
    return restored


@contextmanager
def _one_message() -> Iterator[None]:
    """Has a failure told by its exception alone: each write that was under way would log a traceback, too."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # "was never awaited"
            yield
    finally:
        sys.unraisablehook = hook
        logging.disable(disabled)
