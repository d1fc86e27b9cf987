"""Where the memory of a training step goes: `MemoryProfiler`."""

from blaze_jax.profiler.layer_memory import LayerMemory, LayerReport
from blaze_jax.profiler.memory_profiler import MemoryProfiler, Profile

__all__ = ["LayerMemory", "LayerReport", "MemoryProfiler", "Profile"]
