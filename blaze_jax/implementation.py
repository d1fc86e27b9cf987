"""Which implementation of the kernels a call runs on."""

from types import ModuleType
from typing import Literal

from pallas_kernels import xla

Implementation = Literal["mosaic_gpu", "xla"]


def kernels_for(implementation: Implementation | None) -> ModuleType:
    """The module that holds the kernels: the best that can run here for None, otherwise the one demanded.

    Raises:
      NotImplementedError: the implementation demanded cannot run here.
      ValueError: there is no implementation of that name.
    """
    if implementation in (None, "xla"):
        return xla
    if implementation == "mosaic_gpu":
        raise NotImplementedError(
            f"{implementation=} is not available: this release has no Hopper kernels yet; use 'xla' or None"
        )
    raise ValueError(f"{implementation=} must be None, 'mosaic_gpu' or 'xla'")
