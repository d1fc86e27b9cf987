"""The devices of a run: one, or those of a mesh in one process or several."""

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import P
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from blaze_jax import MoEConfig, Parallelism
from blaze_jax.benchmark.mesh import mesh_of
from train_example.errors import UserError

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


@dataclass(frozen=True)
class Devices:
    """Where arrays are, and who does what; of one device without `parallel`."""

    parallel: Parallelism | None = None

    @staticmethod
    def of(mesh: dict[str, int] | None) -> "Devices":
        """Devices by role.

        Raises:
          UserError: there are others.
        """
        if mesh is None:
            if jax.process_count() > 1:
                raise UserError(
                    f"{jax.process_count()} processes need --mesh, such as --mesh fsdp={jax.device_count()}"
                )
            return Devices()
        needed, present = math.prod(mesh.values()), jax.device_count()
        if needed > present or (needed < present and jax.process_count() > 1):
            raise UserError(f"--mesh asks for {needed} devices, there are {present}")
        roles: dict[str, Any] = {role: role for role in mesh}
        return Devices(Parallelism(mesh_of(mesh), **roles))

    @property
    def count(self) -> int:
        return 1 if self.parallel is None else self._mesh.size

    @property
    def _mesh(self) -> Mesh:
        assert self.parallel is not None
        assert isinstance(self.parallel.mesh, Mesh)
        return self.parallel.mesh

    def shardings(self, state: Any, moe: MoEConfig, width: int) -> Any:
        """How every array of a training state is split; None on one device.

        Raises:
          UserError: the devices along an axis do not divide what it splits.
        """
        if self.parallel is None:
            return None
        try:
            specs = self.parallel.specs(moe, width)
        except ValueError as error:
            raise UserError(f"--mesh does not fit the model: {error}") from error
        dense_spec = self.parallel.dense_spec

        def one(path: tuple, array: jax.ShapeDtypeStruct) -> NamedSharding:
            names = [getattr(key, "key", None) for key in path]
            if not array.ndim or names[-1] == "selection_bias":
                spec = P()
            elif "moe" in names and names[-1] in specs:
                spec = P(None, *specs[names[-1]])
            elif any(name in names for name in _STACKS):
                spec = P(None, *dense_spec(array.shape[1:]))
            else:
                spec = dense_spec(array.shape)
            return NamedSharding(self._mesh, spec)

        return jax.tree_util.tree_map_with_path(one, state)

    @property
    def everywhere(self) -> NamedSharding | None:
        """What is whole on every device; None on one device."""
        return None if self.parallel is None else NamedSharding(self._mesh, P())

    def split(self, starts: np.ndarray, read: Callable[[np.ndarray], np.ndarray], length: int) -> Any:
        """`read(starts)`, of which each process reads what its devices need: `(A, M, length)` for `(A, M)` starts."""
        if self.parallel is None:
            return read(starts)
        by_sequence = NamedSharding(self._mesh, P(None, self.parallel.axes))
        shape = (*starts.shape, length)

        def mine(index: tuple[slice, ...] | None) -> np.ndarray:
            return read(starts if index is None else starts[index[:2]])

        return jax.make_array_from_callback(shape, by_sequence, mine)

    def whole(self, tree: Any) -> Any:
        """Arrays that one process can use alone."""
        if self.parallel is None:
            return tree
        if jax.process_count() == 1:
            return jax.device_get(tree)
        return jax.device_get(jax.jit(lambda t: t, out_shardings=self.everywhere)(tree))

    def any_process(self, wish: bool) -> bool:
        """Whether any process has the wish; the same in all."""
        if jax.process_count() == 1:
            return wish
        return bool(multihost_utils.process_allgather(np.array(wish)).any())
