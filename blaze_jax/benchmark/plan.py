"""Memory of a compiled program by XLA's own plan."""

from typing import NamedTuple

MIB = 2**20


class MemoryPlan(NamedTuple):
    """Bytes of a compiled program by XLA's own plan.

    Attributes:
      arguments: held by the caller.
      outputs: results that are no argument's memory.
      temporaries: alive at some time inside.
    """

    arguments: int
    outputs: int
    temporaries: int

    @property
    def peak(self) -> int:
        """Beyond the arguments: results and temporaries."""
        return self.outputs + self.temporaries

    @property
    def total(self) -> int:
        return self.arguments + self.peak


def plan_of(analysis) -> MemoryPlan | None:
    """The plan from `compiled.memory_analysis()`, None where the platform gives none."""
    if analysis is None:
        return None
    return MemoryPlan(
        analysis.argument_size_in_bytes,
        analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        analysis.temp_size_in_bytes,
    )
