"""The devices of a run: those of a mesh, in one process or several, and how a training state is split over them."""

import math
import os
import sys
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.tree_util import SequenceKey

from blaze_jax import MoEConfig, Parallelism
from train_example.config import UserError
from train_example.loop import mesh_of

_STACKS = ("dense_blocks", "moe_blocks")
_HEARTBEAT_SECONDS = 30


@dataclass(frozen=True)
class Cluster:
    """Several processes of one run; None where the environment says it (Slurm, Open MPI, Kubernetes).

    Attributes:
      coordinator: HOST:PORT of process 0.
      processes: how many.
      process: which this is.
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None

    def join(self) -> None:
        """Waits for all processes. Only process 0 writes to standard output from now on.

        Raises:
          UserError: they did not find each other.
        """
        try:
            jax.distributed.initialize(
                self.coordinator, self.processes, self.process, heartbeat_timeout_seconds=_HEARTBEAT_SECONDS
            )
        except (ValueError, RuntimeError) as error:
            raise UserError(f"the processes of the run did not find each other: {error}") from error
        if jax.process_index():
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (to the end of the process)


def allow_all_memory() -> None:
    """Lets jax take 95 % of a GPU, not 75 %, unless the user has said how much; to be called before jax runs."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")


def parallelism(axes: dict[str, int] | None) -> Parallelism | None:
    """A mesh of devices by role; None for one device.

    Raises:
      UserError: there are others.
    """
    if axes is None:
        if jax.process_count() > 1:
            raise UserError(f"{jax.process_count()} processes need --mesh, such as --mesh fsdp={jax.device_count()}")
        return None
    needed, present = math.prod(axes.values()), jax.device_count()
    if needed > present or (needed < present and jax.process_count() > 1):
        raise UserError(f"--mesh asks for {needed} devices, there are {present}")
    devices = np.array(jax.devices()[:needed]).reshape(tuple(axes.values()))
    roles: dict[str, Any] = {role: role for role in axes}
    return Parallelism(Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes)), **roles)


def state_shardings(parallel: Parallelism | None, state: Any, moe: MoEConfig, width: int) -> Any:
    """How every array of a training state is split; None on one device.

    Raises:
      UserError: the devices along an axis do not divide what it splits.
    """
    if parallel is None:
        return None
    try:
        specs = parallel.specs(moe, width)
    except ValueError as error:
        raise UserError(f"--mesh does not fit the model: {error}") from error

    def one(path: tuple, array: jax.ShapeDtypeStruct) -> NamedSharding:
        names = [getattr(key, "key", None) for key in path]
        stack = next((at for at, name in enumerate(names) if str(name).startswith(_STACKS)), None)
        # Of a layer by itself, a number follows the stack's name; otherwise its arrays have an axis of layers.
        leading = () if stack is None or isinstance(path[stack + 1], SequenceKey) else (None,)
        if not array.ndim or names[-1] == "selection_bias":
            spec = P()
        elif "moe" in names and names[-1] in specs:
            spec = P(*leading, *specs[names[-1]])
        else:
            spec = P(*leading, *parallel.dense_spec(array.shape[len(leading) :]))
        return NamedSharding(mesh_of(parallel), spec)

    return jax.tree_util.tree_map_with_path(one, state)
