"""Checkpoints of a run: the training state, and a description of the run in JSON; the newest few stay.

Neither orbax nor tensorstore notices a flipped bit, so each checkpoint has a file with the hashes of its others.
"""

import errno
import gc
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from blaze_jax.checkpoints import CheckpointError, check_hashes, write_hashes
from blaze_jax.checkpoints.hashes import HASHES
from train_example.config import UserError
from train_example.step import TrainState, Tree

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_KEPT = 3
_SECONDS_UNDER_WAY = 1.0
_NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_LOCK = "lock"


@contextmanager
def only_run_in(out: Path) -> Iterator[None]:
    """Keeps other runs out of a folder until the block or the process ends. Of several processes, the first does.

    Raises:
      UserError: another run is there.
    """
    if fcntl is None or jax.process_index():
        yield
        return
    with (out / _LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(f"{out} has a run at work, {file.read()}: wait for it, or choose another --out") from None
        except OSError as error:
            print(f"{out} cannot be locked, start no other run there: {error.strerror}", file=sys.stderr)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}")
        file.flush()
        yield


class Checkpoints:
    """The checkpoints in a folder, which is made when missing; `reading` those of a run that may be at work.

    A save is complete, on disk, when it returns. Its files are hashed while training goes on; a checkpoint whose hashes
    are not there, as after a kill, is taken to be whole.
    """

    def __init__(self, folder: Path, *, reading: bool = False):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=_KEPT, enable_async_checkpointing=False, cleanup_tmp_directories=not reading
        )
        self.folder = folder.absolute()
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        self._hashing = ThreadPoolExecutor(1)

    def close(self) -> None:
        """Waits for the hashes of the last checkpoint."""
        self._hashing.shutdown()
        self._manager.close()

    def steps(self) -> list[int]:
        """The steps after which the state was saved, the last one first."""
        return sorted(self._manager.all_steps(), reverse=True)

    def save(self, step: int, state: TrainState, description: dict[str, Any]) -> None:
        """Saves the state after `step` steps, in the place of a damaged checkpoint where there is one.

        Raises:
          UserError: it cannot be written, as on a full disk.
        """
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(description))
        with _one_message():
            try:
                if step in self.steps():
                    self._manager.delete(step)
                self._manager.save(step, args=items, force=True)
                if jax.process_index() == 0:
                    self._hashing.submit(_write_hashes, self.folder / str(step))
                return
            except (OSError, ValueError) as error:
                reason = next((text for text in _NO_ROOM if text in str(error)), " ".join(str(error).split())[:300])
            gc.collect()  # writes that did not begin
            time.sleep(_SECONDS_UNDER_WAY)  # those that did tell of it when they end
        raise UserError(
            f"checkpoint {step} in {self.folder} cannot be written: {reason}; make room, and --resume goes on from "
            "the newest one that is whole"
        )

    def newest_whole(self) -> int:
        """The step of the newest checkpoint whose files are as they were saved; a line tells of newer ones.

        Raises:
          UserError: there is none.
        """
        whole, told = 0, ""
        for step in self.steps() if jax.process_index() == 0 else []:
            damage = _damage(self.folder / str(step))
            if not damage:
                whole = step
                break
            told += f"checkpoint {step} is damaged, {damage}; "
        whole = int(multihost_utils.broadcast_one_to_all(np.int32(whole)))
        if not whole:
            raise UserError(f"{told}there is no older one that --resume could take")
        if told:
            print(f"train_example: {told}--resume takes checkpoint {whole} instead", file=sys.stderr)
        return whole

    def description(self, step: int) -> dict[str, Any]:
        """The description that `save` was given.

        Raises:
          UserError: it cannot be read.
        """
        return self._restore(step, run=ocp.args.JsonRestore())

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state, bit for bit, where `like` is, which has its shapes and dtypes; by default on the first device.

        Raises:
          UserError: it cannot be read.
        """
        return self._restore(step, state=ocp.args.StandardRestore(_placed(like)))

    def restore_variables(self, step: int, like: TrainState) -> Tree:
        """Parameters and router state alone, without the optimizer's memory, as `restore` has them."""
        item = _placed({"params": like.params, "router_state": like.router_state})
        how = ocp.checkpoint_utils.construct_restore_args(item)
        with _readable(step, self.folder), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            args = ocp.args.PyTreeRestore(item, restore_args=how, partial_restore=True)
            return reader.restore(self.folder / str(step) / "state", args=args)

    def _restore(self, step: int, **item: Any) -> Any:
        with _readable(step, self.folder):
            (restored,) = self._manager.restore(step, args=ocp.args.Composite(**item)).values()
        return restored


def _placed(like: Tree) -> Tree:
    """Shapes, types and places; by default on the first device."""
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or device), like)


@contextmanager
def _readable(step: int, folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # what the library raises depends on the file that is damaged
        raise UserError(
            f"checkpoint {step} in {folder} cannot be read, is it of this program and whole? {error}"
        ) from error


def _write_hashes(folder: Path) -> None:
    try:
        write_hashes(folder)
    except (OSError, CheckpointError) as error:
        print(f"{folder / HASHES} cannot be written: {error}; damage stays unseen", file=sys.stderr)


def _damage(folder: Path) -> str:
    """Which file of a checkpoint is not as it was saved; empty if all are, or nobody knows."""
    try:
        if (folder / HASHES).exists():
            check_hashes(folder)
        return ""
    except CheckpointError as error:
        return str(error)


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
