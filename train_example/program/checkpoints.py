"""Checkpoints of a run: the training state, and a description of the run in JSON."""

import errno
import gc
import logging
import os
import sys
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
_NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


class Checkpoints:
    """The newest few checkpoints in a folder. A save is complete, on disk, when it returns.

    Args:
      folder: made when missing.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        options = ocp.CheckpointManagerOptions(
            max_to_keep=_KEPT, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    @property
    def latest_step(self) -> int | None:
        """The step of the newest checkpoint that was completed, None without one."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, description: dict[str, Any]) -> None:
        """Saves the state after `step` steps.

        Raises:
          UserError: it cannot be written, as on a full disk.
        """
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(description))
        with _one_message():
            try:
                self._manager.save(step, args=items, force=True)
                return
            except (OSError, ValueError) as error:
                reason = next((text for text in _NO_ROOM if text in str(error)), " ".join(str(error).split())[:300])
            gc.collect()  # writes that did not begin
        raise UserError(
            f"checkpoint {step} in {self._folder} cannot be written: {reason}; make room, and --resume goes on from "
            "the newest one that is whole"
        )

    def description(self, step: int) -> dict[str, Any]:
        """The description that `save` was given."""
        return self._restore(step, run=ocp.args.JsonRestore())

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state, bit for bit, where `like` is, which has its shapes and dtypes; by default on the first device."""
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or device), like)
        return self._restore(step, state=ocp.args.StandardRestore(abstract))

    def _restore(self, step: int, **item: ocp.args.CheckpointArgs) -> Any:
        """The one item asked for."""
        try:
            (restored,) = self._manager.restore(step, args=ocp.args.Composite(**item)).values()
        except (KeyError, ValueError, OSError) as error:
            raise UserError(
                f"checkpoint {step} in {self._folder} cannot be read, is it of this program and whole? {error}"
            ) from error
        return restored

    def close(self) -> None:
        """Ends the threads of the manager."""
        self._manager.close()


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
